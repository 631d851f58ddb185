// IQ4_XS: 256 numbers, chosen by 4 bits from a table; a 6-bit scale per 32 numbers, times that of the block.
#pragma once
#include "block.h"

namespace piecework {

struct IQ4_XS : BlockFormat {
  static constexpr char kName[] = "IQ4_XS";
  static constexpr int kNumber = 23, kBytes = 136;
  using Kind = Blocks<Chosen<Iq4>, BlockScales<32, false>>;

  static void read(const uint8_t* from, Block& to) {
    to.scale = half_at(from);
    const uint16_t high = load<uint16_t>(from + 2);
    for (int u = 0; u < 8; ++u) {
      to.scales[u] = static_cast<uint8_t>(((from[4 + u / 2] >> (u % 2 * 4) & 15) | (high >> (2 * u) & 3) << 4) - 32);
      read_nibbles(from + 8 + u * 16, 16, to.numbers + u * kUnit);
    }
  }
};

}  // namespace piecework
