// The products of linear.h with 8-bit integers, whose sums are exact.
//
// Most instructions that multiply four pairs of bytes at once take one unsigned factor. That is the weight, to which 128 was added when it
// was packed. x is not changed, but the sum of its columns is needed: kWeightShift times that sum is subtracted from each result.
#include "linear.h"
#include "tiles.h"
#include "weights.h"

namespace piecework {
namespace {

constexpr int kColumns = 4;  // Columns of a group.

// c [R][32] = or += the products of a panel's groups with as many columns of R rows of x.
template <int R>
void byte_products(const uint8_t* panel, const byte* x, int groups, const int32_t* corrections, float* c, bool adds) {
  constexpr int kAtOnce = kPartsAtOnce<R>, kChains = (R == 1 ? 4 : R <= 3 ? 2 : 1) / kAtOnce;
  for (int part = 0; part < kParts; part += kAtOnce) {
    ints sums[kChains][R][2 * kAtOnce] = {};
    const auto each_vector = [](auto use) __attribute__((always_inline)) {
      unrolled<R>([&](auto r) __attribute__((always_inline)) {
        unrolled<2 * kAtOnce>([&](auto i) __attribute__((always_inline)) { use(r, i); });
      });
    };
    each_vector([&](auto r, auto i) __attribute__((always_inline)) { sums[0][r][i] += corrections[r]; });
    const uint8_t* weights = panel + part * kWide * kColumns;
    const auto meet = [&](int g, auto chain) __attribute__((always_inline)) {
      const uint8_t* group = weights + static_cast<int64_t>(g) * kColumns * kPanel;
      prefetch(group, kAtOnce * kWide * kColumns);
      words w[2 * kAtOnce];
      unrolled<2 * kAtOnce>([&](auto i) __attribute__((always_inline)) { w[i] = load<words>(group + i * kLanes * kColumns); });
      each_vector([&](auto r, auto i) __attribute__((always_inline)) {
        sums[chain][r][i] = dot_bytes(sums[chain][r][i], w[i], x + r * kStrideOf<byte> + kColumns * g);
      });
    };
    int g = 0;
    for (; g + kChains <= groups; g += kChains) unrolled<kChains>([&](auto chain) __attribute__((always_inline)) { meet(g + chain, chain); });
    for (; g < groups; ++g) meet(g, std::integral_constant<int, 0>{});
    each_vector([&](auto r, auto i) __attribute__((always_inline)) {
      for (int chain = 1; chain < kChains; ++chain) sums[0][r][i] += sums[chain][r][i];
      float* to = c + r * kPanel + part * kWide + i * kLanes;
      const floats made = __builtin_convertvector(sums[0][r][i], floats);
      store(to, adds ? load<floats>(to) + made : made);
    });
  }
}

// The corrections after the numbers of a row's block.
inline const int32_t* corrections_of(const byte* block) { return reinterpret_cast<const int32_t*>(block + kColumnsAtOnce); }

// c [tokens][32] = or += the same with tiles, `steps` of them from column `begin` of the rows' block on.
void tile_products(const uint8_t* panel, const byte* rows, int begin, int steps, int segment, int tokens, float* c, bool adds) {
  static thread_local Aligned<int32_t> sums;
  sums.resize(static_cast<size_t>(tokens) * kPanel);
  const auto* x = reinterpret_cast<const uint8_t*>(rows + begin);
  amx::multiply<false>(panel, x, kStrideOf<byte> * sizeof(byte), steps, tokens, sums.data(), false);
  for (int t = 0; t < tokens; ++t, c += kPanel) {
    const int32_t correction = corrections_of(rows + t * kStrideOf<byte>)[segment];
    for (int i = 0; i < kPanel; i += kLanes) {
      const floats made = __builtin_convertvector(load<ints>(sums.data() + t * kPanel + i) + correction, floats);
      store(c + i, adds ? load<floats>(c + i) + made : made);
    }
  }
}

}  // namespace

void set_bytes(const int8_t* values, int count, byte* to, int32_t* corrections) {
  corrections[0] = 0;
  for (int first = 0, segment = 1; first < count; first += kScaledColumns, ++segment) {
    const int size = std::min(kScaledColumns, count - first);
    int32_t sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int k = 0; k < size; ++k) sum += values[first + k];
    corrections[segment] = -kWeightShift * sum;
    corrections[0] += corrections[segment];
  }
  if constexpr (kHasByteDots) {
    std::memcpy(to, values, count);
    std::memset(to + count, 0, -count & 3);
  } else {
    // In each four columns, even ones come first.
    for (int k = 0; k < count; ++k) to[(k & ~3) + (k & 1) * 2 + (k >> 1 & 1)] = values[k];
    for (int k = count; k & 3; ++k) to[(k & ~3) + (k & 1) * 2 + (k >> 1 & 1)] = 0;
  }
}

void Multiplier::multiply(const Linear& linear, const uint8_t* panel, const RowsOf<byte>& x, const Span& span, float* to, bool adds) {
  const int segment = x.groups > 1 ? 1 + span.begin % kColumnsAtOnce / kScaledColumns : 0;
  panel += group_bytes(linear.format, span.begin);
  int begin = span.begin % kColumnsAtOnce;
  const int end = begin + span.columns;
  if (amx::kHasTiles && kHasByteDots && span.tokens >= amx::kLeastRows && span.columns >= amx::kTileBytes && amx::are_usable()) {
    const int steps = span.columns / amx::kTileBytes;
    const byte* rows = x.at(span.begin / kColumnsAtOnce, span.first);
    tile_products(panel, rows, begin, steps, segment, span.tokens, to, adds);
    begin += steps * amx::kTileBytes, panel += steps * amx::kTileBytes * kPanel, adds = true;
    if (begin == end) return;
  }
  const bool is_rest = begin > span.begin % kColumnsAtOnce;  // Columns whose correction is computed.
  const int blocks = (span.tokens + kBlockRows - 1) / kBlockRows, size = (span.tokens + blocks - 1) / blocks;
  const int groups = (end - begin + kColumns - 1) / kColumns;
  for (int t = 0; t < span.tokens; t += size, to += size * kPanel)
    with_constant<kBlockRows>(std::min(size, span.tokens - t), [&](auto rows) {
      const byte* block = x.at(span.begin / kColumnsAtOnce, span.first + t);
      int32_t corrections[rows];
      for (int r = 0; r < rows; ++r)
        corrections[r] = is_rest ? 0 : corrections_of(block + r * kStrideOf<byte>)[segment];
      byte_products<rows>(panel, block + begin, groups, corrections, to, adds);
    });
}

}  // namespace piecework
