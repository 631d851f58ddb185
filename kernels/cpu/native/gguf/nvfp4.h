// NVFP4: 64 numbers of e2m1, and an e4m3 scale per 16 numbers. The scale of the tensor is that of a panel's rows (linear.h).
#pragma once
#include "block.h"

namespace piecework {

struct NVFP4 : BlockFormat {
  static constexpr char kName[] = "NVFP4";
  static constexpr int kNumber = kNvfp4, kBytes = 36;
  using Kind = Blocks<Chosen<E2m1>, Fp8Scales>;

  static void read(const uint8_t* from, Block& to) {
    std::memcpy(to.scales, from, 4);
    for (int g = 0; g < 4; ++g) read_nibbles(from + 4 + 8 * g, 8, to.numbers + 16 * g);
  }
};

}  // namespace piecework
