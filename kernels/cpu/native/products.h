// The products of linear.h in float32, for one format of weights and every number of rows that are multiplied together.
#pragma once
#include "linear.h"
#include "weights.h"

namespace piecework {

// Rows are unrolled by pragmas. With lambdas of `unrolled`, compilers take half as long again.

// c [R][32] = or += the products of a panel's groups with as many columns of R rows of x, kStride apart.
template <class Kind, int R, int kChains = (R == 1 && Kind::kColumns > 1) ? 2 : 1>
void products(const uint8_t* panel, const float* x, int groups, float* c, bool adds) {
  constexpr int kAtOnce = kPartsAtOnce<R>;
  for (int part = 0; part < kParts; part += kAtOnce) {
    floats sums[kChains][R][2 * kAtOnce] = {};
    float* const to = c + part * kWide;
    if (adds)
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int i = 0; i < 2 * kAtOnce; ++i) sums[0][r][i] = load<floats>(to + r * kPanel + i * kLanes);
    const float* next = x;
    for (int g = 0; g < groups; ++g, next += Kind::kColumns) {
      const uint8_t* group = panel + static_cast<int64_t>(g) * Kind::kBytes;
      prefetch(group, Kind::kBytes);
#pragma GCC unroll 2
      for (int p = 0; p < kAtOnce; ++p)
        Kind::each(group, part + p, [&](int begin, auto i, floats a, floats b) __attribute__((always_inline)) {
#pragma GCC unroll 12
          for (int r = 0; r < R; ++r) {
            sums[i % kChains][r][2 * p] += next[r * kStride + begin + i] * a;
            sums[i % kChains][r][2 * p + 1] += next[r * kStride + begin + i] * b;
          }
        });
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int i = 0; i < 2 * kAtOnce; ++i) {
        for (int chain = 1; chain < kChains; ++chain) sums[0][r][i] += sums[chain][r][i];
        store(to + r * kPanel + i * kLanes, sums[0][r][i]);
      }
  }
}

constexpr int kScaledRows = 2;  // With so few rows, scaling the sums of a group is cheaper than scaling its numbers.

// The same for formats with scales. `x_sums` [columns / group][R] has the sum of each group of x.
template <class Kind, int R>
void scaled_products(const uint8_t* panel, const float* x, const float* x_sums, int blocks, float* c, bool adds) {
  using Scales = typename Kind::Scales;
  constexpr int kChains = 4 / R, kUnitBytes = Kind::kBytes / Kind::kUnits;
  for (int part = 0; part < kParts; ++part) {
    const int row = part * kWide;
    floats totals[R][2] = {};
    if (adds)
#pragma GCC unroll 2
      for (int r = 0; r < R; ++r) {
        totals[r][0] = load<floats>(c + r * kPanel + row);
        totals[r][1] = load<floats>(c + r * kPanel + row + kLanes);
      }
    const float *next = x, *next_sums = x_sums;
    for (int b = 0; b < blocks; ++b) {
      const uint8_t *block = panel + static_cast<int64_t>(b) * Kind::kBytes, *scales = Kind::scales(block);
      for (int u = 0; u < Kind::kUnits; ++u, next += kUnit) {
        prefetch(block + u * kUnitBytes, kUnitBytes);
        unrolled<Kind::kGroups>([&](auto g) __attribute__((always_inline)) {
          floats sums[kChains][R][2] = {};
          Kind::Numbers::template each<g * Scales::kColumns, (g + 1) * Scales::kColumns>(
              Kind::unit(block, u), row, [&](int begin, auto i, floats v, floats w) __attribute__((always_inline)) {
#pragma GCC unroll 2
                for (int r = 0; r < R; ++r) {
                  sums[i % kChains][r][0] += next[r * kStride + begin + i] * v;
                  sums[i % kChains][r][1] += next[r * kStride + begin + i] * w;
                }
              });
          unrolled<2>([&](auto half) __attribute__((always_inline)) {
            const int group = u * Kind::kGroups + g, at = row + half * kLanes;
            const floats scale = Scales::scale(scales, group, at);
#pragma GCC unroll 2
            for (int r = 0; r < R; ++r) {
              for (int chain = 1; chain < kChains; ++chain) sums[0][r][half] += sums[chain][r][half];
              totals[r][half] += sums[0][r][half] * scale;
              if constexpr (Scales::kHasMinimum) totals[r][half] += next_sums[r] * Scales::minimum(scales, group, at);
            }
          });
          next_sums += R;
        });
      }
    }
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r) {
      store(c + r * kPanel + row, totals[r][0]);
      store(c + r * kPanel + row + kLanes, totals[r][1]);
    }
  }
}

// Set to [columns][32] to the numbers of a panel's groups.
template <class Kind>
void widen_panel(const uint8_t* panel, int groups, float* out) {
  for (int g = 0; g < groups; ++g, out += Kind::kColumns * kPanel) {
    prefetch(panel + static_cast<int64_t>(g) * Kind::kBytes, Kind::kBytes);
    for (int part = 0; part < kParts; ++part)
      Kind::each(panel + static_cast<int64_t>(g) * Kind::kBytes, part, [&](int begin, auto i, floats a, floats b) __attribute__((always_inline)) {
        store(out + (begin + i) * kPanel + part * kWide, a);
        store(out + (begin + i) * kPanel + part * kWide + kLanes, b);
      });
  }
}

// Up to this number of blocks of rows, it is faster if each block widens the numbers itself. For most formats in blocks this is 0, because
// it would take long to compile.
template <class Kind>
constexpr int kNarrowBlocks = 3;
template <>
constexpr int kNarrowBlocks<Bf16> = 6;
template <class Numbers, class Scales>
constexpr int kNarrowBlocks<Blocks<Numbers, Scales>> = Scales::kUnits == 1 && (Numbers::kBits == 4 || std::is_same_v<Numbers, Bytes>) ? 3 : 0;

template <class Kind>
void some_rows(const uint8_t* weight, const float* x, int count, int groups, float* to, bool adds, bool is_invariant) {
  if (count == 1 && is_invariant) return products<Kind, 1, 1>(weight, x, groups, to, adds);
  with_constant<kBlockRows>(count, [&](auto rows) { products<Kind, rows>(weight, x, groups, to, adds); });
}

}  // namespace piecework
