// AVX2 with FMA and F16C, AVX-512, and the instructions for products that some CPUs have.
#pragma once
#include <immintrin.h>

#include "vectors.h"

namespace piecework {

// sums + a * b, rounded once. If compilers chose which of two products to round, results would depend on the code around them.
inline floats multiply_add(floats sums, floats a, floats b) {
#if defined(__AVX512F__)
  return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sums);
#else
  return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sums);
#endif
}

// Load kLanes float16 as float32.
inline floats load_halves(const uint16_t* from) {
#if defined(__AVX512F__)
  return (floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#else
  return (floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#endif
}

// Store kLanes float32 rounded to float16, as torch rounds.
inline void store_halves(uint16_t* to, floats v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#else
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#endif
}

// Load kLanes int8 as float32.
inline floats load_bytes(const int8_t* from) {
#if defined(__AVX512F__)
  return (floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
  return (floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#endif
}

// Load kLanes e4m3 as float32, divided by 256: as bits of a float16, whose exponent has one bit more, they are valid numbers.
inline floats load_fp8(const uint8_t* from) {
#if defined(__AVX512F__)
  const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))), 7);
  return (floats)_mm512_cvtph_ps(_mm256_and_si256(wide, _mm256_set1_epi16(static_cast<int16_t>(0xbf80))));
#else
  const __m128i wide = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))), 7);
  return (floats)_mm256_cvtph_ps(_mm_and_si128(wide, _mm_set1_epi16(static_cast<int16_t>(0xbf80))));
#endif
}

// The same, with NaN for all ones except the sign.
inline floats load_e4m3(const uint8_t* from) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  const __mmask16 is_nan = _mm_cmpeq_epi8_mask(_mm_add_epi8(bytes, bytes), _mm_set1_epi8(-2));
  return (floats)_mm512_mask_blend_ps(is_nan, (__m512)load_fp8(from), _mm512_set1_ps(__builtin_nanf("")));
#else
  return with_nan(load_fp8(from));
#endif
}

// Load kLanes e5m2, the upper halves of float16, as float32.
inline floats load_e5m2(const uint8_t* from) {
#if defined(__AVX512F__)
  return (floats)_mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))), 8));
#else
  return (floats)_mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))), 8));
#endif
}

// The number in bits [4 I, 4 I + 4) of each word.
template <int I>
inline floats nibbles(words w) {
#if defined(__AVX512F__)
  // Only the low four bits of an index are used.
  const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return (floats)_mm512_permutexvar_ps((__m512i)(w >> (4 * I)), numbers);
#else
  return __builtin_convertvector((ints)((w >> (4 * I)) & 15u), floats);
#endif
}

// One of sixteen numbers, chosen by the bits [4 I, 4 I + 4) of each word.
template <int I>
inline floats chosen(words w, const float* sixteen) {
#if defined(__AVX512F__)
  return (floats)_mm512_permutexvar_ps((__m512i)(w >> (4 * I)), _mm512_loadu_ps(sixteen));
#else
  floats v;
  for (int i = 0; i < kLanes; ++i) v[i] = sixteen[w[i] >> (4 * I) & 15u];
  return v;
#endif
}

// One of sixteen numbers for each byte, which is 0 to 15.
inline words bytes_of_table(words w, const int8_t* sixteen) {
  const __m128i numbers = _mm_loadu_si128(reinterpret_cast<const __m128i*>(sixteen));
#if defined(__AVX512F__)
  return (words)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(numbers), (__m512i)w);
#else
  return (words)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(numbers), (__m256i)w);
#endif
}

// The byte B of each word as float32.
template <int B>
inline floats byte_of(words w) {
#if defined(__AVX512F__)
  // Move it to the lowest byte of its word; the bytes above are 0.
  const __m512i places = _mm512_set1_epi32(B - 256) + _mm512_set4_epi32(12, 8, 4, 0);
  return (floats)_mm512_cvtepi32_ps(_mm512_shuffle_epi8((__m512i)w, places));
#else
  return __builtin_convertvector((ints)((w >> (8 * B)) & 255u), floats);
#endif
}

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
constexpr bool kHasByteDots = true;
using byte = int8_t;
#else
constexpr bool kHasByteDots = false;
using byte = int16_t;
#endif
constexpr int kWeightShift = 128;  // The number that is added to weights for `dot_bytes`, which takes unsigned weights.

// sums + the products of four bytes of each row, from 0 to 255, with four columns of x in the order of bytes.cpp.
inline ints dot_bytes(ints sums, words weights, const byte* x) {
#if defined(__AVX512VNNI__)
  return (ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, _mm512_set1_epi32(load<int32_t>(x)));
#elif defined(__AVXVNNI__)
  return (ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)weights, _mm256_set1_epi32(load<int32_t>(x)));
#elif defined(__AVX512BW__)
  const __m512i even = _mm512_and_si512((__m512i)weights, _mm512_set1_epi16(0xff)), odd = _mm512_srli_epi16((__m512i)weights, 8);
  const __m512i a = _mm512_madd_epi16(even, _mm512_set1_epi32(load<int32_t>(x))), b = _mm512_madd_epi16(odd, _mm512_set1_epi32(load<int32_t>(x + 2)));
  return sums + (ints)a + (ints)b;
#else
  const __m256i even = _mm256_and_si256((__m256i)weights, _mm256_set1_epi16(0xff)), odd = _mm256_srli_epi16((__m256i)weights, 8);
  const __m256i a = _mm256_madd_epi16(even, _mm256_set1_epi32(load<int32_t>(x))), b = _mm256_madd_epi16(odd, _mm256_set1_epi32(load<int32_t>(x + 2)));
  return sums + (ints)a + (ints)b;
#endif
}

inline int32_t largest_lane(ints v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32((__m512i)v);
#else
  __m128i most = _mm_max_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
  most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(most, _mm_shuffle_epi32(most, 0xb1)));
#endif
}

inline int32_t sum_of_lanes(ints v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)v);
#else
  __m128i sum = _mm_add_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
#endif
}

// The nearest integer of each, even for ties.
inline ints nearest_ints(floats v) {
#if defined(__AVX512F__)
  return (ints)_mm512_cvtps_epi32((__m512)v);
#else
  return (ints)_mm256_cvtps_epi32((__m256)v);
#endif
}

// Bits of weights whose products are fastest with integers.
#if defined(__AVX512BW__) && !defined(__AVX512VNNI__)
constexpr int kIntegerBits = 4;
#else
constexpr int kIntegerBits = 8;
#endif

// As `PlainByteSums`, for up to 32 columns. The instructions take unsigned weights. Without dot products of bytes, pairs are summed in 16
// bits, where 4-bit weights fit; weights of more bits are the low 4 bits and the rest. With dot products of bytes, sums begin at the bits
// of kOnes, so that a subtraction turns them into floats. Conversions would compete with the multiplications.
template <int Bits>
struct ByteSums {
  static constexpr int kShift = Bits == 8 ? 128 : 0, kCount = kHasByteDots || Bits <= 4 ? 1 : 2;
  ints sums[kCount];

  __attribute__((always_inline)) void begin(int32_t first) {
    sums[0] = ints{} + (kHasByteDots ? bits_as<int32_t>(kOnes) + first : 0);
    if constexpr (kCount == 2) sums[1] = ints{};
  }

  // The same for dot products of bytes, which begin at the bits of kOnes plus an integer.
  __attribute__((always_inline)) void begin_at(int32_t bits) { sums[0] = ints{} + bits; }

  __attribute__((always_inline)) void add(words weights, const int8_t* x) {
    if constexpr (Bits == 8) weights ^= 0x80808080u;
    if constexpr (kHasByteDots) {
      sums[0] = dot_bytes(sums[0], weights, reinterpret_cast<const byte*>(x));
    } else {
      add_pairs(sums[0], Bits > 4 ? weights & 0x0f0f0f0fu : weights, x);
      if constexpr (kCount == 2) add_pairs(sums[1], weights >> 4 & 0x0f0f0f0fu, x);
    }
  }

  __attribute__((always_inline)) floats total(int32_t first) const {
    if constexpr (kHasByteDots) return bits_as<floats>(sums[0]) - kOnes;
    ints sum = widened(sums[0]) + first;
    if constexpr (kCount == 2) sum += widened(sums[1]) << 4;
    return __builtin_convertvector(sum, floats);
  }

  // For dot products of bytes, the total times `by` in one FMA. `ones` is -kOnes times `by`.
  __attribute__((always_inline)) floats scaled(floats by, floats ones) const { return multiply_add(ones, bits_as<floats>(sums[0]), by); }

 private:
#if defined(__AVX512BW__)
  static void add_pairs(ints& sums, words weights, const int8_t* x) {
    sums = (ints)_mm512_add_epi16((__m512i)sums, _mm512_maddubs_epi16((__m512i)weights, _mm512_set1_epi32(load<int32_t>(x))));
  }
  static ints widened(ints pairs) { return (ints)_mm512_madd_epi16((__m512i)pairs, _mm512_set1_epi16(1)); }
#else
  static void add_pairs(ints& sums, words weights, const int8_t* x) {
    sums = (ints)_mm256_add_epi16((__m256i)sums, _mm256_maddubs_epi16((__m256i)weights, _mm256_set1_epi32(load<int32_t>(x))));
  }
  static ints widened(ints pairs) { return (ints)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi16(1)); }
#endif
};

#if defined(__AVX512BF16__)
constexpr bool kHasDots = true;

// sums + the products of two bfloat16 of each row with two columns of x.
inline floats dot_pairs(floats sums, words pairs, const bf16* x) {
  return (floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)pairs, (__m512bh)_mm512_set1_epi32(load<int32_t>(x)));
}

// Two columns of kLanes rows as pairs of bfloat16.
inline words paired(floats even, floats odd) {
  static const __m512i kOrder = [] {
    alignas(64) uint16_t places[2 * kLanes];
    for (int i = 0; i < 2 * kLanes; ++i) places[i] = static_cast<uint16_t>(i / 2 + i % 2 * kLanes);
    return _mm512_load_si512(places);
  }();
  return (words)_mm512_permutexvar_epi16(kOrder, (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even));
}

// Store 2 * kLanes float32 rounded to bfloat16.
inline void store_bf16(bf16* to, floats a, floats b) { store(to, _mm512_cvtne2ps_pbh((__m512)b, (__m512)a)); }
#else
constexpr bool kHasDots = false;

inline void store_bf16(bf16* to, floats a, floats b) { store_rounded(to, a), store_rounded(to + kLanes, b); }
#endif

#if defined(__AVX512FP16__)
constexpr bool kHasHalves = true;
using Float16 = _Float16;
using halves = Float16 __attribute__((vector_size(4 * kLanes)));

// The first kLanes numbers, and the others.
inline floats low(halves v) { return (floats)_mm512_cvtxph_ps(_mm512_castph512_ph256((__m512h)v)); }
inline floats high(halves v) { return (floats)_mm512_cvtxph_ps((__m256h)_mm512_extracti64x4_epi64((__m512i)v, 1)); }

inline halves narrowed(floats a, floats b) {
  const __m512i low_half = _mm512_castsi256_si512((__m256i)_mm512_cvtxps_ph((__m512)a));
  return (halves)_mm512_inserti64x4(low_half, (__m256i)_mm512_cvtxps_ph((__m512)b), 1);
}

// sums + w times the float16 at x.
inline halves multiply_add(halves sums, halves w, const uint16_t* x) {
  // Compilers broadcast a word in two instructions, and the second one takes the place of an FMA.
  asm("vfmadd231ph %2%{1to32%}, %1, %0" : "+v"(sums) : "v"(w), "m"(*x));
  return sums;
}
#else
constexpr bool kHasHalves = false;
#endif

}  // namespace piecework
