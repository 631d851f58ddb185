// What all kernels share: bfloat16 as bits, float32 arithmetic, and an exponential that compilers can vectorise.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace piecework {

// Whether the result of a row depends only on that row: sums have the same order for any number of rows, and requests share no keys
// (ways.cpp).
bool is_batch_invariant();

struct bf16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }

inline float to_float(bf16 x) {
  const uint32_t wide = static_cast<uint32_t>(x.bits) << 16;
  float result;
  std::memcpy(&result, &wide, sizeof result);
  return result;
}

// An 8-bit number: sign, 4 bits of exponent, 3 of fraction, no infinities (OCP 8-bit floating point, E4M3).
struct fp8 {
  uint8_t bits;
};

inline float to_float(fp8 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x80u) << 24, size = x.bits & 0x7fu;
  const float small = static_cast<float>(size) * 0x1p-9f;
  uint32_t wide;
  std::memcpy(&wide, &small, sizeof wide);
  wide = sign | (size == 0x7fu ? 0x7fc00000u : size < 8u ? wide : (size << 20) + (120u << 23));
  float result;
  std::memcpy(&result, &wide, sizeof result);
  return result;
}

template <class T>
T from_float(float x);

template <>
inline float from_float<float>(float x) {
  return x;
}

// Round to nearest with ties to even, as torch does. A NaN stays a NaN.
template <>
inline bf16 from_float<bf16>(float x) {
  uint32_t wide;
  std::memcpy(&wide, &x, sizeof wide);
  const uint32_t rounded = (wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16;
  return {static_cast<uint16_t>(x == x ? rounded : 0x7fc0u)};
}

// Pause between two reads of a value that another thread will change. This leaves resources to the other thread of the core.
inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");  // Most cores treat `yield` as no operation.
#endif
}

// The bits as an integer with the order of the floats. A NaN of any sign is the largest.
inline int32_t ordered(float value) {
  const float one_zero = value + 0.0f;
  int32_t bits;
  std::memcpy(&bits, &one_zero, sizeof bits);
  const int32_t in_order = bits ^ ((bits >> 31) & 0x7fffffff);
  return (bits & 0x7fffffff) > 0x7f800000 ? INT32_MAX : in_order;
}

// Whether a number in this order is neither infinite nor NaN.
inline bool is_finite(int32_t place) { return place < 0x7f800000 && place > ~0x7f800000; }

// e^x within 3e-7 of its value for x in [-87, 88], and the value at the ends outside: 2^n times a polynomial on [-ln2 / 2, ln2 / 2].
inline float exponential(float x) {
  x = std::min(std::max(x, -87.0f), 88.0f);
  const float scaled = x * 1.44269504f;
  const int whole = static_cast<int>(scaled + (scaled < 0.0f ? -0.5f : 0.5f));
  const float n = static_cast<float>(whole);
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const uint32_t bits = static_cast<uint32_t>(whole + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return p * power;
}

}  // namespace piecework
