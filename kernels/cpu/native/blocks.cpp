// Converts blocks of GGUF files to panels.
#include "gguf/formats.h"

namespace piecework {
namespace {

// Every second byte of eight, from the first on. Not vectorised: a vector load of numbers that were stored in smaller parts waits for
// memory.
uint32_t even_bytes(uint64_t bytes) {
  asm("" : "+r"(bytes));
  bytes &= 0x00ff00ff00ff00ffu;
  bytes = (bytes | bytes >> 8) & 0x0000ffff0000ffffu;
  return static_cast<uint32_t>(bytes | bytes >> 16);
}

// The N bits from Above on of 32 numbers, as words of row r in a plane. Byte i of a word has the bits of numbers 2 i and 2 i + 1, then
// those of the same two of the next eight, and so on.
template <int N, int Above>
void write_plane(const uint8_t* numbers, int r, uint8_t* plane) {
  constexpr int eights = 4 / N;
  for (int w = 0; w < N; ++w) {
    uint32_t word = 0;
    for (int e = 0; e < eights; ++e, numbers += 8) {
      const uint64_t bits = load<uint64_t>(numbers) >> Above & kEightOnes * ((1 << N) - 1);
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

void write_scales(Fp8Scales, const Block& from, int r, uint8_t* scales) {
  for (int g = 0; g < 4; ++g) scales[g * kPanel + r] = from.scales[g];
}

constexpr int kAhead = 512;  // Bytes.

template <class Stored>
void pack(const uint8_t* const* rows, int count, int columns, uint8_t* out) {
  using Kind = typename Stored::Kind;
  for (int b = 0; b < columns / Kind::kColumns; ++b, out += Kind::kBytes)
    for (int r = 0; r < count; ++r) {
      const uint8_t* from = rows[r] + b * Stored::kBytes;
      // Prefetch the row's next blocks, because hardware prefetching does not follow so many rows.
      for (int line = 0; line < Stored::kBytes; line += 64) __builtin_prefetch(from + kAhead + line);
      Block block;
      Stored::read(from, block);
      for (int u = 0; u < Kind::kUnits; ++u) write_numbers(typename Kind::Numbers{}, block.numbers + u * kUnit, r, out + u * Kind::Numbers::kBytes);
      write_scales(typename Kind::Scales{}, block, r, out + Kind::kUnits * Kind::Numbers::kBytes);
    }
}

}  // namespace

void pack_blocks(int32_t format, const uint8_t* const* rows, int count, int columns, uint8_t* out) {
  GGUFFormats::with(format, [&](auto of) { pack<decltype(of)>(rows, count, columns, out); });
}

struct FormatInfo {
  const char* name;
  int32_t number, columns, bytes;
};

}  // namespace piecework

// Write the block format at this place of the list. Return 0 after the last one.
extern "C" int piecework_gguf_format(int place, piecework::FormatInfo* to) {
  int seen = 0;
  piecework::GGUFFormats::each([&](auto of) {
    if (seen++ == place) *to = {of.kName, of.kNumber, decltype(of)::Kind::kColumns, of.kBytes};
  });
  return place < seen;
}
