// Q2_K: 256 numbers of 2 bits; a scale and a minimum of 4 bits per 16 numbers, times those of the block.
#pragma once
#include "block.h"

namespace piecework {

struct Q2_K : BlockFormat {
  static constexpr char kName[] = "Q2_K";
  static constexpr int kNumber = 10, kBytes = 84;
  // 8-bit x costs more precision than a default may (docs/quantization.md#activations-of-8-bits-on-a-cpu).
  static constexpr bool kPrefersIntegers = false;
  using Kind = Blocks<Planes<2, 0>, NibbleScales>;

  static void read(const uint8_t* from, Block& to) {
    std::memcpy(to.scales, from, 16);
    read_two_bits(from + 16, to.numbers);
    read_factors(from + 80, to);
  }
};

}  // namespace piecework
