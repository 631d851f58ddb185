// Q3_K: 256 numbers of 3 bits minus 4; a 6-bit scale per 16 numbers, times that of the block.
#pragma once
#include "block.h"

namespace piecework {

struct Q3_K : BlockFormat {
  static constexpr char kName[] = "Q3_K";
  static constexpr int kNumber = 11, kBytes = 110;
  using Kind = Blocks<Planes<2, 1>, BlockScales<16, false, 4>>;

  static void read(const uint8_t* from, Block& to) {
    read_two_bits(from + 32, to.numbers);
    for (int u = 0; u < 8; ++u)
      for (int k = 0; k < kUnit; ++k) to.numbers[u * kUnit + k] |= (from[k] >> u & 1) << 2;
    const uint8_t* scales = from + 96;
    for (int g = 0; g < 16; ++g) {
      const int low = g < 8 ? scales[g] & 15 : scales[g - 8] >> 4, high = scales[8 + g % 4] >> (g / 4 * 2) & 3;
      to.scales[g] = static_cast<uint8_t>((low | high << 4) - 32);
    }
    to.scale = half_at(from + 108);
  }
};

}  // namespace piecework
