// Weights whose columns have scales per group, as in GGUF's blocks (ggml-org/ggml, src/ggml-common.h): a weight is scale * integer +
// minimum.
//
// A unit is 32 columns of the 32 rows of a panel. Its numbers are stored in planes: first the low 4 or 2 bits of all numbers, then the 2 or
// 1 bits above. A word of a plane of n bits has 32 / n columns of one row, and is next to the words of the other rows: [n][32 rows]. Each
// byte has 8 / n columns: byte b has column 8 j + 2 b + p, with p 0 or 1, in the bits from n (2 j + p) on, where j counts from the word's
// first column. A shift and a mask therefore make a word whose bytes are the columns 8 j + p + {0, 2, 4, 6} of a row (`four`), which
// integer products need.
//
// A block is one unit, two units with e4m3 scales, or eight units whose scales are small integers times a float16. The numbers of its units
// come first, then the scales.
#pragma once
#include "linear.h"
#include "simd.h"

namespace piecework {

constexpr int kWide = 2 * kLanes;  // Rows of W whose sums are made together.
constexpr int kUnit = 32;          // Columns.

// Columns 8 J + P + {0, 2, 4, 6} of kLanes rows of a plane of N bits, in the bits from Above on of each byte.
template <int N, int J, int P, int Above = 0>
inline words four_of_plane(const uint8_t* plane, int row) {
  constexpr int place = 2 * J + P, shift = N * (place % (8 / N)) - Above;
  constexpr uint32_t mask = (((1u << N) - 1) << Above) * 0x01010101u;
  const words w = load<words>(reinterpret_cast<const uint32_t*>(plane) + place / (8 / N) * kPanel + row);
  if constexpr (shift >= 0)
    return (w >> shift) & mask;
  else
    return (w << -shift) & mask;
}

// The int8 in byte B of each word.
template <int B>
inline floats signed_byte(words w) {
  return __builtin_convertvector((ints)(w << (24 - 8 * B)) >> 24, floats);
}

// Numbers with Low bits, and High bits above them. `each<Begin, End>(unit, row, use)` calls use(begin, i, a, b) for the columns begin + i
// of a unit in [Begin, End) in order: a and b are the rows [row, row + kLanes) and the next kLanes rows, and i is known to the compiler.
template <int Low, int High>
struct Planes {
  static constexpr int kBytes = 4 * (Low + High) * kPanel, kMost = (1 << (Low + High)) - 1, kBits = Low + High;

  template <int J, int P>
  static words four(const uint8_t* unit, int row) {
    words w = four_of_plane<Low, J, P>(unit, row);
    if constexpr (High > 0) w |= four_of_plane<High, J, P, Low>(unit + 4 * Low * kPanel, row);
    return w;
  }

  template <int Begin, int End, class Use>
  __attribute__((always_inline)) static void each(const uint8_t* unit, int row, Use&& use) {
    unrolled<(End - Begin) / 8>([&](auto j) __attribute__((always_inline)) {
      constexpr int kJ = Begin / 8 + j;
      const words a[] = {four<kJ, 0>(unit, row), four<kJ, 1>(unit, row)};
      const words b[] = {four<kJ, 0>(unit, row + kLanes), four<kJ, 1>(unit, row + kLanes)};
      unrolled<8>([&](auto i) __attribute__((always_inline)) { use(8 * kJ, i, byte_of<i / 2>(a[i % 2]), byte_of<i / 2>(b[i % 2])); });
    });
  }
};

// The same for 4 bits, faster.
template <>
struct Planes<4, 0> {
  static constexpr int kBytes = 16 * kPanel, kMost = 15, kBits = 4;

  template <int J, int P>
  static words four(const uint8_t* unit, int row) {
    return four_of_plane<4, J, P>(unit, row);
  }

  template <int Begin, int End, class Use>
  __attribute__((always_inline)) static void each(const uint8_t* unit, int row, Use&& use) {
    const uint32_t* from = reinterpret_cast<const uint32_t*>(unit) + Begin / 8 * kPanel + row;
    for (int begin = Begin; begin < End; begin += 8, from += kPanel) {
      const words a = load<words>(from), b = load<words>(from + kLanes);
      unrolled<8>([&](auto i) __attribute__((always_inline)) { use(begin, i, nibbles<i>(a), nibbles<i>(b)); });
    }
  }
};

// 4 bits that choose one of a table's signed numbers.
template <class Table>
struct Chosen {
  static constexpr int kBytes = 16 * kPanel, kMost = Table::kMost, kBits = 8;

  template <int J, int P>
  static words four(const uint8_t* unit, int row) {
    return bytes_of_table(four_of_plane<4, J, P>(unit, row), Table::kNumbers);
  }

  template <int Begin, int End, class Use>
  __attribute__((always_inline)) static void each(const uint8_t* unit, int row, Use&& use) {
    const uint32_t* from = reinterpret_cast<const uint32_t*>(unit) + Begin / 8 * kPanel + row;
    for (int begin = Begin; begin < End; begin += 8, from += kPanel) {
      const words a = load<words>(from), b = load<words>(from + kLanes);
      unrolled<8>([&](auto i) __attribute__((always_inline)) { use(begin, i, chosen<i>(a, Table::kFloats), chosen<i>(b, Table::kFloats)); });
    }
  }
};

struct Iq4 {
  static constexpr int kMost = 127;
  static constexpr int8_t kNumbers[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
  static constexpr float kFloats[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
};

// Twice the values of e2m1.
struct E2m1 {
  static constexpr int kMost = 12;
  static constexpr int8_t kNumbers[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  static constexpr float kFloats[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
};

// Signed bytes, in the words that `four` returns: [8][32 rows].
struct Bytes {
  static constexpr int kBytes = kUnit * kPanel, kMost = 128, kBits = 8;

  template <int J, int P>
  static words four(const uint8_t* unit, int row) {
    return load<words>(reinterpret_cast<const uint32_t*>(unit) + (2 * J + P) * kPanel + row);
  }

  template <int Begin, int End, class Use>
  __attribute__((always_inline)) static void each(const uint8_t* unit, int row, Use&& use) {
    const uint32_t* from = reinterpret_cast<const uint32_t*>(unit) + Begin / 4 * kPanel + row;
    for (int begin = Begin; begin < End; begin += 8, from += 2 * kPanel) {
      const words a[] = {load<words>(from), load<words>(from + kPanel)};
      const words b[] = {load<words>(from + kLanes), load<words>(from + kPanel + kLanes)};
      unrolled<8>([&](auto i) __attribute__((always_inline)) { use(begin, i, signed_byte<i / 2>(a[i % 2]), signed_byte<i / 2>(b[i % 2])); });
    }
  }
};

// A float16 scale for each row of a unit, [32], and possibly a float16 minimum, [32]. Otherwise minima are the scale times -kOffset.
template <bool HasMinima, int Offset = 0>
struct UnitScales {
  static constexpr int kUnits = 1, kColumns = kUnit, kBytes = (1 + HasMinima) * 2 * kPanel, kOffset = Offset;
  static constexpr bool kHasMinimum = HasMinima || Offset != 0;

  static floats scale(const uint8_t* scales, int, int row) { return load_halves(reinterpret_cast<const uint16_t*>(scales) + row); }
  static floats minimum(const uint8_t* scales, int group, int row) {
    if constexpr (HasMinima)
      return scale(scales + 2 * kPanel, group, row);
    else
      return scale(scales, group, row) * static_cast<float>(-Offset);
  }
};

// A signed 8-bit number per group of Columns, [groups][32], times a float16 per row of a block, [32]. Minima are stored in the same way
// after all scales, or they are the scale times -kOffset.
template <int Columns, bool HasMinima, int Offset = 0>
struct BlockScales {
  static constexpr int kUnits = 8, kColumns = Columns, kOffset = Offset, kPart = kUnits * kUnit / Columns * kPanel + 2 * kPanel;
  static constexpr int kBytes = (1 + HasMinima) * kPart;
  static constexpr bool kHasMinimum = HasMinima || Offset != 0;

  static floats scale(const uint8_t* scales, int group, int row) {
    const uint8_t* factors = scales + kPart - 2 * kPanel;
    return load_bytes(reinterpret_cast<const int8_t*>(scales) + group * kPanel + row) * load_halves(reinterpret_cast<const uint16_t*>(factors) + row);
  }

  // The integer factor of `scale`.
  static floats whole(const uint8_t* scales, int group, int row) {
    return load_bytes(reinterpret_cast<const int8_t*>(scales) + group * kPanel + row);
  }
  static floats factor(const uint8_t* scales, int row) {
    return load_halves(reinterpret_cast<const uint16_t*>(scales + kPart - 2 * kPanel) + row);
  }

  static floats minimum(const uint8_t* scales, int group, int row) {
    if constexpr (HasMinima)
      return scale(scales + kPart, group, row);
    else
      return scale(scales, group, row) * static_cast<float>(-Offset);
  }
};

// Scales and minima of 4 bits, in one byte per 16 columns, [16][32], times a float16 per row of a block: [32] for scales and [32] for
// minima.
struct NibbleScales {
  static constexpr int kUnits = 8, kColumns = 16, kOffset = 0, kGroupBytes = 16 * kPanel, kBytes = kGroupBytes + 4 * kPanel;
  static constexpr bool kHasMinimum = true;

  static floats scale(const uint8_t* scales, int group, int row) { return number<0>(scales, group, row) * factor(scales, row); }
  static floats minimum(const uint8_t* scales, int group, int row) { return number<4>(scales, group, row) * factor(scales, kPanel + row); }

  static floats factor(const uint8_t* scales, int row) { return load_halves(reinterpret_cast<const uint16_t*>(scales + kGroupBytes) + row); }

 private:
  using Bytes = uint8_t __attribute__((vector_size(kLanes)));

  template <int Shift>
  static floats number(const uint8_t* scales, int group, int row) {
    const Bytes both = load<Bytes>(scales + group * kPanel + row);
    return __builtin_convertvector(__builtin_convertvector((both >> Shift) & 15, ints), floats);
  }
};

// An e4m3 number per 16 columns of a row, [4][32]. `E2m1` doubles its numbers, and `load_fp8` divides by 256.
struct Fp8Scales {
  static constexpr int kUnits = 2, kColumns = 16, kOffset = 0, kBytes = 4 * kPanel;
  static constexpr bool kHasMinimum = false;

  static floats scale(const uint8_t* scales, int group, int row) { return load_fp8(scales + group * kPanel + row) * 128.0f; }
};

template <class NumbersOf, class ScalesOf>
struct Blocks {
  using Numbers = NumbersOf;
  using Scales = ScalesOf;
  static constexpr int kUnits = Scales::kUnits, kColumns = kUnits * kUnit, kBytes = kUnits * Numbers::kBytes + Scales::kBytes;
  static constexpr int kGroups = kUnit / Scales::kColumns;  // Groups of a unit.
  static constexpr bool kIsScaled = true;

  static const uint8_t* unit(const uint8_t* block, int number) { return block + number * Numbers::kBytes; }
  static const uint8_t* scales(const uint8_t* block) { return block + kUnits * Numbers::kBytes; }

  // As in the other formats (weights.h).
  template <class Use>
  __attribute__((always_inline)) static void each(const uint8_t* block, int part, Use&& use) {
    const int row = part * kWide;
    for (int u = 0; u < kUnits; ++u)
      unrolled<kGroups>([&](auto g) __attribute__((always_inline)) {
        const int group = u * kGroups + g;
        const floats a = Scales::scale(scales(block), group, row), b = Scales::scale(scales(block), group, row + kLanes);
        floats c{}, d{};
        if constexpr (Scales::kHasMinimum) c = Scales::minimum(scales(block), group, row), d = Scales::minimum(scales(block), group, row + kLanes);
        Numbers::template each<g * Scales::kColumns, (g + 1) * Scales::kColumns>(
            unit(block, u), row, [&](int begin, auto i, floats v, floats w) __attribute__((always_inline)) {
              if constexpr (Scales::kHasMinimum)
                use(u * kUnit + begin, i, v * a + c, w * b + d);
              else
                use(u * kUnit + begin, i, v * a, w * b);
            });
      });
  }
};

// Write the numbers and scales of a panel from up to 32 rows of a GGUF file's blocks. Nothing happens for other formats.
void pack_blocks(int32_t format, const uint8_t* const* rows, int count, int columns, uint8_t* out);

}  // namespace piecework
