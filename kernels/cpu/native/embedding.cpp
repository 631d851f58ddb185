// Looks up rows of an embedding whose table is stored in panels, because a tied head multiplies by it.
#include "linear.h"

namespace piecework {

void embed(const Linear& table, int64_t row, bf16* to) {
  if (table.format == kRows) {
    std::memcpy(to, reinterpret_cast<const bf16*>(table.weight) + row * table.columns, table.columns * sizeof(bf16));
    return;
  }
  constexpr int kAtOnce = 256;  // Columns: whole groups of all formats.
  alignas(64) float wide[kAtOnce * kPanel];
  const uint8_t* panel = table.weight + row / kPanel * panel_bytes(table.format, table.columns);
  const float* from = wide + row % kPanel;
  for (int first = 0; first < table.columns; first += kAtOnce, to += kAtOnce) {
    const int count = std::min(kAtOnce, table.columns - first);
    widen(table.format, panel + group_bytes(table.format, first), count, wide);
    for (int i = 0; i < count; ++i) to[i] = from_float<bf16>(from[i * kPanel]);
  }
}

}  // namespace piecework

// out [count, columns] = the rows `ids`.
extern "C" void piecework_embedding(const void* table, const int64_t* ids, int count, void* out, int threads) {
  using namespace piecework;
  const Linear& rows = *static_cast<const Linear*>(table);
#pragma omp parallel for num_threads(std::min(threads, (count + 7) / 8))
  for (int t = 0; t < count; ++t) embed(rows, ids[t], static_cast<bf16*>(out) + static_cast<int64_t>(t) * rows.columns);
}
