// Q4_K: 256 numbers of 4 bits; a scale and a minimum of 6 bits per 32 numbers, times those of the block.
#pragma once
#include "block.h"

namespace piecework {

struct Q4_K : BlockFormat {
  static constexpr char kName[] = "Q4_K";
  static constexpr int kNumber = 12, kBytes = 144;
  using Kind = Blocks<Planes<4, 0>, BlockScales<32, true>>;

  static void read(const uint8_t* from, Block& to) {
    read_factors(from, to);
    read_scales(from + 4, to);
    for (int two = 0; two < 4; ++two) read_nibbles(from + 16 + two * kUnit, kUnit, to.numbers + two * 2 * kUnit);
  }
};

}  // namespace piecework
