// The products of linear.h by dot products of bfloat16, if the CPU has them.
#include "format.h"
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

}  // namespace

void Multiplier::multiply(const Linear& linear, const uint8_t* panel, const RowsOf<bf16>& x, const Span& span, float* to, bool adds) {
  panel += group_bytes(linear.format, span.begin);
  const uint32_t* weights = reinterpret_cast<const uint32_t*>(panel);
  if (linear.format != kBf16) {
    pairs_.resize(kColumnsAtOnce / 2 * kPanel);
    weights = pairs_.data();
    kernels_of(linear.format).narrow_pairs(panel, span.columns, pairs_.data());
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
