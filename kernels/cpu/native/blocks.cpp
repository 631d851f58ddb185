// GGUF's blocks (ggml-org/ggml, src/ggml-common.h and ggml-quants.c) brought into panels.
#include "blocks.h"

#include <cmath>

namespace piecework {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "bytes of a word are told apart by their places");

// A block of one row: its numbers, and its scales as `ScalesOf` keeps them.
struct Block {
  uint8_t numbers[8 * kUnit];
  uint8_t scales[16], minima[16];
  uint16_t scale, minimum;
};

uint16_t half_at(const uint8_t* from) { return load<uint16_t>(from); }

// Minus a power of two times a float16: exact but where it is more than the largest, which gives infinity.
uint16_t times_minus(uint16_t half, int power) {
  const uint32_t sign = ~half & 0x8000u;
  uint32_t exponent = (half >> 10) & 31u, fraction = half & 0x3ffu;
  if (exponent == 0) {
    // Subnormal: the fraction itself is multiplied, and may become a normal number.
    fraction <<= power;
    for (exponent = fraction > 0x3ffu ? 1 : 0; fraction > 0x7ffu; fraction >>= 1) ++exponent;
    return static_cast<uint16_t>(sign | exponent << 10 | (fraction & 0x3ffu));
  }
  exponent += power;
  return static_cast<uint16_t>(exponent > 30 ? sign | 0x7c00u : sign | exponent << 10 | fraction);
}

constexpr uint64_t kOnes = 0x0101010101010101u;  // eight bytes

// 2 * count numbers: the low halves of the bytes, then the high ones.
void read_nibbles(const uint8_t* from, int count, uint8_t* numbers) {
  for (int k = 0; k < count; k += 8) {
    const uint64_t bytes = load<uint64_t>(from + k);
    store(numbers + k, bytes & 15 * kOnes), store(numbers + count + k, bytes >> 4 & 15 * kOnes);
  }
}

struct Q8_0 {
  using Kind = Q8;
  static constexpr int kBytes = 34;

  static void read(const uint8_t* from, Block& to) {
    to.scale = half_at(from);
    std::memcpy(to.numbers, from + 2, kUnit);
  }
};

struct Q4_0 {
  using Kind = Q40;
  static constexpr int kBytes = 18;

  static void read(const uint8_t* from, Block& to) {
    to.scale = half_at(from);
    read_nibbles(from + 2, 16, to.numbers);
  }
};

struct Q4_1 {
  using Kind = Q4;
  static constexpr int kBytes = 20;

  static void read(const uint8_t* from, Block& to) {
    to.scale = half_at(from), to.minimum = half_at(from + 2);
    read_nibbles(from + 4, 16, to.numbers);
  }
};

// The fifth bits of 32 numbers.
void add_fifth(const uint8_t* from, uint8_t* numbers) {
  for (int e = 0; e < kUnit / 8; ++e, numbers += 8) {
    // Bit k stays in byte k, whose highest one it then brings about.
    const uint64_t each = (from[e] * kOnes & 0x8040201008040201u) + 0x00406070787c7e7fu;
    store(numbers, load<uint64_t>(numbers) | (each >> 3 & 16 * kOnes));
  }
}

// Without minima: they are minus sixteen scales.
struct Q5_0 {
  using Kind = Q5;
  static constexpr int kBytes = 22;

  static void read(const uint8_t* from, Block& to) {
    to.scale = half_at(from), to.minimum = times_minus(to.scale, 4);
    read_nibbles(from + 6, 16, to.numbers);
    add_fifth(from + 2, to.numbers);
  }
};

struct Q5_1 {
  using Kind = Q5;
  static constexpr int kBytes = 24;

  static void read(const uint8_t* from, Block& to) {
    to.scale = half_at(from), to.minimum = half_at(from + 2);
    read_nibbles(from + 8, 16, to.numbers);
    add_fifth(from + 4, to.numbers);
  }
};

struct IQ4_NL {
  using Kind = IQ4NL;
  static constexpr int kBytes = 18;

  static void read(const uint8_t* from, Block& to) {
    to.scale = half_at(from);
    read_nibbles(from + 2, 16, to.numbers);
  }
};

// The scale is a power of two, half of which its doubled numbers have, as a float16: 0 where that has none as small.
struct MXFP4Blocks {
  using Kind = MXFP4;
  static constexpr int kBytes = 17;

  static void read(const uint8_t* from, Block& to) {
    to.scale = float_to_half(std::ldexp(1.0f, from[0] - 128));
    read_nibbles(from + 1, 16, to.numbers);
  }
};

struct IQ4_XS {
  using Kind = IQ4XS;
  static constexpr int kBytes = 136;

  static void read(const uint8_t* from, Block& to) {
    to.scale = half_at(from);
    const uint16_t high = load<uint16_t>(from + 2);
    for (int u = 0; u < 8; ++u) {
      to.scales[u] = static_cast<uint8_t>(((from[4 + u / 2] >> (u % 2 * 4) & 15) | (high >> (2 * u) & 3) << 4) - 32);
      read_nibbles(from + 8 + u * 16, 16, to.numbers + u * kUnit);
    }
  }
};

// 8 scales and 8 minima of 6 bits in 12 bytes: those of the last four have their upper two bits in the first eight bytes.
void read_scales(const uint8_t* from, Block& to) {
  for (int g = 0; g < 4; ++g) {
    to.scales[g] = from[g] & 63, to.minima[g] = from[g + 4] & 63;
    to.scales[g + 4] = (from[g + 8] & 15) | (from[g] >> 6) << 4;
    to.minima[g + 4] = from[g + 8] >> 4 | (from[g + 4] >> 6) << 4;
  }
}

// Minima are taken away from the products of scales and numbers.
void read_factors(const uint8_t* from, Block& to) { to.scale = half_at(from), to.minimum = half_at(from + 2) ^ 0x8000u; }

struct Q4_K {
  using Kind = Q4K;
  static constexpr int kBytes = 144;

  static void read(const uint8_t* from, Block& to) {
    read_factors(from, to);
    read_scales(from + 4, to);
    for (int two = 0; two < 4; ++two) read_nibbles(from + 16 + two * kUnit, kUnit, to.numbers + two * 2 * kUnit);
  }
};

struct Q5_K {
  using Kind = Q5K;
  static constexpr int kBytes = 176;

  static void read(const uint8_t* from, Block& to) {
    read_factors(from, to);
    read_scales(from + 4, to);
    for (int two = 0; two < 4; ++two) read_nibbles(from + 48 + two * kUnit, kUnit, to.numbers + two * 2 * kUnit);
    for (int u = 0; u < 8; ++u)
      for (int k = 0; k < kUnit; ++k) to.numbers[u * kUnit + k] |= (from[16 + k] >> u & 1) << 4;
  }
};

struct Q6_K {
  using Kind = Q6K;
  static constexpr int kBytes = 210;

  static void read(const uint8_t* from, Block& to) {
    for (int half = 0; half < 2; ++half) {
      uint8_t* numbers = to.numbers + half * 4 * kUnit;
      read_nibbles(from + half * 2 * kUnit, 2 * kUnit, numbers);
      for (int u = 0; u < 4; ++u)
        for (int k = 0; k < kUnit; ++k) numbers[u * kUnit + k] |= (from[128 + half * kUnit + k] >> 2 * u & 3) << 4;
    }
    std::memcpy(to.scales, from + 192, 16);
    to.scale = half_at(from + 208);
  }
};

// 256 numbers of two bits: four times 32 in the same 32 bytes.
void read_two_bits(const uint8_t* from, uint8_t* numbers) {
  for (int u = 0; u < 8; ++u)
    for (int k = 0; k < kUnit; ++k) numbers[u * kUnit + k] = from[u / 4 * kUnit + k] >> 2 * (u % 4) & 3;
}

struct Q2_K {
  using Kind = Q2K;
  static constexpr int kBytes = 84;

  static void read(const uint8_t* from, Block& to) {
    std::memcpy(to.scales, from, 16);
    read_two_bits(from + 16, to.numbers);
    read_factors(from + 80, to);
  }
};

struct Q3_K {
  using Kind = Q3K;
  static constexpr int kBytes = 110;

  static void read(const uint8_t* from, Block& to) {
    read_two_bits(from + 32, to.numbers);
    for (int u = 0; u < 8; ++u)
      for (int k = 0; k < kUnit; ++k) to.numbers[u * kUnit + k] |= (from[k] >> u & 1) << 2;
    const uint8_t* scales = from + 96;
    for (int g = 0; g < 16; ++g) {
      const int low = g < 8 ? scales[g] & 15 : scales[g - 8] >> 4, high = scales[8 + g % 4] >> (g / 4 * 2) & 3;
      to.scales[g] = static_cast<uint8_t>((low | high << 4) - 32);
    }
    to.scale = half_at(from + 108);
  }
};

// Every other byte of eight, from the first on. Not several at a time in a vector: loads of those wait for the memory, where the numbers
// were stored in smaller parts.
uint32_t even_bytes(uint64_t bytes) {
  asm("" : "+r"(bytes));
  bytes &= 0x00ff00ff00ff00ffu;
  bytes = (bytes | bytes >> 8) & 0x0000ffff0000ffffu;
  return static_cast<uint32_t>(bytes | bytes >> 16);
}

// The N bits of 32 numbers from Above on, as words of row r in a plane: byte i of a word has those of numbers 2 i and 2 i + 1, then those
// of the same two of the next eight, and so on.
template <int N, int Above>
void write_plane(const uint8_t* numbers, int r, uint8_t* plane) {
  constexpr int eights = 4 / N;
  for (int w = 0; w < N; ++w) {
    uint32_t word = 0;
    for (int e = 0; e < eights; ++e, numbers += 8) {
      const uint64_t bits = load<uint64_t>(numbers) >> Above & kOnes * ((1 << N) - 1);
      word |= even_bytes(bits | bits >> (8 - N)) << 2 * N * e;
    }
    std::memcpy(plane + (w * kPanel + r) * 4, &word, 4);
  }
}

template <int Low, int High>
void write_numbers(Planes<Low, High>, const uint8_t* numbers, int r, uint8_t* unit) {
  write_plane<Low, 0>(numbers, r, unit);
  if constexpr (High > 0) write_plane<High, Low>(numbers, r, unit + 4 * Low * kPanel);
}

template <class Table>
void write_numbers(Chosen<Table>, const uint8_t* numbers, int r, uint8_t* unit) {
  write_plane<4, 0>(numbers, r, unit);
}

void write_numbers(Bytes, const uint8_t* numbers, int r, uint8_t* unit) {
  for (int e = 0; e < kUnit / 8; ++e) {
    const uint64_t bytes = load<uint64_t>(numbers + 8 * e);
    for (int odd = 0; odd < 2; ++odd) {
      const uint32_t word = even_bytes(bytes >> 8 * odd);
      std::memcpy(unit + ((2 * e + odd) * kPanel + r) * 4, &word, 4);
    }
  }
}

template <bool HasMinima, int Offset>
void write_scales(UnitScales<HasMinima, Offset>, const Block& from, int r, uint8_t* scales) {
  std::memcpy(scales + 2 * r, &from.scale, 2);
  if (HasMinima) std::memcpy(scales + 2 * (kPanel + r), &from.minimum, 2);
}

template <int Columns, bool HasMinima, int Offset>
void write_scales(BlockScales<Columns, HasMinima, Offset> of, const Block& from, int r, uint8_t* scales) {
  const auto write = [&](const uint8_t* each, uint16_t factor) {
    for (int g = 0; g < 8 * kUnit / Columns; ++g) scales[g * kPanel + r] = each[g];
    scales += of.kPart;
    std::memcpy(scales - 2 * (kPanel - r), &factor, 2);
  };
  write(from.scales, from.scale);
  if (HasMinima) write(from.minima, from.minimum);
}

void write_scales(NibbleScales, const Block& from, int r, uint8_t* scales) {
  for (int g = 0; g < 16; ++g) scales[g * kPanel + r] = from.scales[g];
  std::memcpy(scales + NibbleScales::kGroupBytes + 2 * r, &from.scale, 2);
  std::memcpy(scales + NibbleScales::kGroupBytes + 2 * (kPanel + r), &from.minimum, 2);
}

constexpr int kAhead = 512;  // bytes

template <class Stored>
void pack(const uint8_t* const* rows, int count, int columns, uint8_t* out) {
  using Kind = typename Stored::Kind;
  for (int b = 0; b < columns / Kind::kColumns; ++b, out += Kind::kBytes)
    for (int r = 0; r < count; ++r) {
      const uint8_t* from = rows[r] + b * Stored::kBytes;
      // The row's next blocks: a processor's own prefetching does not follow so many rows.
      for (int line = 0; line < Stored::kBytes; line += 64) __builtin_prefetch(from + kAhead + line);
      Block block;
      Stored::read(from, block);
      for (int u = 0; u < Kind::kUnits; ++u) write_numbers(typename Kind::Numbers{}, block.numbers + u * kUnit, r, out + u * Kind::Numbers::kBytes);
      write_scales(typename Kind::Scales{}, block, r, out + Kind::kUnits * Kind::Numbers::kBytes);
    }
}

}  // namespace

void pack_blocks(Stored stored, const uint8_t* const* rows, int count, int columns, uint8_t* out) {
  switch (stored) {
    case kStoredQ8_0: return pack<Q8_0>(rows, count, columns, out);
    case kStoredQ4_0: return pack<Q4_0>(rows, count, columns, out);
    case kStoredQ4_1: return pack<Q4_1>(rows, count, columns, out);
    case kStoredQ3_K: return pack<Q3_K>(rows, count, columns, out);
    case kStoredQ4_K: return pack<Q4_K>(rows, count, columns, out);
    case kStoredQ5_K: return pack<Q5_K>(rows, count, columns, out);
    case kStoredQ6_K: return pack<Q6_K>(rows, count, columns, out);
    case kStoredQ2_K: return pack<Q2_K>(rows, count, columns, out);
    case kStoredQ5_0: return pack<Q5_0>(rows, count, columns, out);
    case kStoredQ5_1: return pack<Q5_1>(rows, count, columns, out);
    case kStoredIQ4_NL: return pack<IQ4_NL>(rows, count, columns, out);
    case kStoredIQ4_XS: return pack<IQ4_XS>(rows, count, columns, out);
    case kStoredMXFP4: return pack<MXFP4Blocks>(rows, count, columns, out);
    default: return;
  }
}

}  // namespace piecework
