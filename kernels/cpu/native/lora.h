// Low-rank updates of adapters (LoRA): y += (x a^T) b * scale, as kernels/lora.py describes them.
#pragma once
#include <vector>

#include "vectors.h"

namespace piecework {

// The adapters of a linear layer. A layer that computes several projections at once has a part for each.
struct Adapters {
  const bf16 *a, *b;    // [slots][parts][columns][rank], [slots][panels][rank][32].
  const float* scales;  // [slots][parts]
  const int32_t* ranks; // [slots][parts]; 0: the part is not changed.
  const int32_t* ends;  // [parts]: the row after the last one of each part.
  int32_t parts, rank, rows, columns;

  int narrow_size() const { return parts * rank; }
};

// Tokens of one adapter, for which its matrices are read once.
struct AdapterGroup {
  static constexpr int kMost = kLanes == 16 ? 8 : 4;

  int slot = -1, count = 0;
  int tokens[kMost];
};

// The groups of tokens with these slots. Tokens with a negative slot are in none.
std::vector<AdapterGroup> group_by_adapter(const int32_t* slots, int tokens);

// The updates of a linear layer for some tokens:
//
//     updates.set(adapters, t, x);             // for each token
//     updates.shrink(adapters, i);             // for each i below shrinks(adapters), after all tokens were set
//     updates.expand(adapters, row, values);   // for each panel, after all calls of shrink, and some time after fetch(adapters, row)
class AdapterUpdates {
 public:
  AdapterUpdates() = default;
  // `narrow_size` and `columns` are the largest of all layers.
  AdapterUpdates(const int32_t* slots, int tokens, int narrow_size, int columns);

  // Keep a row x [columns].
  void set(const Adapters& adapters, int t, const bf16* x);

  int shrinks(const Adapters& adapters) const { return static_cast<int>(groups_.size()) * adapters.parts; }

  // narrow [rank] = scale * x a^T, for one group of tokens and one part.
  void shrink(const Adapters& adapters, int i);

  // Ask for what `expand` will read, which is many small pieces of memory if there are many adapters.
  void fetch(const Adapters& adapters, int row) const;

  // Round values [tokens][32], and add the updates of the rows from `row` on, which is a multiple of 32. Values of tokens without an
  // adapter, and of parts that an adapter does not change, stay as they are. Called by several threads at once.
  void expand(const Adapters& adapters, int row, float* values) const;

 private:
  // The rows of a group's tokens in `from`, `size` apart.
  template <class Number>
  static void rows_of(const AdapterGroup& group, Number* from, int size, Number** rows) {
    for (int i = 0; i < group.count; ++i) rows[i] = from + static_cast<int64_t>(group.tokens[i]) * size;
  }

  std::vector<AdapterGroup> groups_;
  Aligned<float> x_, narrow_;  // [tokens][columns], [tokens][parts][rank] of the current layer.
};

}  // namespace piecework
