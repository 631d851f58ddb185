// Q6_K: 256 numbers of 6 bits minus 32; an 8-bit scale per 16 numbers, times that of the block.
#pragma once
#include "block.h"

namespace piecework {

struct Q6_K : BlockFormat {
  static constexpr char kName[] = "Q6_K";
  static constexpr int kNumber = 14, kBytes = 210;
  using Kind = Blocks<Planes<4, 2>, BlockScales<16, false, 32>>;

  static void read(const uint8_t* from, Block& to) {
    for (int half = 0; half < 2; ++half) {
      uint8_t* numbers = to.numbers + half * 4 * kUnit;
      read_nibbles(from + half * 2 * kUnit, 2 * kUnit, numbers);
      for (int u = 0; u < 4; ++u)
        for (int k = 0; k < kUnit; ++k) numbers[u * kUnit + k] |= (from[128 + half * kUnit + k] >> 2 * u & 3) << 4;
    }
    std::memcpy(to.scales, from + 192, 16);
    to.scale = half_at(from + 208);
  }
};

}  // namespace piecework
