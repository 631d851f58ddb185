// Scores of a block of rows with a tile of keys, their running softmax, and the weighted sums of the tile's values.
#include "attention_tiles.h"

namespace piecework::tiles {
namespace {

// Scores: rows of `a` are interleaved, kLanes numbers apart. Sums: each row of `a` is a line of a tile.
enum class Kind { kScores, kSums };

// a [R, count] times b [count, columns]: factors[0] * c for scores, added to factors[r] * c for sums. T is float32, whose scores have no
// factor, or pairs.
template <class T>
struct Product {
  const T *a, *b;
  int b_stride, count;
  const float* factors;
  float* c;
  int c_stride;
};

// sums + one number or pair of a row times a vector of columns.
inline floats add_products(floats sums, const float* x, floats columns) { return sums + splat(*x) * columns; }

template <class Words>
inline floats add_products(floats sums, const uint32_t* x, Words columns) {
  return dot_pairs(sums, columns, reinterpret_cast<const bf16*>(x));
}

// N vectors of columns. The sum of a tile is made first and then added, so rounding errors grow with the number of tiles, not of keys.
template <Kind kind, int R, int N, class T>
inline void multiply(const Product<T>& product) {
  using Vector = std::conditional_t<std::is_same_v<T, float>, floats, words>;
  const T *a = product.a, *b = product.b;
  constexpr int row_step = kind == Kind::kScores ? 1 : kTile, step = kind == Kind::kScores ? kLanes : 1;
  floats sums[R][N];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sums[r][n] = floats{};
  for (int i = 0; i < product.count; ++i, a += step, b += product.b_stride) {
    Vector columns[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) columns[n] = load<Vector>(b + n * kLanes);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[r][n] = add_products(sums[r][n], a + r * row_step, columns[n]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      float* c = product.c + r * product.c_stride + n * kLanes;
      if constexpr (kind == Kind::kSums) store(c, load<floats>(c) * product.factors[r] + sums[r][n]);
      else store(c, std::is_same_v<T, float> ? sums[r][n] : sums[r][n] * product.factors[0]);
    }
  }
}

// All `columns`, a multiple of kLanes.
template <Kind kind, int R, class T>
void multiply_rows(Product<T> product, int columns) {
  constexpr int widest = R <= kRows / 2 ? 4 : 2;
  int left = columns / kLanes;
  const auto next = [&](auto count) {
    multiply<kind, R, decltype(count)::value>(product);
    product.b += count * kLanes, product.c += count * kLanes, left -= count;
  };
  while (left >= widest) next(std::integral_constant<int, widest>{});
  if constexpr (widest > 2) {
    if (left >= 2) next(std::integral_constant<int, 2>{});
  }
  if (left > 0) next(std::integral_constant<int, 1>{});
}

// Fill up with as few rows of zeros as the compiled sizes allow.
template <Kind kind, class T>
void multiply_block(int rows, const Product<T>& product, int columns) {
  if (rows == 1) return multiply_rows<kind, 1>(product, columns);
  if (rows == 2) return multiply_rows<kind, 2>(product, columns);
  if (rows == 3) return multiply_rows<kind, 3>(product, columns);
  if (rows == 4) return multiply_rows<kind, 4>(product, columns);
  if constexpr (kRows > 6) {
    if (rows <= 6) return multiply_rows<kind, 6>(product, columns);
    if (rows <= 8) return multiply_rows<kind, 8>(product, columns);
  }
  if constexpr (kRows == 12) {
    // Two halves with twice as many columns. Intel's CPUs load little more than one vector of 512 bits, or one number into all lanes, per
    // cycle.
    Product<T> other = product;
    other.a += kind == Kind::kScores ? kRows / 2 : kRows / 2 * kTile, other.c += kRows / 2 * product.c_stride;
    if (kind == Kind::kSums) other.factors += kRows / 2;
    multiply_rows<kind, kRows / 2>(product, columns);
    return multiply_rows<kind, kRows / 2>(other, columns);
  }
  multiply_rows<kind, kRows>(product, columns);
}

// Keys [low, high) of a tile that a row sees.
struct Span {
  int low, high;
};

Span visible(const Sight& sight, const Tile& tile, int row) {
  const int position = sight.position + row / sight.group;
  return {sight.window > 0 ? std::max(0, position + 1 - sight.window - tile.start) : 0, std::min(tile.count, position + 1 - tile.start)};
}

// Hide the scores [begin, end) of keys that a row does not see.
void hide(const Sight& sight, const Tile& tile, int row, int rows, int begin, int end, float* scores) {
  for (int r = 0; r < rows; ++r, scores += kTile) {
    const Span span = visible(sight, tile, row + r);
    for (int j = begin; j < end; j += kLanes) {
      const ints key = lane_numbers() + j;
      store(scores + j, choose((key >= span.low) & (key < span.high), load<floats>(scores + j), splat(-__builtin_inff())));
    }
  }
}

// Replace the scores [begin, end) by cap * tanh(score / cap), within 1e-6 of the cap.
void cap_scores(float cap, int rows, int begin, int end, float* scores) {
  constexpr float kTwiceLog2E = 2.88539008f, kFlat = 60.0f;  // Where the hyperbolic tangent is 1.
  for (int r = 0; r < rows; ++r, scores += kTile) {
    for (int j = begin; j < end; j += kLanes) {
      const floats x = load<floats>(scores + j) * (kTwiceLog2E / cap);
      const floats held = greater(splat(-kFlat), -greater(splat(-kFlat), -x));
      store(scores + j, cap - 2.0f * cap / (power_of_two(held) + 1.0f));
    }
  }
}

// Lower the scores [begin, end) of a row by `slope` per key of distance from `position` in the tile.
void lower(float slope, int position, int begin, int end, float* scores) {
  for (int j = begin; j < end; j += kLanes) {
    const floats distance = __builtin_convertvector(lane_numbers() + (j - position), floats);
    store(scores + j, load<floats>(scores + j) + distance * slope);
  }
}

}  // namespace

void Scratch::attend(const Sight& sight, const Tile& tile, int row, int rows) {
  const int low = visible(sight, tile, row).low, high = visible(sight, tile, row + rows - 1).high;
  if (low >= high) return;
  const int begin = low / kLanes * kLanes, end = round_up(high, kLanes);
  multiply_block<Kind::kScores>(rows, Product<float>{queries(row), keys + begin, kTile, head_size, nullptr, scores + begin, kTile}, end - begin);
  alignas(4 * kLanes) float kept[kLanes];
  weigh(sight, tile, row, rows, begin, end, kept);
  multiply_block<Kind::kSums>(rows, Product<float>{scores + low, values + low * padded, padded, high - low, kept, sums + row * padded, padded}, padded);
}

void Scratch::attend_pairs(const Sight& sight, const Tile& tile, int row, int rows, const Factors& factors) {
  if constexpr (kHasDots) {
    const int low = visible(sight, tile, row).low, high = visible(sight, tile, row + rows - 1).high;
    if (low >= high) return;
    const int begin = low / kLanes * kLanes, end = round_up(high, kLanes);
    const Product<uint32_t> score{pairs(queries(row)), pairs(keys) + begin, kTile, (head_size + 1) / 2, &factors.score, scores + begin, kTile};
    multiply_block<Kind::kScores>(rows, score, end - begin);
    if (factors.keys) scale_scores(rows, begin, end, factors.keys, scores);
    alignas(4 * kLanes) float kept[kLanes];
    weigh(sight, tile, row, rows, begin, end, kept);
    if (factors.values) scale_scores(rows, begin, end, factors.values, scores);
    for (int r = 0; r < rows; ++r) {
      float* line = scores + r * kTile;
      for (int j = begin / (2 * kLanes) * (2 * kLanes); j < end; j += 2 * kLanes) {
        const floats first = load<floats>(line + j), second = load<floats>(line + j + kLanes);
        store_bf16(reinterpret_cast<bf16*>(line) + j, first, second);
      }
    }
    const int first = low / 2, count = (high + 1) / 2 - first;
    const Product<uint32_t> sum{pairs(scores) + first, pairs(values) + first * padded, padded, count, kept, sums + row * padded, padded};
    multiply_block<Kind::kSums>(rows, sum, padded);
  }
}

void Scratch::weigh(const Sight& sight, const Tile& tile, int row, int rows, int begin, int end, float* kept) {
  if (sight.softcap > 0.0f) cap_scores(sight.softcap, rows, begin, end, scores);
  for (int r = 0; sight.slopes && r < rows; ++r)
    lower(slope(row + r), sight.position + (row + r) / sight.group - tile.start, begin, end, scores + r * kTile);
  if (visible(sight, tile, row).high < end || visible(sight, tile, row + rows - 1).low > begin) hide(sight, tile, row, rows, begin, end, scores);
  float *peak = peaks(row), *total = totals(row);
  const floats before = load<floats>(peak);
  for (int r = 0; r < rows; ++r) {
    const float* line = scores + r * kTile;
    floats most = load<floats>(line + begin);
    for (int j = begin + kLanes; j < end; j += kLanes) most = greater(most, load<floats>(line + j));
    peak[r] = std::max(peak[r], highest(most));
  }
  store(kept, power_of_two(before - load<floats>(peak)));
  for (int r = 0; r < rows; ++r) {
    float* line = scores + r * kTile;
    floats sum{};
    for (int j = begin; j < end; j += kLanes) {
      const floats weight = power_of_two(load<floats>(line + j) - peak[r]);
      store(line + j, weight);
      sum += weight;
    }
    store(total + r * kLanes, load<floats>(total + r * kLanes) * kept[r] + sum);
  }
}

Scratch::Scratch(int head_size, int value_size, int rows, bool prefers_dots)
    : head_size(head_size), value_size(value_size), padded(round_up(value_size, kLanes)), prefers_dots(prefers_dots) {
  static thread_local std::vector<float> memory;
  const size_t blocks = (rows + kRows - 1) / kRows, size = head_size, width = padded;
  const std::pair<float**, size_t> parts[] = {{&q_, blocks * kLanes * size}, {&keys, size * kTile}, {&values, kTile * width},
                                              {&sums, blocks * kRows * width}, {&scores, kRows * kTile}, {&peak_, blocks * kLanes},
                                              {&total_, blocks * kRows * kLanes}, {&slope_, blocks * kRows}};
  size_t needed = kLine;
  for (const auto& part : parts) needed += part.second + kLine;
  if (memory.size() < needed) memory.resize(needed);
  uintptr_t next = reinterpret_cast<uintptr_t>(memory.data());
  for (const auto& [place, count] : parts) {
    next = (next + kLine * sizeof(float) - 1) / (kLine * sizeof(float)) * (kLine * sizeof(float));
    *place = reinterpret_cast<float*>(next);
    next += count * sizeof(float);
  }
}

void Scratch::start(int rows) {
  const int blocks = (rows + kRows - 1) / kRows;
  std::fill_n(peak_, blocks * kLanes, kNothing);
  std::fill_n(total_, blocks * kRows * kLanes, 0.0f);
  std::fill_n(sums, blocks * kRows * padded, 0.0f);
}

}  // namespace piecework::tiles
