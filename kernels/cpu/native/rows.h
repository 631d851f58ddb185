// What happens to a row of numbers between products. Values are rounded to bfloat16 where plain torch rounds them.
#pragma once
#include <cmath>
#include <vector>

#include "common.h"

namespace piecework {

inline bf16 rounded(float x) { return from_float<bf16>(x); }
inline float as_rounded(float x) { return to_float(from_float<bf16>(x)); }

inline void rms_norm(const bf16* x, const bf16* weight, int size, float eps, bf16* out) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int i = 0; i < size; ++i) sum += to_float(x[i]) * to_float(x[i]);
  const float factor = 1.0f / std::sqrt(sum / size + eps);
#pragma omp simd
  for (int i = 0; i < size; ++i) out[i] = rounded(as_rounded(to_float(x[i]) * factor) * to_float(weight[i]));
}

inline void add(const bf16* x, const bf16* y, int size, bf16* out) {
#pragma omp simd
  for (int i = 0; i < size; ++i) out[i] = rounded(to_float(x[i]) + to_float(y[i]));
}

// The input and the result are rounded to bfloat16.
inline float silu(float gate) { return as_rounded(gate / (1.0f + exponential(-gate))); }

inline float sigmoid(float x) { return as_rounded(1.0f / (1.0f + exponential(-x))); }

// GELU with tanh: x * (1 + tanh(u)) / 2, which is x times the sigmoid of 2u.
inline float gelu_tanh(float x) { return as_rounded(x / (1.0f + exponential(-1.59576912f * (x + 0.044715f * x * x * x)))); }

inline void scale(const bf16* x, float factor, int size, bf16* out) {
#pragma omp simd
  for (int i = 0; i < size; ++i) out[i] = rounded(to_float(x[i]) * factor);
}

inline void silu_and_mul(const bf16* gate, const bf16* up, int size, bf16* out) {
#pragma omp simd
  for (int i = 0; i < size; ++i) out[i] = rounded(silu(to_float(gate[i])) * to_float(up[i]));
}

// Move pairs (2i, 2i + 1) of x to (i, i + size / 2).
inline void side_by_side(bf16* x, int size) {
  static thread_local std::vector<bf16> pairs;
  pairs.assign(x, x + size);
  for (int i = 0; i < size; ++i) x[i % 2 * (size / 2) + i / 2] = pairs[i];
}

inline void rotate(const bf16* x, const bf16* cos, const bf16* signed_sin, int size, bf16* out) {
  const int half = size / 2;
#pragma omp simd
  for (int i = 0; i < half; ++i) {
    const float a = to_float(x[i]), b = to_float(x[i + half]);
    out[i] = rounded(as_rounded(a * to_float(cos[i])) + as_rounded(b * to_float(signed_sin[i])));
    out[i + half] = rounded(as_rounded(b * to_float(cos[i + half])) + as_rounded(a * to_float(signed_sin[i + half])));
  }
}

// How a row is quantised to 8 bits: by a given scale, or by a scale per `group` columns.
struct Quantization {
  const float* scale;  // [1], or null
  int32_t group;
};

template <class Number>
constexpr float kLargest = std::is_same_v<Number, int8_t> ? 127.0f : 448.0f;

// The number nearest to x, even for ties; |x| is at most the largest.
template <class Number>
inline Number nearest(float x) {
  uint32_t bits;
  if constexpr (std::is_same_v<Number, int8_t>) {
    const float shifted = x + 0x1.8p23f;  // Its last bit is worth 1.
    std::memcpy(&bits, &shifted, sizeof bits);
    return static_cast<int8_t>(bits);
  } else {
    std::memcpy(&bits, &x, sizeof bits);
    const uint32_t sign = bits >> 24 & 0x80u, size = bits & 0x7fffffffu;
    const float shifted = std::fabs(x) + 0x1p14f;  // Its last bit is worth e4m3's smallest number.
    uint32_t small;
    std::memcpy(&small, &shifted, sizeof small);
    const uint32_t large = ((size + 0x7ffffu + (size >> 20 & 1u)) >> 20) - (120u << 3);
    return {static_cast<uint8_t>(sign | (size > 0x7f800000u ? 0x7fu : size < 0x3c800000u ? small & 0xfu : large))};
  }
}

template <class Number>
inline void quantize(const bf16* x, int size, float scale, Number* out) {
  constexpr float largest = kLargest<Number>;
#pragma omp simd
  for (int i = 0; i < size; ++i) {
    const float number = to_float(x[i]) / scale;
    out[i] = nearest<Number>(number > largest ? largest : number < -largest ? -largest : number);
  }
}

// Quantise a row. Write scales [size / group] if no scale is given.
template <class Number>
inline void quantize(const bf16* x, int size, const Quantization& how, Number* out, float* scales) {
  if (how.scale) return quantize(x, size, *how.scale, out);
  for (int first = 0; first < size; first += how.group) {
    uint16_t largest = 0;  // A NaN is larger than all other numbers.
#pragma omp simd reduction(max : largest)
    for (int i = first; i < first + how.group; ++i) largest = std::max<uint16_t>(largest, x[i].bits & 0x7fffu);
    const float most = to_float(bf16{largest});
    // The divisor for a row of zeros.
    const float scale = (most < 1e-10f ? 1e-10f : most) / kLargest<Number>;
    scales[first / how.group] = scale;
    quantize(x + first, how.group, scale, out + first);
  }
}

}  // namespace piecework
