// Rows of an embedding whose table lies in panels, as a head that is tied to it is multiplied.
#include "weights.h"

namespace piecework {

void embed(const Linear& table, int64_t row, bf16* to) {
  if (table.format == kRows) {
    std::memcpy(to, reinterpret_cast<const bf16*>(table.weight) + row * table.columns, table.columns * sizeof(bf16));
    return;
  }
  const uint8_t* panel = table.weight + row / kPanel * panel_bytes(table.format, table.columns);
  const int part = static_cast<int>(row % kPanel) / kWide, lane = static_cast<int>(row % kWide);
  with_format(table.format, [&](auto kind) {
    for (int first = 0; first < table.columns; first += kind.kColumns, panel += kind.kBytes)
      kind.each(panel, part, [&](int begin, auto i, floats a, floats b) __attribute__((always_inline)) {
        if (first + begin + i < table.columns) to[first + begin + i] = from_float<bf16>(lane < kLanes ? a[lane] : b[lane - kLanes]);
      });
  });
}

}  // namespace piecework

// out [count, columns] of the rows `ids`.
extern "C" void piecework_embedding(const void* table, const int64_t* ids, int count, void* out, int threads) {
  using namespace piecework;
  const Linear& rows = *static_cast<const Linear*>(table);
#pragma omp parallel for num_threads(std::min(threads, (count + 7) / 8))
  for (int t = 0; t < count; ++t) embed(rows, ids[t], static_cast<bf16*>(out) + static_cast<int64_t>(t) * rows.columns);
}
