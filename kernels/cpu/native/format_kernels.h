// Compiles the functions of one format.
#pragma once
#include "format.h"
#include "integer_products.h"
#include "narrowing.h"
#include "products.h"

namespace piecework {

template <class Kind>
FormatKernels make_kernels(int32_t number) {
  FormatKernels made{number, Kind::kColumns, Kind::kBytes, kNarrowBlocks<Kind>};
  if constexpr (kNarrowBlocks<Kind> > 0) made.products = some_rows<Kind>;
  made.widen = widen_panel<Kind>;
  made.find_largest = [](const uint8_t* weight, int columns, Largest& largest) {
    largest = largest_of(Kind{}, weight, (columns + Kind::kColumns - 1) / Kind::kColumns);
  };
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  made.narrow_pairs = [](const uint8_t* weight, int columns, uint32_t* out) {
    narrow_panel<Kind>(weight, (columns + Kind::kColumns - 1) / Kind::kColumns, out);
  };
#endif
#if defined(__AVX512FP16__) || defined(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC)
  made.narrow_halves = [](const uint8_t* weight, int columns, const PanelRows& by, half* out) {
    narrow_groups(Kind{}, weight, (columns + Kind::kColumns - 1) / Kind::kColumns, by, out);
  };
#endif
  if constexpr (Kind::kIsScaled) {
    using Scales = typename Kind::Scales;
    made.scale_columns = Scales::kColumns;
    made.sum_columns = Scales::kHasMinimum ? Scales::kColumns : 0;
    made.scaled_products = [](const uint8_t* weight, const float* x, const float* x_sums, int rows, int groups, float* to, bool adds) {
      with_constant<kScaledRows>(rows, [&](auto count) { scaled_products<Kind, count>(weight, x, x_sums, groups, to, adds); });
    };
    made.integers = all_integer_products<Kind>;
  }
  return made;
}

}  // namespace piecework
