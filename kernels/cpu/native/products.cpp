// The products of linear.h in float32. Those of block formats are in libraries of their own (format.cpp).
#include <cstdio>
#include <cstdlib>

#include "format_kernels.h"

namespace piecework {
namespace {

const FormatKernels bf16_kernels = make_kernels<Bf16>(kBf16), fp8_kernels = make_kernels<Fp8>(kFp8);

const bool are_added = [] {
  format_table[kBf16] = &bf16_kernels;
  format_table[kFp8] = format_table[kFp8Blocks] = &fp8_kernels;
  return true;
}();

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

const FormatKernels* format_table[kRows];

void end_without(int32_t format) {
  std::fprintf(stderr, "piecework: the kernels of format %d are not loaded\n", format);
  std::abort();
}

int64_t group_bytes(int32_t format, int columns) {
  if (format == kInt8) return static_cast<int64_t>((columns + 3) / 4) * 4 * kPanel;
  const FormatKernels& kernels = kernels_of(format);
  return static_cast<int64_t>(kernels.groups(columns)) * kernels.bytes;
}

void widen(int32_t format, const uint8_t* groups, int columns, float* out) {
  const FormatKernels& kernels = kernels_of(format);
  kernels.widen(groups, kernels.groups(columns), out);
}

void Multiplier::prepare(const Linear& linear, const Rows& x) {
  if (x.tokens > kScaledRows || is_batch_invariant()) return;
  each_format(linear, [&](int32_t format) {
    const int columns = kernels_of(format).sum_columns;
    if (columns == kUnit) sum_groups<kUnit>(x, linear.columns / kUnit, x_sums_[1]);
    if (columns == kUnit / 2) sum_groups<kUnit / 2>(x, 2 * linear.columns / kUnit, x_sums_[0]);
  });
}

void Multiplier::multiply(const Linear& linear, const uint8_t* panel, const Rows& x, const Span& span, float* to, bool adds) {
  const FormatKernels& kernels = kernels_of(linear.format);
  const uint8_t* weight = panel + group_bytes(linear.format, span.begin);
  const int blocks = (span.tokens + kBlockRows - 1) / kBlockRows, size = (span.tokens + blocks - 1) / blocks;
  const int groups = kernels.groups(span.columns);
  if (kernels.scaled_products && x.tokens <= kScaledRows && !is_batch_invariant()) {
    const float* x_sums = x_sums_[kernels.scale_columns / kUnit].data() + static_cast<int64_t>(span.begin / kernels.scale_columns) * span.tokens;
    return kernels.scaled_products(weight, x.columns(span.first, span.begin), x_sums, span.tokens, groups, to, adds);
  }
  const bool widens = blocks > kernels.narrow_blocks;
  if (widens) {
    widened_.resize(kColumnsAtOnce * kPanel);
    kernels.widen(weight, groups, widened_.data());
  }
  for (int t = 0; t < span.tokens; t += size, to += size * kPanel) {
    const float* from = x.columns(span.first + t, span.begin);
    const int rows = std::min(size, span.tokens - t);
    if (widens)
      some_rows<Widened>(reinterpret_cast<const uint8_t*>(widened_.data()), from, rows, groups * (kernels.columns / Widened::kColumns), to, adds,
                         is_batch_invariant());
    else
      kernels.products(weight, from, rows, groups, to, adds, is_batch_invariant());
  }
}

}  // namespace piecework

// From now on, weights in the format of these kernels, which format.cpp makes, may be multiplied.
extern "C" void piecework_add_format(const void* kernels) {
  const auto* added = static_cast<const piecework::FormatKernels*>(kernels);
  piecework::format_table[added->number] = added;
}
