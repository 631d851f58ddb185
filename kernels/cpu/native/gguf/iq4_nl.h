// IQ4_NL: 32 numbers, chosen by 4 bits from a table, and a scale.
#pragma once
#include "block.h"

namespace piecework {

struct IQ4_NL : BlockFormat {
  static constexpr char kName[] = "IQ4_NL";
  static constexpr int kNumber = 20, kBytes = 18;
  using Kind = Blocks<Chosen<Iq4>, UnitScales<false>>;

  static void read(const uint8_t* from, Block& to) {
    to.scale = half_at(from);
    read_nibbles(from + 2, 16, to.numbers);
  }
};

}  // namespace piecework
