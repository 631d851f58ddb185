// Chooses a token of each row: `argmax`, `sample_filtered` and `mask_logits` of kernels/reference.py, with exactly their tokens, and the
// functions of kernels/plain_sampling.py.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "common.h"
#include "sampling.h"

namespace piecework {
namespace {

constexpr int kBlock = 64;              // Probabilities that are compared before one is examined.
constexpr uint32_t kSearch = 6u << 23;  // Each search goes down to a 64th of the previous limit.
constexpr int kPickBlock = 256;         // Probabilities whose sum is chosen first.
constexpr int kFew = 32;                // Candidates that are sorted instead of halved.
constexpr float kUnit = 4503599627370496.0f;
constexpr uint32_t kOne = 0x3f800000u;

struct Filters {
  int64_t top_k;
  float top_p, min_p;
  double uniform;
};

// What a search has found: the inverted bits of a probability, so that the likeliest is the smallest, then the id. No two are equal.
using Candidates = std::vector<uint64_t>;
using Place = Candidates::iterator;

uint32_t bits_of(uint64_t candidate) { return ~static_cast<uint32_t>(candidate >> 32); }

float probability(uint64_t candidate) {
  const uint32_t bits = bits_of(candidate);
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// The probability as a multiple of 1 / kUnit; 0 if it is not a probability.
int64_t weight(uint64_t candidate) { return bits_of(candidate) <= kOne ? static_cast<int64_t>(probability(candidate) * kUnit) : 0; }

// The bits of non-negative numbers have the order of the numbers.
uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

uint32_t largest(const float* row, int vocab) {
  uint32_t most = 0;
  for (int i = 0; i < vocab; ++i) most = std::max(most, bits_of(row[i]));
  return most;
}

void find(const float* row, int vocab, uint32_t least, Candidates& found) {
  found.clear();
  for (int begin = 0; begin < vocab; begin += kBlock) {
    const int end = std::min(begin + kBlock, vocab);
    uint32_t any = 0;
    for (int i = begin; i < end; ++i) any |= bits_of(row[i]) >= least;
    if (any == 0) continue;
    for (int i = begin; i < end; ++i)
      if (bits_of(row[i]) >= least) found.push_back(static_cast<uint64_t>(~bits_of(row[i])) << 32 | static_cast<uint32_t>(i));
  }
}

int64_t mass_of(Place begin, Place end) {
  int64_t mass = 0;
  for (; begin != end; ++begin) mass += weight(*begin);
  return mass;
}

// Return the candidate at which the running mass exceeds `target`, in order, with earlier ones moved to the front; or `end`.
Place where_mass_exceeds(Place begin, Place end, int64_t target) {
  const Place none = end;
  while (end - begin > kFew) {
    const Place middle = begin + (end - begin) / 2;
    std::nth_element(begin, middle, end);
    const int64_t mass = mass_of(begin, middle);
    if (mass > target) {
      end = middle;
    } else {
      target -= mass;
      begin = middle;
    }
  }
  std::sort(begin, end);
  for (; begin != end; ++begin)
    if ((target -= weight(*begin)) < 0) return begin;
  return none;
}

// Move the candidates that all filters keep to the front, and return their end. If that is the end of all, the filters may also keep
// candidates that were not found.
Place keep(Candidates& found, const Filters& filters, int vocab) {
  const bool by_k = filters.top_k < vocab, by_p = filters.top_p < 1.0f;
  Place end = found.end();
  if (by_k && filters.top_k < end - found.begin()) {
    std::nth_element(found.begin(), found.begin() + filters.top_k, end);
    end = found.begin() + filters.top_k;
  }
  const float least = filters.min_p * probability(*std::min_element(found.begin(), end));
  Place kept = least > 0.0f ? std::partition(found.begin(), end, [&](uint64_t one) { return probability(one) >= least; }) : end;
  if (by_p) {
    const int64_t mass = by_k ? mass_of(found.begin(), end) : static_cast<int64_t>(kUnit);
    const double goal = std::max(static_cast<double>(filters.top_p) * static_cast<double>(mass), 1.0);
    const Place last = where_mass_exceeds(found.begin(), kept, static_cast<int64_t>(std::ceil(goal)) - 1);
    if (last != kept) kept = last + 1;
  }
  return kept;
}

int64_t draw(const float* row, int vocab, const Filters& filters, Candidates& found) {
  uint32_t least = largest(row, vocab);
  for (;;) {
    least = least > kSearch ? least - kSearch : 0;
    find(row, vocab, least, found);
    const int64_t count = static_cast<int64_t>(found.size());
    // With fewer candidates than top-k, the mass for top-p is unknown.
    if (least > 0 && filters.top_k < vocab && filters.top_k > count) continue;
    const Place end = keep(found, filters, vocab);
    if (least > 0 && end == found.end() && filters.top_k > count) continue;
    const int64_t mass = mass_of(found.begin(), end);
    const int64_t target = std::min(static_cast<int64_t>(filters.uniform * static_cast<double>(mass)), mass - 1);
    const Place drawn = where_mass_exceeds(found.begin(), end, target);
    return static_cast<uint32_t>(drawn == end ? found.front() : *drawn);
  }
}

// The inverse of `ordered`.
float number_at(int32_t place) {
  const int32_t bits = place ^ ((place >> 31) & 0x7fffffff);
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

int32_t highest(const float* row, int vocab) {
  int32_t most = INT32_MIN;
#pragma omp simd reduction(max : most)
  for (int i = 0; i < vocab; ++i) most = std::max(most, ordered(row[i]));
  return most;
}

int64_t argmax(const float* row, int vocab) {
  const int32_t most = highest(row, vocab);
  for (int begin = 0;; begin += kBlock) {
    const int end = std::min(begin + kBlock, vocab);
    uint32_t any = 0;
    for (int i = begin; i < end; ++i) any |= ordered(row[i]) == most;
    for (int i = begin; any != 0; ++i)
      if (ordered(row[i]) == most) return i;
  }
}

// Compute e^((logits - highest) / temperature) of `count` logits, and return the sum.
float weigh(const float* logits, int count, float highest, float factor, float* weights) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int i = 0; i < count; ++i) {
    // The smallest value of `exponential` becomes 0, without a branch, which would prevent vectorisation.
    const float weight = exponential((logits[i] - highest) * factor) - 2e-38f;
    weights[i] = std::max(weight, 0.0f);
    sum += weights[i];
  }
  return sum;
}

// The factor of logits: 1 / temperature, which is finite for all temperatures that are not 0 in float32's normal range.
float factor_of(float temperature) { return std::min(1.0f / temperature, 3e38f); }

void softmax(float* row, int vocab, float temperature) {
  const int32_t most = highest(row, vocab);
  if (!is_finite(most)) return static_cast<void>(std::fill(row, row + vocab, NAN));
  const float sum = weigh(row, vocab, number_at(most), factor_of(temperature), row);
  for (int i = 0; i < vocab; ++i) row[i] /= sum;
}

// The first index whose running sum exceeds `share` of the whole sum, among those with a weight above 0. If rounding leaves none, the last
// of these.
int invert(const float* weights, int count, float share) {
  float whole = 0.0f, sum = 0.0f;
  for (int i = 0; i < count; ++i) whole += weights[i];
  const float target = share * whole;
  int last = 0;
  for (int i = 0; i < count && sum <= target; ++i) {
    if (!(weights[i] > 0.0f)) continue;
    sum += weights[i];
    last = i;
  }
  return last;
}

struct Weights {
  std::vector<float> tokens, blocks;
};

// The first number chooses a block, the second one a token in it.
int64_t pick(const float* row, int vocab, float temperature, const float* uniform, Weights& weights) {
  const int32_t most = highest(row, vocab);
  if (!is_finite(most)) return -1;
  const int blocks = (vocab + kPickBlock - 1) / kPickBlock;
  weights.tokens.resize(vocab), weights.blocks.resize(blocks);
  const float top = number_at(most), factor = factor_of(temperature);
  for (int block = 0; block < blocks; ++block) {
    const int begin = block * kPickBlock;
    weights.blocks[block] = weigh(row + begin, std::min(kPickBlock, vocab - begin), top, factor, weights.tokens.data() + begin);
  }
  const int begin = invert(weights.blocks.data(), blocks, uniform[0]) * kPickBlock;
  return begin + invert(weights.tokens.data() + begin, std::min(kPickBlock, vocab - begin), uniform[1]);
}

// Most words of a grammar's mask allow all their tokens or none.
void mask(float* row, const uint32_t* bits, int vocab) {
  for (int begin = 0; begin < vocab; begin += 32) {
    const uint32_t word = bits[begin / 32];
    const int count = std::min(32, vocab - begin);
    float* const values = row + begin;
    if (word == 0xffffffffu) continue;
    if (word == 0) {
      for (int i = 0; i < count; ++i) values[i] = -INFINITY;
    } else {
      for (int i = 0; i < count; ++i) values[i] = (word >> i) & 1 ? values[i] : -INFINITY;
    }
  }
}

// SplitMix64's output mix, as in `uniform` of runtime/sampling/sampler.py.
uint64_t mix(uint64_t z) {
  z += 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

}  // namespace

int64_t choose_token(float* row, int vocab, const Draw& how, int64_t position) {
  if (how.choosing == kLikeliest) {
    const int64_t token = argmax(row, vocab);
    return is_finite(ordered(row[token])) ? token : -1;
  }
  // 53 bits as a number in [0, 1), or the first 24 bits and the next 24.
  const uint64_t bits = mix(mix(how.seed) + static_cast<uint64_t>(position)) >> 11;
  if (how.choosing == kPlain) {
    const float halves[] = {(bits >> 29) * 0x1p-24f, (bits >> 5 & 0xFFFFFF) * 0x1p-24f};
    static thread_local Weights weights;
    return pick(row, vocab, how.temperature, halves, weights);
  }
  static thread_local Candidates found;
  softmax(row, vocab, how.temperature);
  return std::isfinite(row[0]) ? draw(row, vocab, {std::min<int64_t>(how.top_k, vocab), how.top_p, how.min_p, bits * 0x1p-53}, found) : -1;
}

}  // namespace piecework

// logits: rows of `vocab` float32, `stride` apart. bits: `count` rows of ceil(vocab / 32) words.
extern "C" void piecework_mask_logits(float* logits, int64_t stride, const int64_t* rows, const uint32_t* bits, int count, int vocab) {
  for (int place = 0; place < count; ++place)
    piecework::mask(logits + rows[place] * stride, bits + place * static_cast<int64_t>((vocab + 31) / 32), vocab);
}

// rows: `count` rows of `vocab` float32, `stride` apart. tokens: int64.
extern "C" void piecework_argmax(const float* rows, int64_t stride, int count, int vocab, int64_t* tokens, int threads) {
#pragma omp parallel for num_threads(std::max(1, std::min(threads, count)))
  for (int row = 0; row < count; ++row) tokens[row] = piecework::argmax(rows + row * stride, vocab);
}

// logits: `count` rows of `vocab` float32, `stride` apart. They are replaced by their softmax.
extern "C" void piecework_softmax(float* logits, int64_t stride, int count, int vocab, const float* temperature, int threads) {
#pragma omp parallel for num_threads(std::max(1, std::min(threads, count)))
  for (int row = 0; row < count; ++row) piecework::softmax(logits + row * stride, vocab, temperature[row]);
}

// The same logits. uniform: two numbers per row. tokens: int64.
extern "C" void piecework_sample_plain(const float* logits, int64_t stride, int count, int vocab, const float* temperature, const float* uniform,
                                       int64_t* tokens, int threads) {
#pragma omp parallel num_threads(std::max(1, std::min(threads, count)))
  {
    static thread_local piecework::Weights weights;
#pragma omp for schedule(dynamic)
    for (int row = 0; row < count; ++row)
      tokens[row] = piecework::pick(logits + row * stride, vocab, temperature[row], uniform + 2 * row, weights);
  }
}

// probs: `rows` rows of `vocab` float32, `stride` apart. Filters of each row are as in reference.py. tokens: int64.
extern "C" void piecework_sample_filtered(const float* probs, int64_t stride, int rows, int vocab, const int64_t* top_k, const float* top_p,
                                          const float* min_p, const double* uniform, int64_t* tokens, int threads) {
#pragma omp parallel num_threads(std::max(1, std::min(threads, rows)))
  {
    static thread_local piecework::Candidates found;
#pragma omp for schedule(dynamic)
    for (int row = 0; row < rows; ++row)
      tokens[row] = piecework::draw(probs + row * stride, vocab, {top_k[row], top_p[row], min_p[row], uniform[row]}, found);
  }
}
