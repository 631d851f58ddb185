// Q5_K: 256 numbers of 5 bits; a scale and a minimum of 6 bits per 32 numbers, times those of the block.
#pragma once
#include "block.h"

namespace piecework {

struct Q5_K : BlockFormat {
  static constexpr char kName[] = "Q5_K";
  static constexpr int kNumber = 13, kBytes = 176;
  using Kind = Blocks<Planes<4, 1>, BlockScales<32, true>>;

  static void read(const uint8_t* from, Block& to) {
    read_factors(from, to);
    read_scales(from + 4, to);
    for (int two = 0; two < 4; ++two) read_nibbles(from + 48 + two * kUnit, kUnit, to.numbers + two * 2 * kUnit);
    for (int u = 0; u < 8; ++u)
      for (int k = 0; k < kUnit; ++k) to.numbers[u * kUnit + k] |= (from[16 + k] >> u & 1) << 4;
  }
};

}  // namespace piecework
