// What every CPU that the compiler is for can do.
#pragma once
#include "vectors.h"

namespace piecework {

// sums + a * b.
inline floats multiply_add(floats sums, floats a, floats b) { return sums + a * b; }

// kLanes float16 to float32.
inline floats load_halves(const uint16_t* from) {
  floats v;
  for (int i = 0; i < kLanes; ++i) v[i] = half_to_float(from[i]);
  return v;
}

// kLanes float32 rounded to float16, as torch rounds them.
inline void store_halves(uint16_t* to, floats v) {
  for (int i = 0; i < kLanes; ++i) to[i] = float_to_half(v[i]);
}

// kLanes int8 to float32.
inline floats load_bytes(const int8_t* from) {
  floats v;
  for (int i = 0; i < kLanes; ++i) v[i] = from[i];
  return v;
}

// kLanes e4m3 to float32, a 256th of each.
inline floats load_fp8(const uint8_t* from) {
  floats v;
  for (int i = 0; i < kLanes; ++i) v[i] = to_float(fp8{from[i]}) * 0x1p-8f;
  return v;
}

// The same, and a NaN for what is all ones but for the sign.
inline floats load_e4m3(const uint8_t* from) { return with_nan(load_fp8(from)); }

// kLanes e5m2, the upper halves of float16, to float32.
inline floats load_e5m2(const uint8_t* from) {
  floats v;
  for (int i = 0; i < kLanes; ++i) v[i] = half_to_float(static_cast<uint16_t>(from[i] << 8));
  return v;
}

// The number in bits [4 I, 4 I + 4) of each word.
template <int I>
inline floats nibbles(words w) {
  return __builtin_convertvector((ints)((w >> (4 * I)) & 15u), floats);
}

// One of sixteen numbers, by the bits [4 I, 4 I + 4) of each word.
template <int I>
inline floats chosen(words w, const float* sixteen) {
  floats v;
  for (int i = 0; i < kLanes; ++i) v[i] = sixteen[w[i] >> (4 * I) & 15u];
  return v;
}

// One of sixteen numbers for each byte, which is one of 0 to 15.
inline words bytes_of_table(words w, const int8_t* sixteen) {
  uint8_t bytes[sizeof w];
  store(bytes, w);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(sixteen[byte]);
  return load<words>(bytes);
}

// The byte B of each word to float32.
template <int B>
inline floats byte_of(words w) {
  return __builtin_convertvector((ints)((w >> (8 * B)) & 255u), floats);
}

// 2 * kLanes float32 rounded to bfloat16.
inline void store_bf16(bf16* to, floats a, floats b) { store_rounded(to, a), store_rounded(to + kLanes, b); }

constexpr bool kHasByteDots = false, kHasDots = false, kHasHalves = false;
using byte = int16_t;
constexpr int kWeightShift = 128;  // what was added to weights when `dot_bytes` takes them, which has no sign for them

// sums + the products of four bytes of each row, from 0 to 255, with four columns of x as bytes.cpp orders them.
inline ints dot_bytes(ints sums, words weights, const byte* x) {
  unrolled<4>([&](auto i) { sums += (ints)(weights >> (8 * i) & 255u) * static_cast<int32_t>(x[i % 2 * 2 + i / 2]); });
  return sums;
}

inline int32_t largest_lane(ints v) {
  int32_t most = v[0];
  for (int i = 1; i < kLanes; ++i) most = std::max<int32_t>(most, v[i]);
  return most;
}

inline int32_t sum_of_lanes(ints v) {
  int32_t sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += v[i];
  return sum;
}

// The whole number nearest to each, of two the even one, of numbers below 2^22.
inline ints nearest_ints(floats v) { return (ints)(v + 0x1.8p23f) - 0x4b400000; }

constexpr int kIntegerBits = 0;  // of weights whose products are made fastest by `ByteSums`

template <int Bits>
using ByteSums = PlainByteSums<Bits>;

}  // namespace piecework
