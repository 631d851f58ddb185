// Functions for every CPU that the compiler supports.
#pragma once
#include "vectors.h"

namespace piecework {

// sums + a * b.
inline floats multiply_add(floats sums, floats a, floats b) { return sums + a * b; }

// Load kLanes float16 as float32.
inline floats load_halves(const uint16_t* from) {
  floats v;
  for (int i = 0; i < kLanes; ++i) v[i] = half_to_float(from[i]);
  return v;
}

// Store kLanes float32 rounded to float16, as torch rounds.
inline void store_halves(uint16_t* to, floats v) {
  for (int i = 0; i < kLanes; ++i) to[i] = float_to_half(v[i]);
}

// Load kLanes int8 as float32.
inline floats load_bytes(const int8_t* from) {
  floats v;
  for (int i = 0; i < kLanes; ++i) v[i] = from[i];
  return v;
}

// Load kLanes e4m3 as float32, divided by 256.
inline floats load_fp8(const uint8_t* from) {
  floats v;
  for (int i = 0; i < kLanes; ++i) v[i] = to_float(fp8{from[i]}) * 0x1p-8f;
  return v;
}

// The same, with NaN for all ones except the sign.
inline floats load_e4m3(const uint8_t* from) { return with_nan(load_fp8(from)); }

// Load kLanes e5m2, the upper halves of float16, as float32.
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

// One of sixteen numbers, chosen by the bits [4 I, 4 I + 4) of each word.
template <int I>
inline floats chosen(words w, const float* sixteen) {
  floats v;
  for (int i = 0; i < kLanes; ++i) v[i] = sixteen[w[i] >> (4 * I) & 15u];
  return v;
}

// One of sixteen numbers for each byte, which is 0 to 15.
inline words bytes_of_table(words w, const int8_t* sixteen) {
  uint8_t bytes[sizeof w];
  store(bytes, w);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(sixteen[byte]);
  return load<words>(bytes);
}

// The byte B of each word as float32.
template <int B>
inline floats byte_of(words w) {
  return __builtin_convertvector((ints)((w >> (8 * B)) & 255u), floats);
}

// Store 2 * kLanes float32 rounded to bfloat16.
inline void store_bf16(bf16* to, floats a, floats b) { store_rounded(to, a), store_rounded(to + kLanes, b); }

constexpr bool kHasByteDots = false, kHasDots = false, kHasHalves = false;
using byte = int16_t;
constexpr int kWeightShift = 128;  // The number that is added to weights for `dot_bytes`, which takes unsigned weights.

// sums + the products of four bytes of each row, from 0 to 255, with four columns of x in the order of bytes.cpp.
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

// The nearest integer of each, even for ties, for numbers below 2^22.
inline ints nearest_ints(floats v) { return (ints)(v + 0x1.8p23f) - 0x4b400000; }

constexpr int kIntegerBits = 0;  // Bits of weights whose products are fastest with `ByteSums`.

template <int Bits>
using ByteSums = PlainByteSums<Bits>;

}  // namespace piecework
