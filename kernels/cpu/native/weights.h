// Weights as the products read them: panels of 32 rows of W, side by side, so that a vector holds one column of several rows.
//
// A panel is a row of groups of columns, and at its end the powers of two and the scales of linear.h. How a group holds its numbers is the format's:
//   Bf16  2 columns: pairs of bfloat16, [32 rows][2]
//   Q8   32 columns: [32 columns][32 rows] int8, then the rows' scales [32] float16; weight = scale * number
//   Q4   32 columns: [4][32 rows] words of 8 columns, 4 bits each, then scales and minima [2][32] float16; scale * number + minimum
//   Fp8   2 columns: [2 columns][32 rows] e4m3
//   int8  4 columns: [32 rows][4] numbers plus 128, which bytes.cpp alone reads
// Q8 and Q4 hold GGUF's Q8_0, Q4_0 and Q4_1 without any change of value.
#pragma once
#include "linear.h"
#include "simd.h"

namespace piecework {

constexpr int kWide = 2 * kLanes;  // rows of W whose sums are made together
constexpr int kParts = kPanel / kWide;

constexpr int kAhead = 1536;  // bytes: as far ahead of the products weights are asked for, which their row of FMAs would delay

inline void prefetch(const uint8_t* from, int bytes) {
#pragma GCC unroll 32
  for (int line = 0; line < bytes; line += 64) __builtin_prefetch(from + kAhead + line);
}

inline float half_to_float(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16, exponent = (bits >> 10) & 31u, fraction = bits & 0x3ffu;
  if (exponent == 0) {
    const float size = static_cast<float>(fraction) * 0x1p-24f;
    return sign ? -size : size;
  }
  const uint32_t wide = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13;
  float result;
  std::memcpy(&result, &wide, sizeof result);
  return result;
}

// kLanes float16 to float32.
inline floats load_halves(const uint16_t* from) {
#if defined(__AVX512F__)
  return (floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__AVX2__)
  return (floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  floats v;
  for (int i = 0; i < kLanes; ++i) v[i] = half_to_float(from[i]);
  return v;
#endif
}

// kLanes int8 to float32.
inline floats load_bytes(const int8_t* from) {
#if defined(__AVX512F__)
  return (floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
  return (floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  floats v;
  for (int i = 0; i < kLanes; ++i) v[i] = from[i];
  return v;
#endif
}

// kLanes e4m3 to float32, a 256th of each: under float16's exponent, which is wider by a bit, they are numbers too.
inline floats load_fp8(const uint8_t* from) {
#if defined(__AVX512F__)
  const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))), 7);
  return (floats)_mm512_cvtph_ps(_mm256_and_si256(wide, _mm256_set1_epi16(static_cast<int16_t>(0xbf80))));
#elif defined(__AVX2__)
  const __m128i wide = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))), 7);
  return (floats)_mm256_cvtph_ps(_mm_and_si128(wide, _mm_set1_epi16(static_cast<int16_t>(0xbf80))));
#else
  floats v;
  for (int i = 0; i < kLanes; ++i) v[i] = to_float(fp8{from[i]}) * 0x1p-8f;
  return v;
#endif
}

// The number in bits [4 I, 4 I + 4) of each word.
template <int I>
inline floats nibbles(words w) {
#if defined(__AVX512F__)
  // Only the low four bits of an index count.
  const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return (floats)_mm512_permutexvar_ps((__m512i)(w >> (4 * I)), numbers);
#else
  return __builtin_convertvector((ints)((w >> (4 * I)) & 15u), floats);
#endif
}

// `each(group, part, use)` calls use(begin, i, a, b) for every column begin + i of a group: a and b are the rows [0, kLanes) and
// [kLanes, kWide) of the part, and i is known to the compiler. `each_number` gives the numbers before scale and minimum.
struct Bf16 {
  static constexpr int kColumns = 2, kBytes = 4 * kPanel;
  static constexpr bool kIsScaled = false;

  template <class Use>
  __attribute__((always_inline)) static void each(const uint8_t* group, int part, Use&& use) {
    const uint32_t* from = reinterpret_cast<const uint32_t*>(group) + part * kWide;
    const words a = load<words>(from), b = load<words>(from + kLanes);
    use(0, std::integral_constant<int, 0>{}, bits_as<floats>(a << 16), bits_as<floats>(b << 16));
    use(0, std::integral_constant<int, 1>{}, bits_as<floats>(a & 0xffff0000u), bits_as<floats>(b & 0xffff0000u));
  }
};

struct Q8 {
  static constexpr int kColumns = 32, kBytes = 32 * kPanel + 2 * kPanel;
  static constexpr bool kIsScaled = true, kHasMinimum = false;

  static const uint16_t* scales(const uint8_t* group, int part) { return reinterpret_cast<const uint16_t*>(group + 32 * kPanel) + part * kWide; }

  template <class Use>
  __attribute__((always_inline)) static void each_number(const uint8_t* group, int part, Use&& use) {
    const int8_t* from = reinterpret_cast<const int8_t*>(group) + part * kWide;
    for (int begin = 0; begin < 32; begin += 4, from += 4 * kPanel)
      unrolled<4>([&](auto i) __attribute__((always_inline)) { use(begin, i, load_bytes(from + i * kPanel), load_bytes(from + i * kPanel + kLanes)); });
  }

  template <class Use>
  __attribute__((always_inline)) static void each(const uint8_t* group, int part, Use&& use) {
    const floats a = load_halves(scales(group, part)), b = load_halves(scales(group, part) + kLanes);
    each_number(group, part, [&](int begin, auto i, floats v, floats w) __attribute__((always_inline)) { use(begin, i, v * a, w * b); });
  }
};

struct Q4 {
  static constexpr int kColumns = 32, kBytes = 16 * kPanel + 4 * kPanel;
  static constexpr bool kIsScaled = true, kHasMinimum = true;

  static const uint16_t* scales(const uint8_t* group, int part) { return reinterpret_cast<const uint16_t*>(group + 16 * kPanel) + part * kWide; }
  static const uint16_t* minima(const uint8_t* group, int part) { return scales(group, part) + kPanel; }

  template <class Use>
  __attribute__((always_inline)) static void each_number(const uint8_t* group, int part, Use&& use) {
    const uint32_t* from = reinterpret_cast<const uint32_t*>(group) + part * kWide;
    for (int begin = 0; begin < 32; begin += 8, from += kPanel) {
      const words a = load<words>(from), b = load<words>(from + kLanes);
      unrolled<8>([&](auto i) __attribute__((always_inline)) { use(begin, i, nibbles<i>(a), nibbles<i>(b)); });
    }
  }

  template <class Use>
  __attribute__((always_inline)) static void each(const uint8_t* group, int part, Use&& use) {
    const floats a = load_halves(scales(group, part)), b = load_halves(scales(group, part) + kLanes);
    const floats c = load_halves(minima(group, part)), d = load_halves(minima(group, part) + kLanes);
    each_number(group, part,
                [&](int begin, auto i, floats v, floats w) __attribute__((always_inline)) { use(begin, i, v * a + c, w * b + d); });
  }
};

// Each number is a 256th of what it stands for, which the scales make up for; a row that holds a NaN has it as its scale.
struct Fp8 {
  static constexpr int kColumns = 2, kBytes = 2 * kPanel;
  static constexpr bool kIsScaled = false;

  template <class Use>
  __attribute__((always_inline)) static void each(const uint8_t* group, int part, Use&& use) {
    const uint8_t* from = group + part * kWide;
    unrolled<2>([&](auto i) __attribute__((always_inline)) { use(0, i, load_fp8(from + i * kPanel), load_fp8(from + i * kPanel + kLanes)); });
  }
};

// A panel widened to float32: [columns][32], an even number of columns.
struct Widened {
  static constexpr int kColumns = 2, kBytes = 8 * kPanel;
  static constexpr bool kIsScaled = false;

  template <class Use>
  __attribute__((always_inline)) static void each(const uint8_t* group, int part, Use&& use) {
    const float* from = reinterpret_cast<const float*>(group) + part * kWide;
    unrolled<2>([&](auto i) __attribute__((always_inline)) { use(0, i, load<floats>(from + i * kPanel), load<floats>(from + i * kPanel + kLanes)); });
  }
};

// work(format) with the type of a format that is known when it runs, and is not int8.
template <class Work>
inline void with_format(int32_t format, Work&& work) {
  if (format == kQ4) return work(Q4{});
  if (format == kQ8) return work(Q8{});
  if (format == kFp8 || format == kFp8Blocks) return work(Fp8{});
  work(Bf16{});
}

}  // namespace piecework
