// The numbers of a KV cache: the dtype of the queries, or 8 bits in the layout and rounding of kernels/cache_format.py.
#pragma once
#include "attention_tiles.h"

namespace piecework {

// Numbered as in attention.py.
enum class CacheKind : int32_t { kAsQueries, kE4M3, kE5M2, kInt8 };
constexpr int kCacheKinds = 4;

struct e5m2 {
  uint8_t bits;
};

template <class C>
constexpr bool kIsInt8 = std::is_same_v<C, int8_t>;

// The number by which `widen` divides.
inline float unit_of(CacheKind kind) { return kind == CacheKind::kE4M3 ? 256.0f : 1.0f; }

// The bits of |x| <= largest, rounded to nearest with ties to even, in a format with `fraction` bits and an exponent with this bias. NaN
// becomes all ones.
template <int fraction, int bias>
inline uint8_t float8_bits(float x, float largest) {
  constexpr int cut = 23 - fraction;
  const uint32_t sign = bits_as<uint32_t>(x) >> 31 << 7;
  const float size = std::min(bits_as<float>(bits_as<uint32_t>(x) & 0x7fffffffu), largest);
  const uint32_t wide = bits_as<uint32_t>(size);
  const uint32_t normal = ((wide + (1u << (cut - 1)) - 1 + (wide >> cut & 1u)) >> cut) - ((127u - bias) << fraction);
  // A number whose last digit is the format's smallest number. Adding it rounds to that digit.
  constexpr uint32_t unit = (127u + 24 - bias - fraction) << 23;
  const uint32_t subnormal = bits_as<uint32_t>(size + bits_as<float>(unit)) - unit;
  const uint32_t found = wide < (128u - bias) << 23 ? subnormal : normal;
  return static_cast<uint8_t>(sign | (x == x ? found : 0x7fu));
}

inline fp8 narrowed(float x, fp8) { return {float8_bits<3, 7>(x, 448.0f)}; }
inline e5m2 narrowed(float x, e5m2) { return {float8_bits<2, 15>(x, 57344.0f)}; }

template <class T, class C>
void store_float8(const T* x, int64_t count, float scale, C* to) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) to[i] = narrowed(to_float(x[i]) / scale, C{});
}

// Store a key or value of one token and head, and its scale.
template <class T>
void store_int8(const T* x, int size, int8_t* to, bf16* scale) {
  // 1.5 * 2^23: a number that is added to it is rounded to an integer, in its lowest bits.
  constexpr float kMost = 127.0f, kWhole = 12582912.0f;
  uint32_t bits = 0;  // As integers, a NaN is the largest.
#pragma omp simd reduction(max : bits)
  for (int i = 0; i < size; ++i) bits = std::max(bits, bits_as<uint32_t>(to_float(x[i])) & 0x7fffffffu);
  *scale = from_float<bf16>(std::max(bits_as<float>(bits) / kMost, 0x1p-126f));
  const float kept = to_float(*scale);
#pragma omp simd
  for (int i = 0; i < size; ++i) {
    const float number = std::min(std::max(to_float(x[i]) / kept, -kMost), kMost);
    to[i] = static_cast<int8_t>(bits_as<int32_t>(number + kWhole) - bits_as<int32_t>(kWhole));
  }
}

namespace tiles {

template <class C>
constexpr bool kIsByte = sizeof(C) == 1;

// Load kLanes numbers, divided by the `unit_of` their kind.
inline floats widen(const fp8* from) { return load_e4m3(&from->bits); }
inline floats widen(const e5m2* from) { return load_e5m2(&from->bits); }
inline floats widen(const int8_t* from) { return load_bytes(from); }

// Load up to kLanes numbers, and zeros for the rest.
template <class C>
inline floats widen(const C* from, int count) {
  if (count >= kLanes) return widen(from);
  C some[kLanes] = {};
  std::memcpy(some, from, count * sizeof(C));
  return widen(some);
}

// The addresses of a tile's keys and values. The tokens after its last one belong to the same page.
template <class C>
struct Places {
  const C *keys[kTile], *values[kTile];
};

template <>
struct Places<int8_t> {
  const int8_t *keys[kTile], *values[kTile];
  float key_scales[kTile], value_scales[kTile];
};

// Load 2 * kLanes numbers from `begin` of `size` as bfloat16, which represents every 8-bit number exactly, with zeros after the end.
template <class C>
inline words load_pairs(const C* from, int begin, int size) {
  if constexpr (kIsByte<C>) {
    alignas(4 * kLanes) bf16 numbers[2 * kLanes];
    store_bf16(numbers, widen(from + begin, size - begin), widen(from + begin + kLanes, std::max(0, size - begin - kLanes)));
    return load<words>(numbers);
  } else {
    return load_pairs(from + begin, size - begin);
  }
}

// Widen one value to float32, with zeros up to `padded`, a multiple of kLanes.
template <class C>
inline void widen_value(const C* from, float factor, float* to, int size, int padded) {
  if constexpr (kIsByte<C>) {
    for (int i = 0; i < padded; i += kLanes) store(to + i, widen(from + i, size - i) * factor);
  } else {
    widen_row(from, to, size, padded);
  }
}

// Transpose `count` keys, at most kLanes, to columns of to [size, stride], each times its factor.
template <class C>
inline void widen_keys(const C* const* from, int count, int size, floats factors, float* to, int stride) {
  if constexpr (kIsByte<C>) {
    for (int begin = 0; begin < size; begin += kLanes) {
      words rows[kLanes];
      for (int i = 0; i < kLanes; ++i) rows[i] = i < count ? bits_as<words>(widen(from[i] + begin, size - begin)) : words{};
      store_transposed<float>(rows, std::min(kLanes, size - begin), factors, to + begin * stride, stride);
    }
  } else {
    widen_transposed(from, count, size, factors, to, stride);
  }
}

}  // namespace tiles
}  // namespace piecework
