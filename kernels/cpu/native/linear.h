// y = x W^T + b for few rows of x, in bfloat16 with float32 sums: weights are read once, in order.
#pragma once
#include "common.h"
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace piecework {

struct Linear {
  const bf16* weight;  // [rows, columns]
  const bf16* bias;    // [rows], or null
  int32_t rows, columns;
};

#ifdef __AVX512BF16__
inline __m512bh load32(const bf16* from) { return (__m512bh)_mm512_loadu_si512(from); }

// Sixteen vectors to the sums of their numbers, in order: each stage folds two halves of pairs into one vector.
inline void reduce16(const __m512* parts, float* sums) {
  __m512 quarters[4];
  for (int q = 0; q < 4; ++q) {
    const __m512 *p = parts + 4 * q;
    const __m512d a = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(p[0], p[1]), _mm512_unpackhi_ps(p[0], p[1])));
    const __m512d b = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(p[2], p[3]), _mm512_unpackhi_ps(p[2], p[3])));
    quarters[q] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  auto fold = [](__m512 a, __m512 b) { return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd)); };
  _mm512_storeu_ps(sums, fold(fold(quarters[0], quarters[1]), fold(quarters[2], quarters[3])));
}

inline __m512bh load_tail(const bf16* from, __mmask32 mask) { return (__m512bh)_mm512_maskz_loadu_epi16(mask, from); }
#endif

// sums[m * R + r] = the product of row r of w with row m of x.
template <int R, int M>
inline void products(const bf16* __restrict w, const bf16* __restrict x, int columns, float* __restrict sums) {
#ifdef __AVX512BF16__
  __m512 acc[M * R];
  for (int i = 0; i < M * R; ++i) acc[i] = _mm512_setzero_ps();
  int i = 0;
  for (; i + 32 <= columns; i += 32) {
    __m512bh rows[M];
    for (int m = 0; m < M; ++m) rows[m] = load32(x + static_cast<int64_t>(m) * columns + i);
    for (int r = 0; r < R; ++r) {
      const __m512bh weights = load32(w + static_cast<int64_t>(r) * columns + i);
      for (int m = 0; m < M; ++m) acc[m * R + r] = _mm512_dpbf16_ps(acc[m * R + r], weights, rows[m]);
    }
  }
  if (i < columns) {
    const __mmask32 mask = (1u << (columns - i)) - 1u;
    for (int r = 0; r < R; ++r)
      for (int m = 0; m < M; ++m)
        acc[m * R + r] = _mm512_dpbf16_ps(acc[m * R + r], load_tail(w + static_cast<int64_t>(r) * columns + i, mask),
                                     load_tail(x + static_cast<int64_t>(m) * columns + i, mask));
  }
  if constexpr (M * R == 16) {
    reduce16(acc, sums);
  } else {
    for (int i = 0; i < M * R; ++i) sums[i] = _mm512_reduce_add_ps(acc[i]);
  }
#else
  for (int r = 0; r < R; ++r)
    for (int m = 0; m < M; ++m) {
      const bf16 *a = w + static_cast<int64_t>(r) * columns, *b = x + static_cast<int64_t>(m) * columns;
      float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
      for (int i = 0; i < columns; ++i) sum += to_float(a[i]) * to_float(b[i]);
      sums[m * R + r] = sum;
    }
#endif
}

// Calls write(token, row, values, count), `count` rows from `row` on, for the rows [begin, end) of W and all `tokens` rows of x [tokens, columns].
template <class Write>
inline void linear_rows(const Linear& linear, const bf16* x, int tokens, int begin, int end, Write write) {
  constexpr int kRows = 4, kTokens = 4;
  float sums[kRows * kTokens];
  const int64_t columns = linear.columns;
  auto block = [&](auto rows, auto count, int n, int t) {
    products<rows, count>(linear.weight + n * columns, x + t * columns, linear.columns, sums);
    for (int m = 0; m < count; ++m) {
      float* values = sums + m * rows;
      if (linear.bias)
        for (int r = 0; r < rows; ++r) values[r] += to_float(linear.bias[n + r]);
      write(t + m, n, values, rows);
    }
  };
  auto all_tokens = [&](auto rows, int n) {
    int t = 0;
    for (; t + kTokens <= tokens; t += kTokens) block(rows, std::integral_constant<int, kTokens>{}, n, t);
    if (t + 2 <= tokens) block(rows, std::integral_constant<int, 2>{}, n, t), t += 2;
    if (t < tokens) block(rows, std::integral_constant<int, 1>{}, n, t);
  };
  int n = begin;
  for (; n + kRows <= end; n += kRows) all_tokens(std::integral_constant<int, kRows>{}, n);
  for (; n < end; ++n) all_tokens(std::integral_constant<int, 1>{}, n);
}

}  // namespace piecework
