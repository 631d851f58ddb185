// Blocks of query rows over tiles of keys, in float32: their memory, how it is filled, and what a block makes of a tile.
#pragma once
#include <utility>
#include <vector>

#include "common.h"

namespace piecework::tiles {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kRows = 12;
#elif defined(__AVX2__)
constexpr int kLanes = 8, kRows = 6;
#else
constexpr int kLanes = 4, kRows = 4;
#endif
// kRows: query rows that are multiplied together; with two vectors of sums each, all sums stay in registers.
constexpr int kTile = 64;           // keys that are looked at together
constexpr float kNothing = -1e30f;  // the highest score of a row that has seen no key

using Floats = float __attribute__((vector_size(4 * kLanes)));
using Words = uint32_t __attribute__((vector_size(4 * kLanes)));
using Ints = int32_t __attribute__((vector_size(4 * kLanes)));

inline int round_up(int number, int multiple) { return (number + multiple - 1) / multiple * multiple; }

inline Floats load(const float* from) {
  Floats v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

inline void store(float* to, Floats v) { std::memcpy(to, &v, sizeof v); }

template <int... I>
inline Floats splat(float x, std::integer_sequence<int, I...>) {
  return Floats{(static_cast<void>(I), x)...};
}

// Not a sum with zeros, which is an instruction more: it would have to turn -0 into 0.
inline Floats splat(float x) { return splat(x, std::make_integer_sequence<int, kLanes>{}); }

template <int... I>
inline Ints lane_numbers(std::integer_sequence<int, I...>) {
  return Ints{I...};
}

inline Ints lane_numbers() { return lane_numbers(std::make_integer_sequence<int, kLanes>{}); }

template <class To, class From>
inline To bits_as(From v) {
  To result;
  static_assert(sizeof result == sizeof v);
  std::memcpy(&result, &v, sizeof v);
  return result;
}

inline Floats choose(Ints mask, Floats yes, Floats no) {
  return bits_as<Floats>((mask & bits_as<Ints>(yes)) | (~mask & bits_as<Ints>(no)));
}

// The greater one; `b` where either is a NaN.
inline Floats greater(Floats a, Floats b) { return a > b ? a : b; }

template <int Distance, int... I>
inline Words swapped(Words v, std::integer_sequence<int, I...>) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(v, v, (I ^ Distance)...);
#else
  return __builtin_shuffle(v, Words{static_cast<uint32_t>(I ^ Distance)...});
#endif
}

// Every lane with the one `Distance` away, then with nearer ones, until each holds what all of them come to.
template <int Distance = kLanes / 2, class Join>
inline float folded(Floats v, Join join) {
  v = join(v, bits_as<Floats>(swapped<Distance>(bits_as<Words>(v), std::make_integer_sequence<int, kLanes>{})));
  if constexpr (Distance > 1) return folded<Distance / 2>(v, join);
  return v[0];
}

inline float highest(Floats v) { return folded(v, greater); }

inline float sum_of(Floats v) {
  return folded(v, [](Floats a, Floats b) { return a + b; });
}

// 2^x within 2e-7 of its value for x in [-126, 126], 0 from -127 down: a polynomial on [-0.5, 0.5], its exponent shifted. NaN stays NaN.
inline Floats power_of_two(Floats x) {
  constexpr float kWhole = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to whole numbers, in its lowest bits
  x = greater(splat(-127.0f), x);        // there p is 1 and nothing is left of its exponent
  const Floats shifted = x + kWhole;
  const Floats r = x - (shifted - kWhole);
  Floats p = r * 1.3264727e-3f + 9.6715127e-3f;
  p = p * r + 5.5507337e-2f;
  p = p * r + 2.4022242e-1f;
  p = p * r + 6.9314698e-1f;
  p = p * r + 1.0f;
  return bits_as<Floats>(bits_as<Words>(p) + (bits_as<Words>(shifted) << 23));
}

// Half of the pairs that a transposition meets: lanes 0.. or lanes kLanes / 2.. of `a` and `b`, in turn.
template <int First, int... I>
inline Words interleaved(Words a, Words b, std::integer_sequence<int, I...>) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(a, b, (First + I / 2 + I % 2 * kLanes)...);
#else
  return __builtin_shuffle(a, b, Words{static_cast<uint32_t>(First + I / 2 + I % 2 * kLanes)...});
#endif
}

// Rows become columns: perfect shuffles of the upper with the lower half of the rows, as often as it takes.
inline void transpose(Words (&rows)[kLanes]) {
  constexpr auto numbers = std::make_integer_sequence<int, kLanes>{};
#pragma GCC unroll 4
  for (int width = 1; width < kLanes; width *= 2) {
    Words mixed[kLanes];
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
constexpr int kNumbersInWord = sizeof(Words) / (kLanes * sizeof(T));

// kLanes words of kLanes rows become `taken` lines of to [taken, stride].
template <class T>
inline void store_transposed(Words (&rows)[kLanes], int taken, float factor, float* to, int stride) {
  transpose(rows);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if constexpr (kNumbersInWord<T> == 1) {
      if (i < taken) store(to + i * stride, bits_as<Floats>(rows[i]) * factor);
    } else {
      if (2 * i < taken) store(to + 2 * i * stride, bits_as<Floats>(rows[i] << 16) * factor);
      if (2 * i + 1 < taken) store(to + (2 * i + 1) * stride, bits_as<Floats>(rows[i] & 0xffff0000u) * factor);
    }
  }
}

// `count` rows, up to kLanes, of `size` numbers become columns of to [size, stride], as float32 times `factor`; the others zeros.
template <class T>
inline void widen_transposed(const T* const* from, int count, int size, float factor, float* to, int stride) {
  constexpr int step = kLanes * kNumbersInWord<T>;
  static constexpr T zeros[step] = {};
  Words rows[kLanes];
  int begin = 0;
  for (; begin + step <= size; begin += step) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) std::memcpy(&rows[i], i < count ? from[i] + begin : zeros, sizeof(Words));
    store_transposed<T>(rows, step, factor, to + begin * stride, stride);
  }
  if (begin < size) {
    for (int i = 0; i < kLanes; ++i) {
      rows[i] = Words{};
      if (i < count) std::memcpy(&rows[i], from[i] + begin, (size - begin) * sizeof(T));
    }
    store_transposed<T>(rows, size - begin, factor, to + begin * stride, stride);
  }
}

// One row of `size` numbers as float32, zeros up to `padded`.
template <class T>
inline void widen_row(const T* __restrict from, float* __restrict to, int size, int padded) {
#pragma omp simd
  for (int i = 0; i < size; ++i) to[i] = to_float(from[i]);
  for (int i = size; i < padded; ++i) to[i] = 0.0f;
}

// Which keys the rows of an item see: `group` rows to a token, the first at `position`; window 0: all keys up to its own.
struct Sight {
  int position, group, window;
};

// The keys [start, start + count) of a request.
struct Tile {
  int start, count;
};

// One thread's working memory, for up to `rows` query rows at a time. A thread has one of them at a time.
struct Scratch {
  Scratch(int head_size, int rows);

  // Of row `row`, the first of a block of kRows: q [D, kLanes], peaks [kLanes]. Of any row: totals [kLanes], to be summed.
  float* queries(int row) const { return q_ + row / kRows * kLanes * head_size; }
  float* peaks(int row) const { return peak_ + row / kRows * kLanes; }
  float* totals(int row) const { return total_ + row * kLanes; }
  float peak(int row) const { return peaks(row)[row % kRows]; }
  float total(int row) const { return sum_of(load(totals(row))); }

  // Forget all rows that were attended to.
  void start(int rows);

  // `rows` of them, up to kRows, from `row` on, over the tile whose keys and values are loaded.
  void attend(const Sight& sight, const Tile& tile, int row, int rows);

  // scores [rows, kTile] of the keys [begin, end), multiples of kLanes, become weights, 0 where a row does not see the key; peaks and
  // totals are brought up to date. kept [kLanes]: what earlier sums of each row are worth under its new peak.
  void weigh(const Sight& sight, const Tile& tile, int row, int rows, int begin, int end, float* kept);

  const int head_size, padded;  // padded: a multiple of kLanes
  float *keys, *values, *sums;  // [D, kTile], [kTile, padded], [rows, padded]
  float* scores;                // [kRows, kTile]

 private:
  static constexpr size_t kLine = 16;  // numbers in a cache line
  float *q_, *peak_, *total_;
};

}  // namespace piecework::tiles
