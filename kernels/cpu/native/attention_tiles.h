// Blocks of query rows over tiles of keys: their memory, how it is filled, and how a block processes a tile. Products are in float32, or,
// if that is faster, dot products of pairs of neighbouring bfloat16 numbers. Weights are then rounded to bfloat16, as on GPUs. Sums are in
// float32.
#pragma once
#include <vector>

#include "simd.h"

namespace piecework {

// Whether blocks of rows in bfloat16 use its dot products instead of float32 FMAs (ways.cpp).
bool prefers_dots();

}  // namespace piecework

namespace piecework::tiles {

constexpr int kRows = std::min(kBlockRows, kLanes);  // Query rows that are multiplied together.
constexpr int kTile = 64;                            // Keys that are processed together.
constexpr float kNothing = -1e30f;                   // The peak of a row that has seen no key.

inline int round_up(int number, int multiple) { return (number + multiple - 1) / multiple * multiple; }

template <int... I>
inline ints lane_numbers(std::integer_sequence<int, I...>) {
  return ints{I...};
}

inline ints lane_numbers() { return lane_numbers(std::make_integer_sequence<int, kLanes>{}); }

inline floats choose(ints mask, floats yes, floats no) {
  return bits_as<floats>((mask & bits_as<ints>(yes)) | (~mask & bits_as<ints>(no)));
}

// The larger number; `b` if one of them is a NaN.
inline floats greater(floats a, floats b) { return a > b ? a : b; }

template <int Distance, int... I>
inline words swapped(words v, std::integer_sequence<int, I...>) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(v, v, (I ^ Distance)...);
#else
  return __builtin_shuffle(v, words{static_cast<uint32_t>(I ^ Distance)...});
#endif
}

// Join every lane with the lane at `Distance`, then with nearer ones, until each lane holds the result of all.
template <int Distance = kLanes / 2, class Join>
inline float folded(floats v, Join join) {
  v = join(v, bits_as<floats>(swapped<Distance>(bits_as<words>(v), std::make_integer_sequence<int, kLanes>{})));
  if constexpr (Distance > 1) return folded<Distance / 2>(v, join);
  return v[0];
}

inline float highest(floats v) { return folded(v, greater); }

inline float sum_of(floats v) {
  return folded(v, [](floats a, floats b) { return a + b; });
}

// 2^x within 2e-7 of its value for x in [-126, 126], and 0 from -127 down: a polynomial on [-0.5, 0.5] with its exponent shifted. NaN stays
// NaN.
inline floats power_of_two(floats x) {
  constexpr float kWhole = 12582912.0f;  // 1.5 * 2^23: a number that is added to it is rounded to an integer, in its lowest bits.
  x = greater(splat(-127.0f), x);        // There p is 1, and its exponent becomes 0.
  const floats shifted = x + kWhole;
  const floats r = x - (shifted - kWhole);
  floats p = r * 1.3264727e-3f + 9.6715127e-3f;
  p = p * r + 5.5507337e-2f;
  p = p * r + 2.4022242e-1f;
  p = p * r + 6.9314698e-1f;
  p = p * r + 1.0f;
  return bits_as<floats>(bits_as<words>(p) + (bits_as<words>(shifted) << 23));
}

// One step of a transposition: interleave the first or the last halves of `a` and `b`.
template <int First, int... I>
inline words interleaved(words a, words b, std::integer_sequence<int, I...>) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(a, b, (First + I / 2 + I % 2 * kLanes)...);
#else
  return __builtin_shuffle(a, b, words{static_cast<uint32_t>(First + I / 2 + I % 2 * kLanes)...});
#endif
}

// Transpose by repeated perfect shuffles of the upper and the lower half of the rows.
inline void transpose(words (&rows)[kLanes]) {
  constexpr auto numbers = std::make_integer_sequence<int, kLanes>{};
#pragma GCC unroll 4
  for (int width = 1; width < kLanes; width *= 2) {
    words mixed[kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < kLanes / 2; ++i) {
      mixed[2 * i] = interleaved<0>(rows[i], rows[i + kLanes / 2], numbers);
      mixed[2 * i + 1] = interleaved<kLanes / 2>(rows[i], rows[i + kLanes / 2], numbers);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) rows[i] = mixed[i];
  }
}

template <class T>
constexpr int kNumbersInWord = sizeof(words) / (kLanes * sizeof(T));

// Transpose kLanes words of kLanes rows to `taken` lines of to [taken, stride].
template <class T>
inline void store_transposed(words (&rows)[kLanes], int taken, floats factors, float* to, int stride) {
  transpose(rows);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if constexpr (kNumbersInWord<T> == 1) {
      if (i < taken) store(to + i * stride, bits_as<floats>(rows[i]) * factors);
    } else {
      if (2 * i < taken) store(to + 2 * i * stride, bits_as<floats>(rows[i] << 16) * factors);
      if (2 * i + 1 < taken) store(to + (2 * i + 1) * stride, bits_as<floats>(rows[i] & 0xffff0000u) * factors);
    }
  }
}

// Transpose `count` rows, at most kLanes, of pairs of `size` bfloat16 numbers to columns of to [size / 2, stride]; other columns are zeros.
// pairs(row, begin) loads 2 * kLanes numbers of a row, with zeros after its end.
template <class Pairs>
inline void transpose_pairs(int count, int size, uint32_t* to, int stride, Pairs pairs) {
  for (int begin = 0; begin < size; begin += 2 * kLanes, to += kLanes * stride) {
    words rows[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) rows[i] = i < count ? pairs(i, begin) : words{};
    transpose(rows);
    const int taken = std::min(kLanes, (size - begin + 1) / 2);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i)
      if (i < taken) store(to + i * stride, rows[i]);
  }
}

// Load up to 2 * kLanes bfloat16 numbers, and zeros for the rest.
inline words load_pairs(const bf16* from, int count) {
  if (count >= 2 * kLanes) return load<words>(from);
  words some{};
  std::memcpy(&some, from, count * sizeof(bf16));
  return some;
}

// Interleave the numbers of `a` and `b`: their first halves for First 0, the others for First kLanes.
template <int First, int... I>
inline words in_turn(words a, words b, std::integer_sequence<int, I...>) {
  using shorts = uint16_t __attribute__((vector_size(4 * kLanes)));
  const shorts x = bits_as<shorts>(a), y = bits_as<shorts>(b);
#if defined(__clang__) || __GNUC__ >= 12
  return bits_as<words>(__builtin_shufflevector(x, y, (First + I / 2 + I % 2 * 2 * kLanes)...));
#else
  return bits_as<words>(__builtin_shuffle(x, y, shorts{static_cast<uint16_t>(First + I / 2 + I % 2 * 2 * kLanes)...}));
#endif
}

// Combine two rows of bfloat16 to one row of pairs, to [padded]. pairs(row, begin) is as in `transpose_pairs`.
template <class Pairs>
inline void join_rows(int padded, uint32_t* to, Pairs pairs) {
  constexpr auto numbers = std::make_integer_sequence<int, 2 * kLanes>{};
  for (int begin = 0; begin < padded; begin += 2 * kLanes) {
    const words first = pairs(0, begin), second = pairs(1, begin);
    store(to + begin, in_turn<0>(first, second, numbers));
    if (begin + kLanes < padded) store(to + begin + kLanes, in_turn<kLanes>(first, second, numbers));
  }
}

// Transpose `count` rows, at most kLanes, of `size` numbers to float32 columns of to [size, stride], each times its factor; other columns
// are zeros.
template <class T>
inline void widen_transposed(const T* const* from, int count, int size, floats factors, float* to, int stride) {
  constexpr int step = kLanes * kNumbersInWord<T>;
  static constexpr T zeros[step] = {};
  words rows[kLanes];
  int begin = 0;
  for (; begin + step <= size; begin += step) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) std::memcpy(&rows[i], i < count ? from[i] + begin : zeros, sizeof(words));
    store_transposed<T>(rows, step, factors, to + begin * stride, stride);
  }
  if (begin < size) {
    for (int i = 0; i < kLanes; ++i) {
      rows[i] = words{};
      if (i < count) std::memcpy(&rows[i], from[i] + begin, (size - begin) * sizeof(T));
    }
    store_transposed<T>(rows, size - begin, factors, to + begin * stride, stride);
  }
}

// Widen one row of `size` numbers to float32, with zeros up to `padded`.
template <class T>
inline void widen_row(const T* __restrict from, float* __restrict to, int size, int padded) {
#pragma omp simd
  for (int i = 0; i < size; ++i) to[i] = to_float(from[i]);
  for (int i = size; i < padded; ++i) to[i] = 0.0f;
}

// Which keys the rows of an item see. A token has `group` rows, and the first token is at `position`. Window 0 means all keys up to the
// token. `softcap` limits scores, in base-2 logarithms; 0 means no limit. `slopes` says whether scores decrease with the distance of keys.
struct Sight {
  int position, group, window;
  float softcap;
  bool slopes;
};

// Keys [start, start + count) of a request.
struct Tile {
  int start, count;
};

// Factors of bfloat16 products: one for all scores, and one per key for scores and weights, [kTile] or null.
struct Factors {
  float score;
  const float *keys, *values;
};

// Multiply scores [rows][kTile] of the keys [begin, end) by a number per key.
inline void scale_scores(int rows, int begin, int end, const float* by, float* scores) {
  for (int r = 0; r < rows; ++r, scores += kTile)
    for (int j = begin; j < end; j += kLanes) store(scores + j, load<floats>(scores + j) * load<floats>(by + j));
}

// The working memory of one thread, for up to `rows` query rows at a time.
struct Scratch {
  Scratch(int head_size, int value_size, int rows, bool prefers_dots);

  // For the first row of a block of kRows: q [D, kLanes] and peaks [kLanes]. For any row: totals [kLanes], whose sum is the total.
  float* queries(int row) const { return q_ + row / kRows * kLanes * head_size; }
  float* peaks(int row) const { return peak_ + row / kRows * kLanes; }
  float* totals(int row) const { return total_ + row * kLanes; }
  float peak(int row) const { return peaks(row)[row % kRows]; }
  float total(int row) const { return sum_of(load<floats>(totals(row))); }

  // For any row: the decrease of its scores per key, in base-2 logarithms. Used if `Sight` has slopes.
  float& slope(int row) const { return slope_[row]; }

  // Start `rows` new rows.
  void start(int rows);

  // Attend `rows` rows, at most kRows, from `row` on, over the loaded tile.
  void attend(const Sight& sight, const Tile& tile, int row, int rows);

  // The same with pairs: two numbers of a query or a key, or two keys of a weight or a value.
  void attend_pairs(const Sight& sight, const Tile& tile, int row, int rows, const Factors& factors);

  // Turn scores [rows, kTile] of the keys [begin, end), multiples of kLanes, into weights, with 0 for keys that a row does not see. Update
  // peaks and totals. kept [kLanes] gets the factor of each row's earlier sums under its new peak.
  void weigh(const Sight& sight, const Tile& tile, int row, int rows, int begin, int end, float* kept);

  // The same memory as pairs: queries [D / 2, kLanes], keys [D / 2, kTile], values [kTile / 2, padded], weights [kRows, kTile], of which
  // the first half is used.
  static uint32_t* pairs(float* of) { return reinterpret_cast<uint32_t*>(of); }

  const int head_size, value_size, padded;  // D, E, and E rounded up to a multiple of kLanes.
  float *keys, *values, *sums;              // [D, kTile], [kTile, padded], [rows, padded]
  float* scores;                            // [kRows, kTile]
  const bool prefers_dots;                  // Whether blocks of rows in bfloat16 use its dot products.

 private:
  static constexpr size_t kLine = 16;  // Numbers in a cache line.
  float *q_, *peak_, *total_, *slope_;
};

}  // namespace piecework::tiles
