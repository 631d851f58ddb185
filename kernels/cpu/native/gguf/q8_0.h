// Q8_0: 32 signed numbers of 8 bits, and a scale.
#pragma once
#include "block.h"

namespace piecework {

struct Q8_0 : BlockFormat {
  static constexpr char kName[] = "Q8_0";
  static constexpr int kNumber = 8, kBytes = 34;
  using Kind = Blocks<Bytes, UnitScales<false>>;

  static void read(const uint8_t* from, Block& to) {
    to.scale = half_at(from);
    std::memcpy(to.numbers, from + 2, kUnit);
  }
};

}  // namespace piecework
