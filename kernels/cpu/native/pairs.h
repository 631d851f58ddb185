// The products of integers.cpp on CPUs that multiply bytes in pairs (AVX2 without dot products of bytes). `vpmaddubsw` takes unsigned
// weights. Sums of its pairs stay in 16 bits while they fit, which takes half the instructions of 32 bits:
//
//   4 bits and fewer: 16 columns of a lane sum up to 16 * 15 * 127 = 30,480
//   5 bits: sums begin at -16 times x's sum, so that numbers are -16 to 15; the minimum compensates
//   6 bits, of 16 columns: sums begin at -32 times x's sum, which is the format's minimum
//   e2m1, from -12 to 12: 16 is added to each, and sums begin at -16 times x's sum
//   8 bits: 128 is added to each. Two pairs do not fit, so pairs are added in 32 bits. For one pair to fit, x is rounded
//     so that two numbers of the same sign sum up to at most 128: 255 * 128 = 32,640.
//
// The integer scales of K-quants are multiplied by the instruction that adds pairs.
#pragma once
#include "linear.h"
#include "weights.h"

namespace piecework {

// Whether numbers have too many bits for sums of 16 bits.
template <class Numbers>
constexpr bool kIsWide = Numbers::kMost > 63;

#if defined(__AVX2__) && !defined(__AVX512BW__) && !defined(__AVXVNNI__)
constexpr bool kHasPairs = true;
constexpr int kManyRows = 6;  // Rows of x whose sums fit the registers.

namespace pairs {

template <class Scales>
constexpr bool kHasWholeScales = Scales::kUnits == 8;

// The number that is added to signed numbers.
template <class Numbers>
constexpr int kAdded = Numbers::kBits != 8 ? 0 : kIsWide<Numbers> ? 128 : 16;

// How far below 0 the sums begin, per number of x.
template <class Kind>
constexpr int kShift = Kind::Numbers::kBits == 8 ? kAdded<typename Kind::Numbers>
                       : Kind::Numbers::kBits == 5 ? 16
                       : Kind::Numbers::kBits == 4 ? 0
                                                   : Kind::Scales::kOffset;

// Whether a minimum must be added. If it is an offset times the scale, sums that begin below 0 contain it.
template <class Kind>
constexpr bool kTakesMinimumApart = Kind::Scales::kHasMinimum && (Kind::Scales::kOffset == 0 || kShift<Kind> == 0);

// kLanes signed bytes, each twice in 16 bits.
inline __m256i twice(const uint8_t* from) {
  const __m256i upper =
      _mm256_setr_epi8(-1, 0, -1, 0, -1, 1, -1, 1, -1, 2, -1, 2, -1, 3, -1, 3, -1, 4, -1, 4, -1, 5, -1, 5, -1, 6, -1, 6, -1, 7, -1, 7);
  return _mm256_srai_epi16(_mm256_shuffle_epi8(_mm256_set1_epi64x(load<int64_t>(from)), upper), 8);
}

// The integer scales of a group, likewise.
template <int Columns, bool HasMinima, int Offset>
inline __m256i scale_pairs(BlockScales<Columns, HasMinima, Offset>, const uint8_t* scales, int group, int row) {
  return twice(scales + group * kPanel + row);
}

inline __m256i scale_pairs(NibbleScales, const uint8_t* scales, int group, int row) {
  return _mm256_and_si256(twice(scales + group * kPanel + row), _mm256_set1_epi16(15));
}

// The minima of a group.
template <class Scales>
inline floats minimum_of(Scales, const uint8_t* scales, int group, int row) {
  return Scales::minimum(scales, group, row);
}

// The same without half vectors, which compilers take apart.
inline floats minimum_of(NibbleScales, const uint8_t* scales, int group, int row) {
  const __m256i both = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(scales + group * kPanel + row)));
  return (floats)_mm256_cvtepi32_ps(_mm256_srli_epi32(both, 4)) * NibbleScales::factor(scales, kPanel + row);
}

inline __m256i four_columns(const int8_t* x) { return _mm256_set1_epi32(load<int32_t>(x)); }

// Keep the order of additions. Otherwise compilers add many products as a tree, whose leaves do not fit the registers.
__attribute__((always_inline)) inline void in_order(__m256i& sum) { asm("" : "+x"(sum)); }

// sum + the products of four columns of kLanes rows with x, in pairs.
template <class Numbers>
__attribute__((always_inline)) inline void add(__m256i& sum, __m256i weights, __m256i x) {
  const __m256i pairs = _mm256_maddubs_epi16(weights, x);
  if constexpr (kIsWide<Numbers>)
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  else
    sum = _mm256_add_epi16(sum, pairs);
  in_order(sum);
}

// Prefetch what `few_columns` will read of a row of x. Hardware prefetching does not follow so many rows.
template <class Kind>
__attribute__((always_inline)) inline void ask_for(const GroupedColumns& x, int g) {
#pragma GCC unroll 4
  for (int line = 0; line < 4; ++line) __builtin_prefetch(x.numbers + g * GroupedColumns::kGroup + 64 * line);
  __builtin_prefetch(x.scales + g);
  if constexpr (Kind::Scales::kHasMinimum) __builtin_prefetch(x.scaled_sums + g);
}

// c [R][32] = or += the products of up to eight units from `block` on with R rows of x, for V vectors of the panel's rows.
template <class Kind, int R, int V>
void few_columns(const uint8_t* block, int row, const GroupedColumns* x, int g, int units, float* c, bool adds) {
  using Numbers = typename Kind::Numbers;
  using Scales = typename Kind::Scales;
  constexpr int kSteps = 2 * Scales::kColumns / 8, kUnitBytes = Kind::kBytes / Kind::kUnits;
  constexpr bool kIsWhole = kHasWholeScales<Scales>, kHasMinimum = kTakesMinimumApart<Kind>;
  constexpr bool kScalesHalves = !kIsWhole && Kind::kGroups == 2;  // In float32, without minima.
  const uint8_t* const scales = Kind::scales(block);
  const int first = g;
  floats totals[R][V] = {};
  if (!kIsWhole && adds)
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) totals[r][v] = load<floats>(c + r * kPanel + row + v * kLanes);
  for (int u = 0; u < units; ++u, ++g) {
    const uint8_t* const own = block + u / Kind::kUnits * Kind::kBytes;
    const uint8_t *unit = Kind::unit(own, u % Kind::kUnits), *of_unit = Kind::scales(own);
    prefetch(block + u * kUnitBytes + row * kUnitBytes / kPanel, V * kLanes * kUnitBytes / kPanel);
    __m256i both[R][V];
    unrolled<Kind::kGroups>([&](auto half) __attribute__((always_inline)) {
      __m256i sums[R][V];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        if constexpr (kShift<Kind> > 0) {
          __m256i below = _mm256_set1_epi32(Kind::kGroups == 2 ? x[r].halves[2 * g + half] : x[r].sums[g]);
          if constexpr (kIsWide<Numbers>)
            below = _mm256_madd_epi16(below, _mm256_set1_epi16(kShift<Kind>));
          else
            below = _mm256_slli_epi16(below, __builtin_ctz(kShift<Kind>));
#pragma GCC unroll 4
          for (int v = 0; v < V; ++v) sums[r][v] = below;
        } else {
#pragma GCC unroll 4
          for (int v = 0; v < V; ++v) sums[r][v] = _mm256_setzero_si256();
        }
      }
      unrolled<kSteps>([&](auto i) __attribute__((always_inline)) {
        constexpr int kJ = (half * kSteps + i) / 2, kP = i % 2;
        __m256i weights[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
          weights[v] = (__m256i)Numbers::template four<kJ, kP>(unit, row + v * kLanes);
          if constexpr (kAdded<Numbers> > 0) weights[v] = _mm256_add_epi8(weights[v], _mm256_set1_epi8(static_cast<char>(kAdded<Numbers>)));
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const __m256i four = four_columns(x[r].numbers + g * kUnit + 8 * kJ + 4 * kP);
#pragma GCC unroll 4
          for (int v = 0; v < V; ++v) add<Numbers>(sums[r][v], weights[v], four);
        }
      });
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        if constexpr (!kIsWide<Numbers>) {
          __m256i by = _mm256_set1_epi16(1);
          if constexpr (kIsWhole) by = scale_pairs(Scales{}, scales, u * Kind::kGroups + half, row + v * kLanes);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) sums[r][v] = _mm256_madd_epi16(sums[r][v], by);
        }
        if constexpr (kScalesHalves) {
          const floats scale = Scales::scale(of_unit, u % Kind::kUnits * Kind::kGroups + half, row + v * kLanes);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) totals[r][v] = multiply_add(totals[r][v], (floats)_mm256_cvtepi32_ps(sums[r][v]), scale * x[r].scales[g]);
          continue;
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) both[r][v] = half == 0 ? sums[r][v] : _mm256_add_epi32(both[r][v], sums[r][v]);
      }
    });
    if constexpr (kScalesHalves) continue;
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      const int at = row + v * kLanes;
      floats scale{}, minimum{};
      if constexpr (!kIsWhole) scale = Scales::scale(of_unit, 0, at);
      if constexpr (kIsWhole && kIsWide<Numbers>) scale = Scales::whole(scales, u, at);
      if constexpr (!kIsWhole && kHasMinimum) minimum = Scales::minimum(of_unit, 0, at);
      if constexpr (!kIsWhole && Numbers::kBits == 5) minimum += scale * 16.0f;
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const floats sum = (floats)_mm256_cvtepi32_ps(both[r][v]);
        if constexpr (kIsWhole && !kIsWide<Numbers>)
          totals[r][v] = multiply_add(totals[r][v], sum, splat(x[r].scales[g]));
        else
          totals[r][v] = multiply_add(totals[r][v], sum, scale * x[r].scales[g]);
        if constexpr (!kIsWhole && kHasMinimum) totals[r][v] = multiply_add(totals[r][v], minimum, splat(x[r].scaled_sums[g]));
      }
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) {
    const int at = row + v * kLanes;
    if constexpr (kIsWhole) {
      const floats factor = Scales::factor(scales, at);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) totals[r][v] = multiply_add(adds ? load<floats>(c + r * kPanel + at) : floats{}, totals[r][v], factor);
      if constexpr (kHasMinimum)
        for (int i = 0; i < units * Kind::kGroups; ++i) {
          floats minimum = minimum_of(Scales{}, scales, i, at);
          if constexpr (Numbers::kBits == 5) minimum += Scales::scale(scales, i, at) * 16.0f;
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            const float sum = Kind::kGroups == 2 ? x[r].scaled_halves[2 * first + i] : x[r].scaled_sums[first + i];
            totals[r][v] = multiply_add(totals[r][v], minimum, splat(sum));
          }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) store(c + r * kPanel + at, totals[r][v]);
  }
}

}  // namespace pairs

// c [R][32] = or += the products of a panel's blocks with as many columns of R rows of x. `at` is the first group of x. A few columns of
// all rows of the panel come before the next ones, so that weights are read in order. Up to six rows use two vectors of W or more, for
// which each number of x is loaded once. The sums of more rows do not fit the registers, so these alternate on data in the first cache.
// `rest` is the number of remaining rows of x if these are split into blocks, whose next numbers are prefetched; else 0.
template <class Kind, int R>
void pair_products(const uint8_t* panel, const GroupedColumns* x, int at, int blocks, float* c, bool adds, int rest) {
  constexpr int kAtOnce = 8 / Kind::kUnits, kVectors = 2 * kPartsAtOnce<R>, kSteps = kPanel / (kVectors * kLanes);
  constexpr int kRows = R <= kManyRows ? R : (R + 1) / 2;
  const int first = at;
  for (int b = 0; b < blocks; b += kAtOnce, panel += kAtOnce * Kind::kBytes, at += 8, adds = true) {
    const bool is_last = b + kAtOnce >= blocks;  // Then other rows of x come next.
    const GroupedColumns* next = is_last ? x + R : x;
    const int asked = std::min(R, is_last ? rest - R : rest);  // Of the next rows.
    for (int step = 0; step < kSteps; ++step) {
      // More rows are not split into blocks.
      if constexpr (R <= kManyRows)
#pragma GCC unroll 4
        for (int r = 0; r < R; r += kSteps)
          if (r + step < asked) pairs::ask_for<Kind>(next[r + step], is_last ? first : at + 8);
      const int row = step * kVectors * kLanes, units = std::min(kAtOnce, blocks - b) * Kind::kUnits;
      pairs::few_columns<Kind, kRows, kVectors>(panel, row, x, at, units, c, adds);
      if constexpr (kRows < R) pairs::few_columns<Kind, R - kRows, kVectors>(panel, row, x + kRows, at, units, c + kRows * kPanel, adds);
    }
  }
}

// The largest number of a group of x, or the largest sum of two that are multiplied as a pair, by the bits of their sizes. NaN is above
// all.
inline ints most_of_pairs(ints most, const words (&pairs)[2]) {
  const auto meet = [&](floats a, floats b) {
    const ints sums = (ints)_mm256_hadd_ps((__m256)a, (__m256)b) & 0x7fffffff;
    most = most > sums ? most : sums;
  };
  meet(bits_as<floats>(pairs[0] << 16), bits_as<floats>(pairs[1] << 16));
  meet(bits_as<floats>(pairs[0] & 0xffff0000u), bits_as<floats>(pairs[1] & 0xffff0000u));
  return most;
}

// Set the numbers of a group, whose scale is set, and their sums.
inline void set_pairs(GroupedColumns& x, int g, const ints (&even)[2], const ints (&odd)[2]) {
  const __m256i a = _mm256_packs_epi32((__m256i)even[0], (__m256i)odd[0]), b = _mm256_packs_epi32((__m256i)even[1], (__m256i)odd[1]);
  store(x.numbers + g * GroupedColumns::kGroup, _mm256_permute4x64_epi64(_mm256_packs_epi16(a, b), 0xd8));
  const auto folded = [](ints v) { return _mm_add_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1)); };
  const __m128i lanes = _mm_hadd_epi32(folded(even[0] + odd[0]), folded(even[1] + odd[1]));  // Two of each half.
  const __m128i below = _mm_packs_epi32(_mm_sub_epi32(_mm_setzero_si128(), lanes), _mm_setzero_si128());
  _mm_storel_epi64(reinterpret_cast<__m128i*>(x.halves + 2 * g), below);
  x.sums[g] = _mm_cvtsi128_si32(_mm_add_epi16(below, _mm_srli_epi64(below, 32)));
  const __m128i halves = _mm_hadd_epi32(lanes, lanes);
  const __m128 scaled = _mm_mul_ps(_mm_cvtepi32_ps(_mm_hadd_epi32(halves, halves)), _mm_set1_ps(x.scales[g]));
  x.scaled_sums[g] = _mm_cvtss_f32(scaled);
  _mm_storel_pi(reinterpret_cast<__m64*>(x.scaled_halves + 2 * g), _mm_mul_ps(_mm_cvtepi32_ps(halves), _mm_set1_ps(x.scales[g])));
}
#else
constexpr bool kHasPairs = false;
constexpr int kManyRows = kIntegerRows;

template <class Kind, int R>
void pair_products(const uint8_t* panel, const GroupedColumns* x, int at, int blocks, float* c, bool adds, int rest);
template <int Vectors>
ints most_of_pairs(ints most, const words (&pairs)[Vectors]);
template <int Vectors>
void set_pairs(GroupedColumns& x, int g, const ints (&even)[Vectors], const ints (&odd)[Vectors]);
#endif

}  // namespace piecework
