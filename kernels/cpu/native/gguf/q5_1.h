// Q5_1: 32 numbers of 5 bits, a scale and a minimum.
#pragma once
#include "block.h"

namespace piecework {

struct Q5_1 : BlockFormat {
  static constexpr char kName[] = "Q5_1";
  static constexpr int kNumber = 7, kBytes = 24;
  using Kind = Blocks<Planes<4, 1>, UnitScales<true>>;

  static void read(const uint8_t* from, Block& to) {
    to.scale = half_at(from), to.minimum = half_at(from + 2);
    read_nibbles(from + 8, 16, to.numbers);
    add_fifth(from + 4, to.numbers);
  }
};

}  // namespace piecework
