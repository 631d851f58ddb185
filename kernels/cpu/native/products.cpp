// The products of linear.h for every format of weights and every number of rows that are multiplied together.
#include "linear.h"
#include "weights.h"

namespace piecework {
namespace {

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

// Not inlined, because two functions call it and it takes long to compile.
template <class Kind>
__attribute__((noinline)) void widen_panel(const uint8_t* panel, int groups, float* out) {
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
void some_rows(const uint8_t* weight, const float* x, int count, int groups, float* to, bool adds) {
  if (count == 1 && is_batch_invariant()) return products<Kind, 1, 1>(weight, x, groups, to, adds);
  with_constant<kBlockRows>(count, [&](auto rows) { products<Kind, rows>(weight, x, groups, to, adds); });
}

// Set to [groups][tokens] to the sum of each group of columns of x.
template <int Columns>
void sum_groups(const Rows& x, int groups, Aligned<float>& to) {
  to.resize(static_cast<size_t>(groups) * x.tokens);
  for (int g = 0; g < groups; ++g)
    for (int t = 0; t < x.tokens; ++t) {
      const float* group = x.columns(t, g * Columns);
      float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
      for (int k = 0; k < Columns; ++k) sum += group[k];
      to[g * x.tokens + t] = sum;
    }
}

}  // namespace

int64_t group_bytes(int32_t format, int columns) {
  if (format == kInt8) return static_cast<int64_t>((columns + 3) / 4) * 4 * kPanel;
  int64_t bytes = 0;
  with_format(format, [&](auto kind) { bytes = static_cast<int64_t>((columns + kind.kColumns - 1) / kind.kColumns) * kind.kBytes; });
  return bytes;
}

void widen(int32_t format, const uint8_t* groups, int columns, float* out) {
  with_format(format, [&](auto kind) { widen_panel<decltype(kind)>(groups, (columns + kind.kColumns - 1) / kind.kColumns, out); });
}

void Multiplier::prepare(const Linear& linear, const Rows& x) {
  if (x.tokens > kScaledRows || is_batch_invariant()) return;
  each_format(linear, [&](int32_t format) {
    with_format(format, [&](auto kind) {
      if constexpr (kind.kIsScaled) {
        using Scales = typename decltype(kind)::Scales;
        if constexpr (Scales::kHasMinimum) sum_groups<Scales::kColumns>(x, linear.columns / Scales::kColumns, x_sums_[Scales::kColumns / kUnit]);
      }
    });
  });
}

void Multiplier::multiply(const Linear& linear, const uint8_t* panel, const Rows& x, const Span& span, float* to, bool adds) {
  const uint8_t* weight = panel + group_bytes(linear.format, span.begin);
  with_format(linear.format, [&](auto kind) { multiply_as<decltype(kind)>(weight, x, span, to, adds); });
}

template <class Kind>
void Multiplier::multiply_as(const uint8_t* weight, const Rows& x, const Span& span, float* to, bool adds) {
  const int blocks = (span.tokens + kBlockRows - 1) / kBlockRows, size = (span.tokens + blocks - 1) / blocks;
  const int groups = (span.columns + Kind::kColumns - 1) / Kind::kColumns;
  if constexpr (Kind::kIsScaled) {
    if (x.tokens <= kScaledRows && !is_batch_invariant()) {
      const float* x_sums = x_sums_[Kind::Scales::kColumns / kUnit].data() + static_cast<int64_t>(span.begin / Kind::Scales::kColumns) * span.tokens;
      return with_constant<kScaledRows>(span.tokens, [&](auto rows) {
        scaled_products<Kind, rows>(weight, x.columns(span.first, span.begin), x_sums, groups, to, adds);
      });
    }
  }
  const bool widens = blocks > kNarrowBlocks<Kind>;
  if (widens) {
    widened_.resize(kColumnsAtOnce * kPanel);
    widen_panel<Kind>(weight, groups, widened_.data());
  }
  for (int t = 0; t < span.tokens; t += size, to += size * kPanel) {
    const float* from = x.columns(span.first + t, span.begin);
    const int rows = std::min(size, span.tokens - t);
    if (widens)
      some_rows<Widened>(reinterpret_cast<const uint8_t*>(widened_.data()), from, rows, groups * (Kind::kColumns / Widened::kColumns), to, adds);
    else if constexpr (kNarrowBlocks<Kind> > 0)
      some_rows<Kind>(weight, from, rows, groups, to, adds);
  }
}

}  // namespace piecework
