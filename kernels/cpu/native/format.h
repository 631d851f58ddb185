// What the products know of one format of weights. The functions of each format are compiled in a file and a library of their own
// (format.cpp), because a model needs few of them.
#pragma once
#include "weights.h"

namespace piecework {

// One number for each row of a panel.
struct PanelRows {
  floats low[kParts], high[kParts];
};

// The largest bits of a row but the sign, which are those of its largest number, or, of a format with scales, of the largest they allow.
struct Largest {
  uint32_t bits[kPanel] = {};

  void meet(int r, float number) { bits[r] = std::max(bits[r], bits_as<uint32_t>(number) & 0x7fffffffu); }
};

struct FormatKernels {
  int32_t number;          // The format.
  int32_t columns, bytes;  // Of a group.
  int32_t narrow_blocks;   // Up to this number of blocks of rows, each block widens the numbers itself, by `products`.
  int32_t sum_columns;     // Columns whose sum in x is multiplied by a minimum, or 0.
  int32_t scale_columns;   // Columns that have one scale, or 0.

  // to [rows][32] = or += the products of groups with rows of x, kStride apart.
  void (*products)(const uint8_t* weight, const float* x, int rows, int groups, float* to, bool adds, bool is_invariant);
  // The same for one or two rows, whose sums are scaled. `x_sums`: the sums of x, [columns / sum_columns][rows].
  void (*scaled_products)(const uint8_t* weight, const float* x, const float* x_sums, int rows, int groups, float* to, bool adds);
  // The same with x in 8 bits, from its group `at` on (integer_products.h).
  void (*integers)(const uint8_t* weight, const GroupedColumns* x, int at, int columns, int rows, float* to, bool adds, bool unpacks);

  void (*widen)(const uint8_t* weight, int groups, float* out);                                                // [columns][32]
  void (*narrow_pairs)(const uint8_t* weight, int columns, uint32_t* out);                                     // [columns / 2][32][2]
  void (*narrow_halves)(const uint8_t* weight, int columns, const PanelRows& by, half* out);                   // [columns][32]
  void (*find_largest)(const uint8_t* weight, int columns, Largest& largest);

  int groups(int all) const { return (all + columns - 1) / columns; }
};

extern const FormatKernels* format_table[kRows];  // By number; null if the format's library is not loaded.

// Prints which format is missing, and ends the process.
[[noreturn]] void end_without(int32_t format);

// Called for each panel, so it must be short.
inline const FormatKernels& kernels_of(int32_t format) {
  const FormatKernels* kernels = format_table[format];
  if (!kernels) end_without(format);
  return *kernels;
}

}  // namespace piecework
