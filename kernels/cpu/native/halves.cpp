// The products of linear.h by FMAs of float16, if the CPU has them: twice as many per cycle as in float32.
//
// A float16 represents every digit of a bfloat16, but has a small range and loses digits in long sums. Therefore rows of x and of W are
// divided by powers of two. Only numbers below 2^-14 of their row's largest then lose digits. At most kSummed products are summed in
// float16, up to less than 2^15, and these sums are added in float32. Weights of 4 and 8 bits are rounded to float16's 11 digits.
#include "format.h"
#include "linear.h"
#include "weights.h"

namespace piecework {

#if defined(__AVX512FP16__) || defined(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC)

namespace {

constexpr int kSummed = 32;

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
  kernels_of(linear.format).narrow_halves(panel + group_bytes(linear.format, span.begin), columns, inverses, halves_.data());
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
