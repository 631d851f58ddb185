// The tools of the block formats of GGUF files (ggml-org/ggml, src/ggml-common.h and ggml-quants.c).
#pragma once
#include <cmath>

#include "../blocks.h"

namespace piecework {

// The base of a block format. A format has these members:
//   kName, kNumber  in GGUF files; the number is also the format of panels (linear.h)
//   kBytes          bytes of a block
//   Kind            how panels keep the columns of a block (blocks.h)
//   read            unpacks a block
struct BlockFormat {
  static constexpr bool kPrefersIntegers = true;  // Whether 8-bit x may be the default (ways.cpp).
};

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "bytes of a word are told apart by their places");

// An unpacked block: its numbers, and its scales in the form of `Kind::Scales`.
struct Block {
  uint8_t numbers[8 * kUnit];
  uint8_t scales[16], minima[16];
  uint16_t scale, minimum;
};

inline uint16_t half_at(const uint8_t* from) { return load<uint16_t>(from); }

// A float16 times minus a power of two. It is exact unless it exceeds the range, which gives infinity.
inline uint16_t times_minus(uint16_t half, int power) {
  const uint32_t sign = ~half & 0x8000u;
  uint32_t exponent = (half >> 10) & 31u, fraction = half & 0x3ffu;
  if (exponent == 0) {
    // A subnormal number: its fraction is multiplied, and may become a normal number.
    fraction <<= power;
    for (exponent = fraction > 0x3ffu ? 1 : 0; fraction > 0x7ffu; fraction >>= 1) ++exponent;
    return static_cast<uint16_t>(sign | exponent << 10 | (fraction & 0x3ffu));
  }
  exponent += power;
  return static_cast<uint16_t>(exponent > 30 ? sign | 0x7c00u : sign | exponent << 10 | fraction);
}

constexpr uint64_t kEightOnes = 0x0101010101010101u;  // A 1 in each byte.

// 2 * count numbers: the low halves of the bytes, then the high halves.
inline void read_nibbles(const uint8_t* from, int count, uint8_t* numbers) {
  for (int k = 0; k < count; k += 8) {
    const uint64_t bytes = load<uint64_t>(from + k);
    store(numbers + k, bytes & 15 * kEightOnes), store(numbers + count + k, bytes >> 4 & 15 * kEightOnes);
  }
}

// Add the fifth bits of 32 numbers.
inline void add_fifth(const uint8_t* from, uint8_t* numbers) {
  for (int e = 0; e < kUnit / 8; ++e, numbers += 8) {
    // Bit k stays in byte k, and the addition moves it to the byte's highest bit.
    const uint64_t each = (from[e] * kEightOnes & 0x8040201008040201u) + 0x00406070787c7e7fu;
    store(numbers, load<uint64_t>(numbers) | (each >> 3 & 16 * kEightOnes));
  }
}

// 8 scales and 8 minima of 6 bits in 12 bytes. The upper two bits of the last four are in the first eight bytes.
inline void read_scales(const uint8_t* from, Block& to) {
  for (int g = 0; g < 4; ++g) {
    to.scales[g] = from[g] & 63, to.minima[g] = from[g + 4] & 63;
    to.scales[g + 4] = (from[g + 8] & 15) | (from[g] >> 6) << 4;
    to.minima[g + 4] = from[g + 8] >> 4 | (from[g + 4] >> 6) << 4;
  }
}

// Minima are subtracted from the products of scales and numbers.
inline void read_factors(const uint8_t* from, Block& to) { to.scale = half_at(from), to.minimum = half_at(from + 2) ^ 0x8000u; }

// 256 numbers of two bits: four times 32 in the same 32 bytes.
inline void read_two_bits(const uint8_t* from, uint8_t* numbers) {
  for (int u = 0; u < 8; ++u)
    for (int k = 0; k < kUnit; ++k) numbers[u * kUnit + k] = from[u / 4 * kUnit + k] >> 2 * (u % 4) & 3;
}

}  // namespace piecework
