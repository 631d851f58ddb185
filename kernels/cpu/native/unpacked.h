// What integers.cpp does differently with AVX-512's dot products of bytes.
//
// Intel's CPUs have two ports for 512-bit vectors, so all other instructions compete with dot products. Therefore the FMA that scales a sum
// also turns it into a float, the start values of sums are computed for all groups at once, and if many rows of x meet a panel, it is
// unpacked once for all of them, in parts that fit the first cache together with rows of x.
#pragma once
#include "linear.h"
#include "weights.h"

namespace piecework {

#if defined(__AVX512VNNI__)
constexpr bool kHasOnes = true, kHasUnpacked = true;
#else
constexpr bool kHasOnes = false, kHasUnpacked = false;
#endif

// Rows of x from which unpacking pays, and units that are unpacked at once.
constexpr int kLeastUnpackedRows = 30, kUnitsAtOnce = 18;

// Whether panels are unpacked once for many rows (ways.cpp).
bool unpacks_panels();

// A scale of x whose product with kOnes is exact.
inline float shortened(float scale) { return kHasOnes ? bits_as<float>((bits_as<uint32_t>(scale) + 2u) & ~3u) : scale; }

#if defined(__AVX512VNNI__)
inline floats ones_at(const GroupedColumns& x, int g) { return splat(x.ones[g]); }

inline int32_t sum_of(const GroupedColumns& x, int g) { return x.halves[2 * g] + x.halves[2 * g + 1]; }

// Set the sum of a group, whose scale is set. It is finite for numbers up to 2^111.
inline void set_sum(GroupedColumns& x, int g, int32_t) { x.ones[g] = x.scales[g] * -kOnes; }
#else
inline floats ones_at(const GroupedColumns&, int) { return floats{}; }
inline int32_t sum_of(const GroupedColumns& x, int g) { return x.sums[g]; }
inline void set_sum(GroupedColumns& x, int g, int32_t sum) { x.sums[g] = sum; }
#endif

// The offset that was added to the numbers for the multiplication.
template <class Kind>
constexpr int kOffsetOf = Kind::Numbers::kBits == 8 ? kWeightShift : Kind::Scales::kOffset;

// Units of unsigned numbers of up to 8 bits in the order of `four`, each followed by its scales, its minima, and the scales of first halves
// times -kOnes. The last product is exact, because these scales have at most 19 bits.
template <int Groups, bool HasMinima, int Offset>
struct Unpacked {
  static constexpr int kUnits = 1, kColumns = kUnit, kGroups = Groups, kVector = kPanel * sizeof(float);
  static constexpr int kBytes = kUnit * kPanel + (Groups * (1 + HasMinima) + Groups - 1) * kVector;

  struct Numbers {
    static constexpr int kBits = 7;

    template <int J, int P>
    static words four(const uint8_t* unit, int row) {
      return load<words>(reinterpret_cast<const uint32_t*>(unit) + (2 * J + P) * kPanel + row);
    }
  };

  struct Scales {
    static constexpr int kColumns = kUnit / Groups, kOffset = Offset;
    static constexpr bool kHasMinimum = HasMinima;

    static floats scale(const uint8_t* scales, int group, int row) { return vector(scales, group, row); }
    static floats minimum(const uint8_t* scales, int group, int row) { return vector(scales, Groups + group, row); }
    static floats ones(const uint8_t* scales, int row) { return vector(scales, Groups * (1 + HasMinima), row); }
    static floats vector(const uint8_t* scales, int number, int row) { return load<floats>(scales + number * kVector + row * sizeof(float)); }
  };

  static const uint8_t* unit(const uint8_t* block, int) { return block; }
  static const uint8_t* scales(const uint8_t* block) { return block + kUnit * kPanel; }
};

template <class Kind>
constexpr bool kIsUnpacked = false;
template <int Groups, bool HasMinima, int Offset>
constexpr bool kIsUnpacked<Unpacked<Groups, HasMinima, Offset>> = true;

// Zeros for other kinds.
template <class Kind>
inline floats ones_of(const uint8_t* scales, int row) {
  if constexpr (kIsUnpacked<Kind>)
    return Kind::Scales::ones(scales, row);
  else
    return floats{};
}

// Rows of x at once. The sums of more rows do not fit the registers beside the values that are added to them.
template <class Made>
constexpr int kUnpackedRows = Made::kGroups == 2 ? 5 : 6;

template <class Kind>
using UnpackedOf = Unpacked<Kind::kGroups, Kind::Scales::kHasMinimum && Kind::Scales::kOffset == 0, kOffsetOf<Kind>>;

// Whether sums begin with values that differ between rows of x, and there are enough rows to compute these for all groups at once.
template <class Kind, int R>
constexpr bool kHasStarts = kHasUnpacked && kOffsetOf<Kind> != 0 && R >= 4;

// starts: the bits of kOnes minus kOffsetOf times the sums of x's groups from `at` on, for the given blocks and some after them.
template <class Kind>
inline void set_starts(const GroupedColumns& x, int at, int blocks, int32_t* starts) {
#if defined(__AVX512VNNI__)
  const ints first = ints{} + bits_as<int32_t>(kOnes);
  const int count = blocks * Kind::kUnits * Kind::kGroups;
  for (int i = 0; i < count; i += kLanes) {
    ints sums;
    if constexpr (Kind::kGroups == 2) {
      sums = load<ints>(x.halves + 2 * at + i);
    } else {
      const __m512i a = load<__m512i>(x.halves + 2 * (at + i)), b = load<__m512i>(x.halves + 2 * (at + i) + kLanes);
      const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
      sums = (ints)_mm512_permutex2var_epi32(a, even, b) + (ints)_mm512_permutex2var_epi32(a, (__m512i)((ints)even + 1), b);
    }
    store(starts + i, first - kOffsetOf<Kind> * sums);
  }
#endif
}

// Unpack a panel's blocks to `to`, in the layout of Unpacked.
template <class Kind>
void unpack(const uint8_t* block, int blocks, uint8_t* to) {
  using Made = UnpackedOf<Kind>;
  for (int b = 0; b < blocks; ++b, block += Kind::kBytes)
    for (int u = 0; u < Kind::kUnits; ++u, to += Made::kBytes)
      for (int row = 0; row < kPanel; row += kLanes) {
        unrolled<kUnit / 4>([&](auto i) __attribute__((always_inline)) {
          words numbers = Kind::Numbers::template four<i / 2, i % 2>(Kind::unit(block, u), row);
          if constexpr (Kind::Numbers::kBits == 8) numbers ^= 0x01010101u * kWeightShift;
          store(to + (i * kPanel + row) * sizeof(uint32_t), numbers);
        });
        float* vectors = reinterpret_cast<float*>(to + kUnit * kPanel) + row;
        unrolled<Kind::kGroups>([&](auto g) __attribute__((always_inline)) {
          const uint8_t* scales = Kind::scales(block);
          const int group = u * Kind::kGroups + g;
          const floats scale = Kind::Scales::scale(scales, group, row);
          store(vectors + g * kPanel, scale);
          if constexpr (Made::Scales::kHasMinimum) store(vectors + (Kind::kGroups + g) * kPanel, Kind::Scales::minimum(scales, group, row));
          if constexpr (Kind::kGroups == 2 && g == 0) store(vectors + 2 * (1 + Made::Scales::kHasMinimum) * kPanel, scale * -kOnes);
        });
      }
}

}  // namespace piecework
