// Panels of one format made ready for products in bfloat16 and float16.
#pragma once
#include "format.h"
#include "weights.h"

namespace piecework {

inline Largest largest_of(Bf16, const uint8_t* panel, int groups) {
  Largest largest;
  for (int g = 0; g < groups; ++g, panel += Bf16::kBytes) {
    for (int r = 0; r < kPanel; ++r) {
      const uint32_t pair = load<uint32_t>(panel + 4 * r);
      largest.bits[r] = std::max({largest.bits[r], pair << 16 & 0x7fffffffu, pair & 0x7fff0000u});
    }
  }
  return largest;
}

inline Largest largest_of(Fp8, const uint8_t* panel, int groups) {
  Largest largest;
  for (int k = 0; k < groups * Fp8::kColumns; ++k, panel += kPanel)
    for (int r = 0; r < kPanel; ++r) largest.meet(r, to_float(fp8{panel[r]}) * 0x1p-8f);
  return largest;
}

template <class Numbers, class Scales>
Largest largest_of(Blocks<Numbers, Scales> kind, const uint8_t* panel, int blocks) {
  Largest largest;
  for (int b = 0; b < blocks; ++b, panel += kind.kBytes)
    for (int group = 0; group < kind.kUnits * kind.kGroups; ++group)
      for (int row = 0; row < kPanel; row += kLanes) {
        const floats scale = Scales::scale(kind.scales(panel), group, row);
        floats minimum{};
        if constexpr (Scales::kHasMinimum) minimum = Scales::minimum(kind.scales(panel), group, row);
        for (int r = 0; r < kLanes; ++r) {
          largest.meet(row + r, minimum[r]);
          largest.meet(row + r, minimum[r] + Numbers::kMost * scale[r]);
        }
      }
  return largest;
}

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
// The groups of a panel as pairs of columns, [columns / 2][32][2].
template <class Kind>
void narrow_panel(const uint8_t* panel, int groups, uint32_t* out) {
  for (int g = 0; g < groups; ++g, out += Kind::kColumns / 2 * kPanel)
    for (int part = 0; part < kParts; ++part) {
      floats a{}, b{};
      Kind::each(panel + static_cast<int64_t>(g) * Kind::kBytes, part, [&](int begin, auto i, floats c, floats d) __attribute__((always_inline)) {
        if constexpr (i % 2 == 1) {
          uint32_t* to = out + (begin + i) / 2 * kPanel + part * kWide;
          store(to, paired(a, c));
          store(to + kLanes, paired(b, d));
        }
        a = c, b = d;
      });
    }
}
#endif

#if defined(__AVX512FP16__) || defined(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC)
// The groups of a panel as columns of float16, [columns][32], each row times its number.
template <class Kind>
void narrow_groups(Kind, const uint8_t* panel, int groups, const PanelRows& by, half* out) {
  for (int g = 0; g < groups; ++g, panel += Kind::kBytes, out += Kind::kColumns * kPanel) {
    prefetch(panel, Kind::kBytes);
    for (int part = 0; part < kParts; ++part)
      Kind::each(panel, part, [&](int begin, auto i, floats a, floats b) __attribute__((always_inline)) {
        store(out + (begin + i) * kPanel + part * kWide, narrowed(a * by.low[part], b * by.high[part]));
      });
  }
}

#if defined(__AVX512FP16__)
using words16 = uint16_t __attribute__((vector_size(2 * kPanel)));

// The low (0) or the high half (1) of a word of each of a panel's rows: two columns of 8 bits, or four of 4.
inline words16 halves_of(const uint8_t* words, int high) {
  static const words16 kLow = [] {
    words16 places;
    for (int i = 0; i < kPanel; ++i) places[i] = static_cast<uint16_t>(2 * i);
    return places;
  }();
  const __m512i a = _mm512_loadu_si512(words), b = _mm512_loadu_si512(words + 64);
  return (words16)_mm512_permutex2var_epi16(a, (__m512i)(kLow + static_cast<uint16_t>(high)), b);
}

// The same, made directly in float16.
void narrow_groups(Q8_0::Kind, const uint8_t* panel, int groups, const PanelRows& by, half* out) {
  for (int g = 0; g < groups; ++g, panel += Q8_0::Kind::kBytes, out += Q8_0::Kind::kColumns * kPanel) {
    prefetch(panel, Q8_0::Kind::kBytes);
    const uint16_t* scales = reinterpret_cast<const uint16_t*>(Q8_0::Kind::scales(panel));
    const halves scale = narrowed(load_halves(scales) * by.low[0], load_halves(scales + kLanes) * by.high[0]);
    for (int j = 0; j < Q8_0::Kind::kColumns / 4; ++j)
      for (int high = 0; high < 2; ++high) {
        // In eight columns: 0, 2, 4, 6 or 1, 3, 5, 7.
        half* to = out + (j / 2 * 8 + j % 2 + 4 * high) * kPanel;
        const __m512i two = (__m512i)halves_of(panel + j * 4 * kPanel, high);
        store(to, (halves)_mm512_cvtepi16_ph(_mm512_srai_epi16(_mm512_slli_epi16(two, 8), 8)) * scale);
        store(to + 2 * kPanel, (halves)_mm512_cvtepi16_ph(_mm512_srai_epi16(two, 8)) * scale);
      }
  }
}

// Four bits below the exponent of 1024 are 1024 plus their number. Four bits further left, below the exponent of 64, are 64 plus their
// number.
template <bool HasMinima, int Offset>
void narrow_groups(Blocks<Planes<4, 0>, UnitScales<HasMinima, Offset>> kind, const uint8_t* panel, int groups, const PanelRows& by, half* out) {
  for (int g = 0; g < groups; ++g, panel += kind.kBytes, out += kind.kColumns * kPanel) {
    prefetch(panel, kind.kBytes);
    const uint16_t *scales = reinterpret_cast<const uint16_t*>(kind.scales(panel)), *minima = scales + kPanel;
    const halves scale = narrowed(load_halves(scales) * by.low[0], load_halves(scales + kLanes) * by.high[0]);
    halves minimum = scale * static_cast<Float16>(-Offset);
    if constexpr (HasMinima) minimum = narrowed(load_halves(minima) * by.low[0], load_halves(minima + kLanes) * by.high[0]);
    for (int j = 0; j < kind.kColumns / 4; ++j) {
      const words16 four = halves_of(panel + j / 2 * 4 * kPanel, j % 2);
      unrolled<4>([&](auto i) __attribute__((always_inline)) {
        constexpr bool is_high = i % 2 == 1;
        constexpr uint16_t mask = is_high ? 0x00f0 : 0x000f, base_bits = is_high ? 0x5400 : 0x6400;
        constexpr _Float16 base = is_high ? 64 : 1024;
        const words16 number = i < 2 ? four : four >> 8;
        store(out + (4 * j + i) * kPanel, (bits_as<halves>((number & mask) | base_bits) - base) * scale + minimum);
      });
    }
  }
}
#endif
#endif

}  // namespace piecework
