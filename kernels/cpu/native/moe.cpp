// A layer of experts as a C function.
#include "moe.h"

#include <limits>

#include "rows.h"

namespace piecework {
namespace {

constexpr int64_t kAllBytes = 64 << 20;  // Bytes of x and of results that are laid out at once.
constexpr int64_t kAlone = 1 << 18;      // Number of products that take as long as waking another thread.
constexpr float kLeastSum = 1e-20f;       // The smallest divisor of weights.
constexpr float kSteepness = 1.702f;     // Factor in GPT-OSS's gates.

}  // namespace

void choose(const Routing& routing, const bf16* logits, int64_t* ids, float* weights) {
  static thread_local std::vector<float> scores, ranking;
  const int count = routing.router.rows;
  scores.resize(count);
  float largest = to_float(logits[0]), all = 0.0f;
  for (int i = 1; i < count; ++i) largest = std::max(largest, to_float(logits[i]));
#pragma omp simd reduction(+ : all)
  for (int i = 0; i < count; ++i) {
    const float score = routing.is_sigmoid ? 1.0f / (1.0f + exponential(-to_float(logits[i]))) : exponential(to_float(logits[i]) - largest);
    scores[i] = score;
    all += score;
  }
  ranking = scores;
  if (routing.correction)
    for (int i = 0; i < count; ++i) ranking[i] += routing.correction[i];
  float sum = 0.0f;
  for (int j = 0; j < routing.top_k; ++j) {
    const int best = static_cast<int>(std::max_element(ranking.begin(), ranking.end()) - ranking.begin());
    ids[j] = best - routing.first;
    weights[j] = routing.is_sigmoid ? scores[best] : scores[best] / all;
    sum += weights[j];
    ranking[best] = -std::numeric_limits<float>::infinity();
  }
  for (int j = 0; j < routing.top_k; ++j) weights[j] *= routing.is_renormalized ? routing.scale / (sum + kLeastSum) : routing.scale;
}

void Mixture::group(const Experts& experts, const Choice& choice) {
  const int all = choice.tokens * choice.each;
  counts_.assign(experts.count + 1, 0);
  places_.resize(all);
  for (int i = 0; i < all; ++i) {
    const bool is_held = choice.ids[i] >= 0 && choice.ids[i] < experts.count;
    places_[i] = is_held ? static_cast<int>(choice.ids[i]) : -1;
    if (is_held) ++counts_[places_[i] + 1];
  }
  groups_.clear();
  for (int expert = 0, first = 0; expert < experts.count; ++expert) {
    const int size = counts_[expert + 1], parts = (size + kMostRows - 1) / kMostRows;
    counts_[expert + 1] = first;  // The position of the expert's next pair.
    for (int part = 0, begin = first; part < parts; ++part) {
      const int end = first + static_cast<int>(static_cast<int64_t>(size) * (part + 1) / parts);
      groups_.push_back({expert, begin, end - begin});
      begin = end;
    }
    first += size;
  }
  const int pairs = groups_.empty() ? 0 : groups_.back().first + groups_.back().size;
  pairs_.resize(pairs);
  group_of_.resize(pairs);
  for (int i = 0; i < all; ++i) {
    if (places_[i] < 0) continue;
    places_[i] = counts_[places_[i] + 1]++;
    pairs_[places_[i]] = i;
  }
  for (size_t number = 0; number < groups_.size(); ++number)
    std::fill_n(group_of_.begin() + groups_[number].first, groups_[number].size, static_cast<int>(number));
  grow(activated_, static_cast<size_t>(pairs) * experts.down.columns);
  grow(results_, static_cast<size_t>(pairs) * (experts.down.rows / experts.count));
}

const bf16* Mixture::weighed(const bf16* row, float weight, int size) {
  static thread_local std::vector<bf16> result;
  result.resize(size);
#pragma omp simd
  for (int i = 0; i < size; ++i) result[i] = rounded(to_float(row[i]) * weight);
  return result.data();
}

// Squared ReLU.
void Mixture::square(const float* ups, bf16* to) {
#pragma omp simd
  for (int r = 0; r < kPanel; ++r) {
    const float up = std::max(as_rounded(ups[r]), 0.0f);
    to[r] = rounded(up * up);
  }
}

void Mixture::activate(const float* gates, const float* ups, float limit, bf16* to) {
  if (limit == 0.0f) {
#pragma omp simd
    for (int r = 0; r < kPanel; ++r) to[r] = rounded(silu(as_rounded(gates[r])) * as_rounded(ups[r]));
    return;
  }
  if (limit < 0.0f) {
#pragma omp simd
    for (int r = 0; r < kPanel; ++r) to[r] = rounded(gelu_tanh(as_rounded(gates[r])) * as_rounded(ups[r]));
    return;
  }
#pragma omp simd
  for (int r = 0; r < kPanel; ++r) {
    const float gate = std::min(as_rounded(gates[r]), limit), up = std::min(std::max(as_rounded(ups[r]), -limit), limit);
    to[r] = rounded((up + 1.0f) * gate / (1.0f + exponential(-kSteepness * gate)));
  }
}

}  // namespace piecework

// out [T, N] = the sums over the experts in ids [T, k], times weights [T, k], for x [T, N], whose rows are `stride` numbers apart.
extern "C" void piecework_moe(const void* experts, const void* x, int64_t stride, const int64_t* ids, const float* weights, int tokens, int each,
                              void* out, int threads) {
  using namespace piecework;
  const Experts& layer = *static_cast<const Experts*>(experts);
  const int hidden = layer.down.rows / layer.count;
  const int64_t pair_bytes = sizeof(float) * (InputRows::size(1, std::max(hidden, layer.down.columns)) + hidden);
  const int at_once = static_cast<int>(std::max<int64_t>(1, kAllBytes / (pair_bytes * each)));
  Mixture& shared = Mixture::of_this_thread();
  for (int start = 0; start < tokens; start += at_once) {
    const int64_t first = static_cast<int64_t>(start) * each;
    const Mixture::Choice choice{ids + first, weights + first, std::min(at_once, tokens - start), each};
    shared.group(layer, choice);
    const int64_t products = int64_t{choice.tokens} * each * hidden * layer.down.columns * 3;
    const int helpers = products < kAlone ? 1 : threads;
    Team team(helpers);
#pragma omp parallel num_threads(helpers)
    {
      team.set_size(omp_get_num_threads());
      int phase = 0;
      shared.run(
          team, phase, layer, choice, [&](int t) { return static_cast<const bf16*>(x) + (start + t) * stride; },
          [&](int t, int first, const float* sums, int count) {
            bf16* to = static_cast<bf16*>(out) + static_cast<int64_t>(start + t) * hidden + first;
#pragma omp simd
            for (int i = 0; i < count; ++i) to[i] = rounded(sums[i]);
          },
          [] {});
    }
  }
}
