// Low-rank updates of adapters (LoRA): y += (x a^T) b * scale, as kernels/lora.py describes them.
#pragma once
#include "common.h"

namespace piecework {

// The adapters of a linear layer. A layer that computes several projections at once has a part for each.
struct Adapters {
  const bf16 *a, *b;    // [slots][parts][rank][columns], [slots][rank][rows].
  const float* scales;  // [slots][parts]
  const int32_t* ranks; // [slots][parts]; 0: the part is not changed.
  const int32_t* ends;  // [parts]: the row after the last one of each part.
  int32_t parts, rank, rows, columns;

  int narrow_size() const { return parts * rank; }
};

// narrow [parts][rank] = scale * x a^T for a row x [columns].
void shrink(const Adapters& adapters, int slot, const bf16* x, float* narrow);

// out [count] = values [count], rounded, plus the update of the rows [row, row + count). In float32, to be rounded again.
void expand(const Adapters& adapters, int slot, const float* narrow, int row, int count, const float* values, float* out);

}  // namespace piecework
