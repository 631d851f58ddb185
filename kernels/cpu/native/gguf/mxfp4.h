// MXFP4: 32 numbers of e2m1, and a scale that is a power of two. Panels keep twice the numbers and half the scale as a float16, which is 0
// if the scale is too small.
#pragma once
#include "block.h"

namespace piecework {

struct MXFP4 : BlockFormat {
  static constexpr char kName[] = "MXFP4";
  static constexpr int kNumber = 39, kBytes = 17;
  using Kind = Blocks<Chosen<E2m1>, UnitScales<false>>;

  static void read(const uint8_t* from, Block& to) {
    to.scale = float_to_half(std::ldexp(1.0f, from[0] - 128));
    read_nibbles(from + 1, 16, to.numbers);
  }
};

}  // namespace piecework
