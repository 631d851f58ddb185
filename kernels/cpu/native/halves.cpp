// The products of linear.h by FMAs of float16, if the CPU has them: twice as many per cycle as in float32.
//
// A float16 represents every digit of a bfloat16, but has a small range and loses digits in long sums. Therefore rows of x and of W are
// divided by powers of two. Only numbers below 2^-14 of their row's largest then lose digits. At most kSummed products are summed in
// float16, up to less than 2^15, and these sums are added in float32. Weights of 4 and 8 bits are rounded to float16's 11 digits.
#include "linear.h"
#include "weights.h"

namespace piecework {

#if defined(__AVX512FP16__) || defined(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC)

namespace {

constexpr int kSummed = 32;

// One number for each row of a panel.
struct PanelRows {
  floats low[kParts], high[kParts];
};

// c [R][32] = or += the products of an even number of a panel's columns, [columns][32], with those of R rows of x, each times its row's
// factor.
template <int R>
void half_products(const half* weights, const half* x, int columns, const PanelRows& factors, float* c, bool adds) {
  constexpr int kChains = R <= 8 ? 2 : 1;  // An FMA takes four cycles, and two begin per cycle.
  for (int part = 0; part < kParts; ++part) {
    bool is_next = adds;
    for (int first = 0; first < columns; first += kSummed, is_next = true) {
      halves sums[kChains][R] = {};
      const int last = std::min(first + kSummed, columns);
      for (int k = first; k < last; k += kChains)
        unrolled<kChains>([&](auto chain) __attribute__((always_inline)) {
          const halves w = load<halves>(weights + (k + chain) * kPanel + part * kWide);
          unrolled<R>([&](auto r) __attribute__((always_inline)) {
            sums[chain][r] = multiply_add(sums[chain][r], w, &x[r * kStrideOf<half> + k + chain].bits);
          });
        });
      unrolled<R>([&](auto r) __attribute__((always_inline)) {
        if constexpr (kChains == 2) sums[0][r] += sums[1][r];
        float* to = c + r * kPanel + part * kWide;
        floats a = low(sums[0][r]) * factors.low[part], b = high(sums[0][r]) * factors.high[part];
        if (is_next) a += load<floats>(to), b += load<floats>(to + kLanes);
        store(to, a), store(to + kLanes, b);
      });
    }
  }
}

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
void narrow_groups(Q8, const uint8_t* panel, int groups, const PanelRows& by, half* out) {
  for (int g = 0; g < groups; ++g, panel += Q8::kBytes, out += Q8::kColumns * kPanel) {
    prefetch(panel, Q8::kBytes);
    const uint16_t* scales = reinterpret_cast<const uint16_t*>(Q8::scales(panel));
    const halves scale = narrowed(load_halves(scales) * by.low[0], load_halves(scales + kLanes) * by.high[0]);
    for (int j = 0; j < Q8::kColumns / 4; ++j)
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

}  // namespace

float half_factor(const bf16* values, int count) {
  uint16_t largest = 0;
#pragma omp simd reduction(max : largest)
  for (int k = 0; k < count; ++k) largest = std::max<uint16_t>(largest, values[k].bits & 0x7fffu);
  // The exponent of the largest number minus eight, limited so that the inverse is a normal number.
  const int exponent = std::max((largest >> 7) - 8, 2);
  return bits_as<float>(static_cast<uint32_t>(exponent) << 23);
}

void narrow(const bf16* values, int count, float factor, half* to) {
  const float inverse = 1.0f / factor;
  for (int k = 0; k < count; ++k) to[k] = bits_as<half>(static_cast<Float16>(to_float(values[k]) * inverse));
}

void Multiplier::multiply(const Linear& linear, const uint8_t* panel, const RowsOf<half>& x, const Span& span, float* to, bool adds) {
  constexpr int kRows = kRowsAtOnce<half>;
  const int blocks = (span.tokens + kRows - 1) / kRows, size = (span.tokens + blocks - 1) / blocks, columns = (span.columns + 1) / 2 * 2;
  const float* powers = row_powers(linear, panel);
  PanelRows factors, inverses;
  for (int part = 0; part < kParts; ++part, powers += kWide) {
    factors.low[part] = load<floats>(powers), factors.high[part] = load<floats>(powers + kLanes);
    inverses.low[part] = 1.0f / factors.low[part], inverses.high[part] = 1.0f / factors.high[part];
  }
  halves_.resize(kColumnsAtOnce * kPanel);
  with_format(linear.format, [&](auto kind) {
    const int groups = (columns + kind.kColumns - 1) / kind.kColumns;
    narrow_groups(kind, panel + group_bytes(linear.format, span.begin), groups, inverses, halves_.data());
  });
  for (int t = 0; t < span.tokens; t += size, to += size * kPanel)
    with_constant<kRows>(std::min(size, span.tokens - t), [&](auto rows) {
      half_products<rows>(halves_.data(), x.columns(span.first + t, span.begin), columns, factors, to, adds);
    });
}

#else

float half_factor(const bf16*, int) { return 1.0f; }

void narrow(const bf16*, int, float, half*) {}

void Multiplier::multiply(const Linear&, const uint8_t*, const RowsOf<half>&, const Span&, float*, bool) {}

#endif

}  // namespace piecework
