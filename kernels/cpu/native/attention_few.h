// Few query rows over a tile, as in decodes. Keys and values are widened in registers and never stored.
//
// C is the cache's kind of number. bfloat16 is loaded as words of two numbers, so a vector of words gives a vector of even and one of odd
// numbers. Rows of queries and of sums have this order: kLanes even numbers, kLanes odd ones, and so on. Other kinds are in order.
#pragma once
#include "attention_cache.h"

namespace piecework::tiles {

constexpr int kFewRows = std::min(8, kLanes);  // With more rows, transposing keys is faster.
// Keys of a tile. The keys and values of all heads in this tile and the next fit the first cache.
constexpr int kFewKeys = kLanes == 16 ? 32 : kTile;
constexpr int kKeysAtOnce = kLanes == 16 ? 4 : 2;
// Number of vectors of columns that are summed together for R rows.
template <int R>
constexpr int kColumnsAtOnce = kLanes == 16 || (kLanes == 8 && R <= 2) ? 4 : 2;

template <class C>
constexpr int kVectors = std::is_same_v<C, bf16> ? 2 : 1;  // Number of vectors that one load gives.

template <class C>
bool is_few(int rows, int head_size) {
  return rows <= kFewRows && head_size % (kLanes * kVectors<C>) == 0;
}

template <class C>
inline void widen_vectors(const C* from, floats* to) {
  if constexpr (std::is_same_v<C, bf16>) {
    const words together = load<words>(from);
    to[0] = bits_as<floats>(together << 16);
    to[1] = bits_as<floats>(together & 0xffff0000u);
  } else if constexpr (std::is_same_v<C, float>) {
    to[0] = load<floats>(from);
  } else {
    to[0] = widen(from);
  }
}

// Sum the lanes of each row: lane i of the result is the sum of row i.
inline floats sum_each(floats (&rows)[kLanes]) {
#if defined(__AVX512F__)
  // Shuffles use one port of the CPU. Blends can replace them in the first two rounds.
  const auto halves = [&](int i) {
    const __m512 a = (__m512)rows[i], b = (__m512)rows[i + 1];
    return _mm512_mask_blend_ps(0xcccc, a, b) + _mm512_shuffle_ps(a, b, 0x4e);
  };
  const auto quarters = [&](int i) {
    const __m512 a = halves(i), b = halves(i + 4);
    return _mm512_mask_blend_ps(0xff00, a, b) + _mm512_shuffle_f32x4(a, b, 0x4e);
  };
  const auto eights = [&](int i) {
    const __m512 a = quarters(i), b = quarters(i + 2);
    return _mm512_shuffle_ps(a, b, 0x88) + _mm512_shuffle_ps(a, b, 0xdd);
  };
  const __m512 low = eights(0), high = eights(8);
  return (floats)(_mm512_shuffle_f32x4(low, high, 0x88) + _mm512_shuffle_f32x4(low, high, 0xdd));
#elif defined(__AVX2__)
  // Shuffles across the halves of a vector are slow, so they come last, once.
  const auto pairs = [&](int i) {
    const __m256 a = (__m256)rows[i], b = (__m256)rows[i + 1];
    return (__m256d)(_mm256_unpacklo_ps(a, b) + _mm256_unpackhi_ps(a, b));
  };
  const auto fours = [&](int i) {
    const __m256d a = pairs(i), b = pairs(i + 2);
    return (__m256)_mm256_unpacklo_pd(a, b) + (__m256)_mm256_unpackhi_pd(a, b);
  };
  const __m256 low = fours(0), high = fours(4);
  return (floats)_mm256_permute2f128_ps(low, high, 0x20) + (floats)_mm256_permute2f128_ps(low, high, 0x31);
#else
  constexpr auto numbers = std::make_integer_sequence<int, kLanes>{};
#pragma GCC unroll 4
  for (int count = kLanes / 2; count > 0; count /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < count; ++i) {
      const words a = bits_as<words>(rows[i]), b = bits_as<words>(rows[i + count]);
      rows[i] = bits_as<floats>(interleaved<0>(a, b, numbers)) + bits_as<floats>(interleaved<kLanes / 2>(a, b, numbers));
    }
  }
  return rows[0];
#endif
}

// Rows of keys or values that will be needed, prefetched line by line. Rows are contiguous within a page. A core has few software
// prefetches in flight, but many more when it recognises a sequence.
template <class C>
struct Ahead {
  const C *const *row, *const *end;
  int width, column = 0;  // Numbers of a row.

  void ask(int lines) {
    for (; lines > 0 && row < end; --lines) {
      __builtin_prefetch(*row + column);
      column += 64 / static_cast<int>(sizeof(C));
      if (column >= width) column = 0, ++row;
    }
  }
};

template <class C>
constexpr int lines_of(int numbers) {
  return (numbers * static_cast<int>(sizeof(C)) + 63) / 64;
}

// scores [R, kTile] = q [R, size] times kLanes keys, which begin at an offset in their rows.
template <int R, class C>
inline void score_few(const float* q, int size, const C* const* keys, int at, float* scores, Ahead<C>& ahead) {
  constexpr int pack = kVectors<C>;
  floats products[R][kLanes];
  for (int j = 0; j < kLanes; j += kKeysAtOnce) {
    ahead.ask(kKeysAtOnce * lines_of<C>(size));
    floats sums[R][kKeysAtOnce] = {};
    for (int i = 0; i < size; i += kLanes * pack) {
      floats key[kKeysAtOnce][pack];
#pragma GCC unroll 4
      for (int k = 0; k < kKeysAtOnce; ++k) widen_vectors(keys[j + k] + at + i, key[k]);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
        for (int p = 0; p < pack; ++p) {
          const floats query = load<floats>(q + r * size + i + p * kLanes);
#pragma GCC unroll 4
          for (int k = 0; k < kKeysAtOnce; ++k) sums[r][k] += query * key[k][p];
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int k = 0; k < kKeysAtOnce; ++k) products[r][j + k] = sums[r][k];
  }
  for (int r = 0; r < R; ++r) store(scores + r * kTile, sum_each(products[r]));
}

// kept * sums + weights [R, kTile] times `count` values, for N vectors of columns from `column` on.
template <int R, int N, class C>
inline void sum_few(const float* weights, const C* const* values, int column, int count, const float* kept, float* sums, int size,
                    Ahead<C>& ahead) {
  constexpr int pack = kVectors<C>;
  floats added[R][N] = {};
  for (int j = 0; j < count; ++j) {
    ahead.ask(lines_of<C>(N * kLanes));
    floats value[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; n += pack) widen_vectors(values[j] + column + n * kLanes, value + n);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const floats weight = splat(weights[r * kTile + j]);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) added[r][n] += weight * value[n];
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      float* sum = sums + r * size + n * kLanes;
      store(sum, load<floats>(sum) * kept[r] + added[r][n]);
    }
  }
}

// Call work(row, R) for `rows` rows, up to four at a time.
template <class Work>
inline void each_few(int rows, const Work& work) {
  int row = 0;
  for (; row + 4 <= rows; row += 4) work(row, std::integral_constant<int, 4>{});
  switch (rows - row) {
    case 1: return work(row, std::integral_constant<int, 1>{});
    case 2: return work(row, std::integral_constant<int, 2>{});
    case 3: return work(row, std::integral_constant<int, 3>{});
  }
}

// Rows [first, first + count) of a Scratch that belong to one key/value head: their queries, and the head's offset in rows of keys and
// values.
struct FewRows {
  int first, count, at;
  const float* queries;
};

// Later keys are prefetched while scores are computed, and later values while values are summed.
template <class C>
void attend_few(const FewRows& few, const Sight& sight, const Tile& tile, const Places<C>& places, Ahead<C> keys, Ahead<C> values, Scratch& scratch) {
  constexpr int pack = kVectors<C>;
  const int head_size = scratch.head_size, size = scratch.value_size, end = round_up(tile.count, kLanes);
  each_few(few.count, [&](int row, auto count) {
    for (int j = 0; j < end; j += kLanes)
      score_few<count>(few.queries + row * head_size, head_size, places.keys + j, few.at, scratch.scores + row * kTile + j, keys);
  });
  if constexpr (kIsInt8<C>) scale_scores(few.count, 0, end, places.key_scales, scratch.scores);
  alignas(4 * kLanes) float kept[kLanes];
  scratch.weigh(sight, tile, few.first, few.count, 0, end, kept);
  if constexpr (kIsInt8<C>) scale_scores(few.count, 0, end, places.value_scales, scratch.scores);
  each_few(few.count, [&](int row, auto count) {
    const float* weights = scratch.scores + row * kTile;
    float* sums = scratch.sums + (few.first + row) * size;
    int column = 0;
    const auto sum = [&](auto vectors) {
      sum_few<count, vectors>(weights, places.values, few.at + column, tile.count, kept + row, sums + column, size, values);
      column += vectors * kLanes;
    };
    while (column + kColumnsAtOnce<count> * kLanes <= size) sum(std::integral_constant<int, kColumnsAtOnce<count>>{});
    while (column < size) sum(std::integral_constant<int, pack>{});
  });
  keys.ask(kTile * lines_of<C>(keys.width)), values.ask(kTile * lines_of<C>(values.width));
}

// Load the queries of `count` rows times `factor`, in the order of the cache's numbers.
template <class C, class T>
void load_few(const T* const* from, int count, int size, float factor, float* to) {
  for (int r = 0; r < count; ++r, to += size) {
    if constexpr (kVectors<C> == 1) {
#pragma omp simd
      for (int i = 0; i < size; ++i) to[i] = to_float(from[r][i]) * factor;
    } else {
      for (int i = 0; i < size; i += 2 * kLanes) {
        floats numbers[2];
        widen_vectors(from[r] + i, numbers);
        for (int p = 0; p < 2; ++p) store(to + i + p * kLanes, numbers[p] * factor);
      }
    }
  }
}

// Bring sums [count] back into order.
template <class C>
void restore_order(float* sums, int count) {
  constexpr auto numbers = std::make_integer_sequence<int, kLanes>{};
  if constexpr (kVectors<C> == 2) {
    for (const float* end = sums + count; sums < end; sums += 2 * kLanes) {
      const words even = bits_as<words>(load<floats>(sums)), odd = bits_as<words>(load<floats>(sums + kLanes));
      store(sums, bits_as<floats>(interleaved<0>(even, odd, numbers)));
      store(sums + kLanes, bits_as<floats>(interleaved<kLanes / 2>(even, odd, numbers)));
    }
  }
}

}  // namespace piecework::tiles
