// Q4_1: 32 numbers of 4 bits, a scale and a minimum.
#pragma once
#include "block.h"

namespace piecework {

struct Q4_1 : BlockFormat {
  static constexpr char kName[] = "Q4_1";
  static constexpr int kNumber = 3, kBytes = 20;
  using Kind = Blocks<Planes<4, 0>, UnitScales<true>>;

  static void read(const uint8_t* from, Block& to) {
    to.scale = half_at(from), to.minimum = half_at(from + 2);
    read_nibbles(from + 4, 16, to.numbers);
  }
};

}  // namespace piecework
