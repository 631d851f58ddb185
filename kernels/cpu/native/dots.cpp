// The products of linear.h by dot products of bfloat16, if the CPU has them.
#include "linear.h"
#include "tiles.h"
#include "weights.h"

namespace piecework {

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)

namespace {

// c [R][32] = or += the products of pairs of columns, [pairs][32][2], with those of R rows of x.
template <int R>
void dot_products(const uint32_t* panel, const bf16* x, int pairs, float* c, bool adds) {
  for (int part = 0; part < kParts; ++part, panel += kWide, c += kWide) {
    floats sums[R][2] = {};
    if (adds)
      unrolled<R>([&](auto r) __attribute__((always_inline)) {
        sums[r][0] = load<floats>(c + r * kPanel);
        sums[r][1] = load<floats>(c + r * kPanel + kLanes);
      });
    const uint32_t* weights = panel;
    for (int i = 0; i < pairs; ++i, weights += kPanel) {
      prefetch(reinterpret_cast<const uint8_t*>(weights), 4 * kWide);
      const words a = load<words>(weights), b = load<words>(weights + kLanes);
      unrolled<R>([&](auto r) __attribute__((always_inline)) {
        const bf16* from = x + r * kStrideOf<bf16> + 2 * i;
        sums[r][0] = dot_pairs(sums[r][0], a, from);
        sums[r][1] = dot_pairs(sums[r][1], b, from);
      });
    }
    unrolled<R>([&](auto r) __attribute__((always_inline)) {
      store(c + r * kPanel, sums[r][0]);
      store(c + r * kPanel + kLanes, sums[r][1]);
    });
  }
}

// The groups of a panel as pairs of columns, [columns / 2][32][2].
template <class Kind>
void narrow_panel(const uint8_t* panel, int groups, uint32_t* out) {
  for (int g = 0; g < groups; ++g, out += Kind::kColumns / 2 * kPanel)
    for (int part = 0; part < kParts; ++part) {
      floats a{}, b{};
      Kind::each(panel + static_cast<int64_t>(g) * Kind::kBytes, part, [&](int begin, auto i, floats c, floats d) __attribute__((always_inline)) {
        if constexpr (i % 2 == 1) {
          uint32_t* to = out + (begin + i) / 2 * kPanel + part * kWide;
          store(to, paired(a, c));
          store(to + kLanes, paired(b, d));
        }
        a = c, b = d;
      });
    }
}

}  // namespace

void Multiplier::multiply(const Linear& linear, const uint8_t* panel, const RowsOf<bf16>& x, const Span& span, float* to, bool adds) {
  panel += group_bytes(linear.format, span.begin);
  const uint32_t* weights = reinterpret_cast<const uint32_t*>(panel);
  if (linear.format != kBf16) {
    pairs_.resize(kColumnsAtOnce / 2 * kPanel);
    weights = pairs_.data();
    with_format(linear.format, [&](auto kind) {
      narrow_panel<decltype(kind)>(panel, (span.columns + kind.kColumns - 1) / kind.kColumns, pairs_.data());
    });
  }
  int begin = span.begin;
  if (amx::kHasTiles && span.tokens >= amx::kLeastRows && !is_batch_invariant() && amx::are_usable()) {
    constexpr int kColumns = amx::kTileBytes / sizeof(bf16);
    const int steps = span.columns / kColumns;
    const auto* rows = reinterpret_cast<const uint8_t*>(x.columns(span.first, begin));
    if (steps > 0) amx::multiply<true>(reinterpret_cast<const uint8_t*>(weights), rows, kStrideOf<bf16> * sizeof(bf16), steps, span.tokens, to, adds);
    begin += steps * kColumns, weights += steps * kColumns / 2 * kPanel, adds |= steps > 0;
  }
  const int pairs = (span.begin + span.columns - begin + 1) / 2;
  if (pairs == 0) return;
  const int blocks = (span.tokens + kBlockRows - 1) / kBlockRows, size = (span.tokens + blocks - 1) / blocks;
  for (int t = 0; t < span.tokens; t += size, to += size * kPanel)
    with_constant<kBlockRows>(std::min(size, span.tokens - t), [&](auto rows) {
      dot_products<rows>(weights, x.columns(span.first + t, begin), pairs, to, adds);
    });
}

#else

void Multiplier::multiply(const Linear&, const uint8_t*, const RowsOf<bf16>&, const Span&, float*, bool) {}

#endif

}  // namespace piecework
