// Q4_0: 32 numbers of 4 bits minus 8, and a scale.
#pragma once
#include "block.h"

namespace piecework {

struct Q4_0 : BlockFormat {
  static constexpr char kName[] = "Q4_0";
  static constexpr int kNumber = 2, kBytes = 18;
  using Kind = Blocks<Planes<4, 0>, UnitScales<false, 8>>;

  static void read(const uint8_t* from, Block& to) {
    to.scale = half_at(from);
    read_nibbles(from + 2, 16, to.numbers);
  }
};

}  // namespace piecework
