// Arm's NEON, and the instructions for products that some of its CPUs have. FEAT names are those of Arm's Architecture Reference Manual:
// dot products of bytes (DotProd), of signed and unsigned bytes (I8MM), of bfloat16 (BF16), FMAs of float16 (FP16).
#pragma once
#include <arm_neon.h>

#include "vectors.h"

namespace piecework {

// sums + a * b, rounded once. If compilers chose which of two products to round, results would depend on the code around them.
inline floats multiply_add(floats sums, floats a, floats b) { return (floats)vfmaq_f32((float32x4_t)sums, (float32x4_t)a, (float32x4_t)b); }

// Load kLanes float16 as float32.
inline floats load_halves(const uint16_t* from) { return (floats)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from))); }

// Store kLanes float32 rounded to float16, as torch rounds.
inline void store_halves(uint16_t* to, floats v) { vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)v))); }

// Load kLanes bytes with sign extension to 16 bits.
inline int16x4_t load_wide_bytes(const void* from) {
  return vget_low_s16(vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(load<uint32_t>(static_cast<const uint8_t*>(from))))));
}

// Load kLanes int8 as float32.
inline floats load_bytes(const int8_t* from) { return (floats)vcvtq_f32_s32(vmovl_s16(load_wide_bytes(from))); }

// Load kLanes e4m3 as float32, divided by 256: as bits of a float16, whose exponent has one bit more, they are valid numbers.
inline floats load_fp8(const uint8_t* from) {
  const uint16x4_t wide = vreinterpret_u16_s16(vshl_n_s16(load_wide_bytes(from), 7));
  return (floats)vcvt_f32_f16(vreinterpret_f16_u16(vand_u16(wide, vdup_n_u16(0xbf80))));
}

// The same, with NaN for all ones except the sign.
inline floats load_e4m3(const uint8_t* from) { return with_nan(load_fp8(from)); }

// Load kLanes e5m2, the upper halves of float16, as float32.
inline floats load_e5m2(const uint8_t* from) {
  return (floats)vcvt_f32_f16(vreinterpret_f16_s16(vshl_n_s16(load_wide_bytes(from), 8)));
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
  return (words)vqtbl1q_s8(vld1q_s8(sixteen), (uint8x16_t)w);
}

// The byte B of each word as float32.
template <int B>
inline floats byte_of(words w) {
  return __builtin_convertvector((ints)((w >> (8 * B)) & 255u), floats);
}

// The number in bits [4 I, 4 I + 4) of each word. The conversion divides by the place value of these bits.
template <int I>
inline floats nibbles(words w) {
  const uint32x4_t bits = (uint32x4_t)(w & (15u << (4 * I)));
  if constexpr (I == 0) return (floats)vcvtq_f32_u32(bits);
  else return (floats)vcvtq_n_f32_u32(bits, 4 * I);
}

#if defined(__ARM_FEATURE_MATMUL_INT8) || defined(__ARM_FEATURE_DOTPROD)
constexpr bool kHasByteDots = true;
using byte = int8_t;
#else
constexpr bool kHasByteDots = false;
using byte = int16_t;
#endif

// The number that is added to weights for `dot_bytes`: 0 if it supports signed weights.
#if defined(__ARM_FEATURE_DOTPROD) && !defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int kWeightShift = 0;
#else
constexpr int kWeightShift = 128;
#endif

// sums + the products of four bytes of each row, from 0 to 255, minus 128 and plus kWeightShift, with four columns of x in the order of
// bytes.cpp.
inline ints dot_bytes(ints sums, words weights, const byte* x) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
  const int8x16_t columns = vreinterpretq_s8_s32(vdupq_n_s32(load<int32_t>(x)));
  return (ints)vusdotq_s32((int32x4_t)sums, vreinterpretq_u8_u32((uint32x4_t)weights), columns);
#elif defined(__ARM_FEATURE_DOTPROD)
  const int8x16_t columns = vreinterpretq_s8_s32(vdupq_n_s32(load<int32_t>(x)));
  return (ints)vdotq_s32((int32x4_t)sums, vreinterpretq_s8_u32((uint32x4_t)(weights ^ 0x80808080u)), columns);
#else
  unrolled<4>([&](auto i) { sums += (ints)(weights >> (8 * i) & 255u) * static_cast<int32_t>(x[i % 2 * 2 + i / 2]); });
  return sums;
#endif
}

inline int32_t largest_lane(ints v) { return vmaxvq_s32((int32x4_t)v); }

inline int32_t sum_of_lanes(ints v) { return vaddvq_s32((int32x4_t)v); }

// The nearest integer of each, even for ties.
inline ints nearest_ints(floats v) { return (ints)vcvtnq_s32_f32((float32x4_t)v); }

// kIntegerBits: bits of weights whose products are fastest with `ByteSums`.
#if defined(__ARM_FEATURE_DOTPROD)
constexpr int kIntegerBits = 8;

// As `PlainByteSums`, with dot products of signed bytes.
template <int Bits>
struct ByteSums : PlainByteSums<Bits> {
  void add(words weights, const int8_t* x) {
    const int8x16_t columns = vreinterpretq_s8_s32(vdupq_n_s32(load<int32_t>(x)));
    this->sums = (ints)vdotq_s32((int32x4_t)this->sums, vreinterpretq_s8_u32((uint32x4_t)weights), columns);
  }
};
#else
constexpr int kIntegerBits = 0;

template <int Bits>
using ByteSums = PlainByteSums<Bits>;
#endif

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr bool kHasDots = true;

// sums + the products of two bfloat16 of each row with two columns of x.
inline floats dot_pairs(floats sums, words pairs, const bf16* x) {
  const bfloat16x8_t columns = vreinterpretq_bf16_s32(vdupq_n_s32(load<int32_t>(x)));
  return (floats)vbfdotq_f32((float32x4_t)sums, vreinterpretq_bf16_u32((uint32x4_t)pairs), columns);
}

// Two columns of kLanes rows as pairs of bfloat16.
inline words paired(floats even, floats odd) {
  const uint16x4_t a = vreinterpret_u16_bf16(vcvt_bf16_f32((float32x4_t)even)), b = vreinterpret_u16_bf16(vcvt_bf16_f32((float32x4_t)odd));
  return (words)vreinterpretq_u32_u16(vcombine_u16(vzip1_u16(a, b), vzip2_u16(a, b)));
}

// Store 2 * kLanes float32 rounded to bfloat16.
inline void store_bf16(bf16* to, floats a, floats b) {
  vst1q_u16(&to->bits, vreinterpretq_u16_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32((float32x4_t)a), (float32x4_t)b)));
}
#else
constexpr bool kHasDots = false;

inline void store_bf16(bf16* to, floats a, floats b) { store_rounded(to, a), store_rounded(to + kLanes, b); }
#endif

#if defined(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC)
constexpr bool kHasHalves = true;
using Float16 = __fp16;
using halves = float16x8_t;

// The first kLanes numbers, and the others.
inline floats low(halves v) { return (floats)vcvt_f32_f16(vget_low_f16(v)); }
inline floats high(halves v) { return (floats)vcvt_high_f32_f16(v); }

inline halves narrowed(floats a, floats b) { return vcvt_high_f16_f32(vcvt_f16_f32((float32x4_t)a), (float32x4_t)b); }

// sums + w times the float16 at x.
inline halves multiply_add(halves sums, halves w, const uint16_t* x) {
  return vfmaq_f16(sums, w, vreinterpretq_f16_u16(vld1q_dup_u16(x)));
}
#else
constexpr bool kHasHalves = false;
#endif

}  // namespace piecework
