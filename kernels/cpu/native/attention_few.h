// Few query rows over a tile, as decodes have them: keys and values are widened in registers and not written anywhere.
//
// C: the cache's kind of number. bfloat16 comes two to a word, so that a vector of words becomes one of even and one of odd numbers: rows
// of queries and of sums lie in that order here, kLanes even ones, kLanes odd ones, and so on. Others lie one after another.
#pragma once
#include "attention_cache.h"

namespace piecework::tiles {

constexpr int kFewRows = std::min(8, kRows);  // with more of them it pays to transpose keys
constexpr int kKeysAtOnce = kLanes == 16 ? 4 : 2;
constexpr int kColumnsAtOnce = kLanes == 16 ? 4 : 2;  // vectors

template <class C>
constexpr int kVectors = std::is_same_v<C, bf16> ? 2 : 1;  // that are made at once

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

// The lanes of each row summed: lane i of what is returned belongs to row i.
inline floats sum_each(floats (&rows)[kLanes]) {
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
}

// q [R, size] times each of kLanes keys: scores [R, kTile].
template <int R, class C>
inline void score_few(const float* q, int size, const C* const* keys, float* scores) {
  constexpr int pack = kVectors<C>;
  floats products[R][kLanes];
  for (int j = 0; j < kLanes; j += kKeysAtOnce) {
    floats sums[R][kKeysAtOnce] = {};
    for (int i = 0; i < size; i += kLanes * pack) {
      floats key[kKeysAtOnce][pack];
#pragma GCC unroll 4
      for (int k = 0; k < kKeysAtOnce; ++k) widen_vectors(keys[j + k] + i, key[k]);
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

// kept * sums + weights [R, kTile] times `count` values, of N vectors of columns.
template <int R, int N, class C>
inline void sum_few(const float* weights, const C* const* values, int column, int count, const float* kept, float* sums, int size) {
  constexpr int pack = kVectors<C>;
  floats added[R][N] = {};
  for (int j = 0; j < count; ++j) {
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
      float* sum = sums + r * size + column + n * kLanes;
      store(sum, load<floats>(sum) * kept[r] + added[r][n]);
    }
  }
}

// work(row, R) for `rows` rows, up to four together.
template <class Work>
inline void each_few(int rows, Work work) {
  int row = 0;
  for (; row + 4 <= rows; row += 4) work(row, std::integral_constant<int, 4>{});
  switch (rows - row) {
    case 1: return work(row, std::integral_constant<int, 1>{});
    case 2: return work(row, std::integral_constant<int, 2>{});
    case 3: return work(row, std::integral_constant<int, 3>{});
  }
}

// Asks for rows of keys or values early: they lie in pieces too short for a processor to see where the next will be.
template <class T>
inline void prefetch_rows(const T* const* rows, int count, int size) {
  for (int j = 0; j < count; ++j)
    for (int i = 0; i < size; i += 64 / static_cast<int>(sizeof(T))) __builtin_prefetch(rows[j] + i);
}

// scores [rows][kTile] of the keys [0, end) times a number of each key.
inline void scale_scores(int rows, int end, const float* by, float* scores) {
  for (int r = 0; r < rows; ++r, scores += kTile)
    for (int j = 0; j < end; j += kLanes) store(scores + j, load<floats>(scores + j) * load<floats>(by + j));
}

// Queries lie where other items have their keys. While scores are made, the values come from memory, and while these are summed, the keys
// of the next tile, if there is one: next_keys [next_count].
template <class C>
void attend_few(int rows, const Sight& sight, const Tile& tile, const Places<C>& places, const C* const* next_keys, int next_count,
                Scratch& scratch) {
  constexpr int pack = kVectors<C>;
  const int head_size = scratch.head_size, size = scratch.value_size, end = round_up(tile.count, kLanes);
  each_few(rows, [&](int row, auto count) {
    for (int j = 0; j < end; j += kLanes) {
      if (row == 0) prefetch_rows(places.values + j, std::min(kLanes, tile.count - j), size);
      score_few<count>(scratch.keys + row * head_size, head_size, places.keys + j, scratch.scores + row * kTile + j);
    }
  });
  if constexpr (kIsInt8<C>) scale_scores(rows, end, places.key_scales, scratch.scores);
  prefetch_rows(next_keys, next_count, head_size);
  alignas(4 * kLanes) float kept[kLanes];
  scratch.weigh(sight, tile, 0, rows, 0, end, kept);
  if constexpr (kIsInt8<C>) scale_scores(rows, end, places.value_scales, scratch.scores);
  each_few(rows, [&](int row, auto count) {
    const float* weights = scratch.scores + row * kTile;
    float* sums = scratch.sums + row * size;
    int column = 0;
    for (; column + kColumnsAtOnce * kLanes <= size; column += kColumnsAtOnce * kLanes)
      sum_few<count, kColumnsAtOnce>(weights, places.values, column, tile.count, kept + row, sums, size);
    for (; column < size; column += pack * kLanes) sum_few<count, pack>(weights, places.values, column, tile.count, kept + row, sums, size);
  });
}

// Queries of `count` rows times `factor`, in the order of the cache's numbers.
template <class C, class T>
void load_few(const T* const* from, int count, float factor, Scratch& scratch) {
  for (int r = 0; r < count; ++r) {
    float* to = scratch.keys + r * scratch.head_size;
    if constexpr (kVectors<C> == 1) {
#pragma omp simd
      for (int i = 0; i < scratch.head_size; ++i) to[i] = to_float(from[r][i]) * factor;
    } else {
      for (int i = 0; i < scratch.head_size; i += 2 * kLanes) {
        floats numbers[2];
        widen_vectors(from[r] + i, numbers);
        for (int p = 0; p < 2; ++p) store(to + i + p * kLanes, numbers[p] * factor);
      }
    }
  }
}

// Sums lie one after another again.
template <class C>
void restore_order(int rows, Scratch& scratch) {
  constexpr auto numbers = std::make_integer_sequence<int, kLanes>{};
  if constexpr (kVectors<C> == 2) {
    for (float* sums = scratch.sums; sums < scratch.sums + rows * scratch.value_size; sums += 2 * kLanes) {
      const words even = bits_as<words>(load<floats>(sums)), odd = bits_as<words>(load<floats>(sums + kLanes));
      store(sums, bits_as<floats>(interleaved<0>(even, odd, numbers)));
      store(sums + kLanes, bits_as<floats>(interleaved<kLanes / 2>(even, odd, numbers)));
    }
  }
}

}  // namespace piecework::tiles
