// Q5_0: 32 numbers of 5 bits minus 16, and a scale. Panels keep the minimum, which is -16 times the scale.
#pragma once
#include "block.h"

namespace piecework {

struct Q5_0 : BlockFormat {
  static constexpr char kName[] = "Q5_0";
  static constexpr int kNumber = 6, kBytes = 22;
  using Kind = Blocks<Planes<4, 1>, UnitScales<true>>;

  static void read(const uint8_t* from, Block& to) {
    to.scale = half_at(from), to.minimum = times_minus(to.scale, 4);
    read_nibbles(from + 6, 16, to.numbers);
    add_fifth(from + 2, to.numbers);
  }
};

}  // namespace piecework
