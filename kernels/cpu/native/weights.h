// Weights as the products read them: panels of 32 rows of W, side by side, so that a vector holds one column of several rows.
//
// A panel is a row of groups of columns, and at its end the powers of two and the scales of linear.h. How a group holds its numbers is the format's:
//   Bf16  2 columns: pairs of bfloat16, [32 rows][2]
//   Q8   32 columns: [32 columns][32 rows] int8, then the rows' scales [32] float16; weight = scale * number
//   Q4   32 columns: [4][32 rows] words of 8 columns, 4 bits each, then scales and minima [2][32] float16; scale * number + minimum
//   Fp8   2 columns: [2 columns][32 rows] e4m3
//   int8  4 columns: [32 rows][4] numbers plus 128, which bytes.cpp alone reads
// Q8 and Q4 hold GGUF's Q8_0, Q4_0 and Q4_1 without any change of value.
#pragma once
#include "linear.h"
#include "simd.h"

namespace piecework {

constexpr int kWide = 2 * kLanes;  // rows of W whose sums are made together
constexpr int kParts = kPanel / kWide;

constexpr int kAhead = 1536;  // bytes: as far ahead of the products weights are asked for, which their row of FMAs would delay

inline void prefetch(const uint8_t* from, int bytes) {
#pragma GCC unroll 32
  for (int line = 0; line < bytes; line += 64) __builtin_prefetch(from + kAhead + line);
}

// `each(group, part, use)` calls use(begin, i, a, b) for every column begin + i of a group: a and b are the rows [0, kLanes) and
// [kLanes, kWide) of the part, and i is known to the compiler. `each_number` gives the numbers before scale and minimum.
struct Bf16 {
  static constexpr int kColumns = 2, kBytes = 4 * kPanel;
  static constexpr bool kIsScaled = false;

  template <class Use>
  __attribute__((always_inline)) static void each(const uint8_t* group, int part, Use&& use) {
    const uint32_t* from = reinterpret_cast<const uint32_t*>(group) + part * kWide;
    const words a = load<words>(from), b = load<words>(from + kLanes);
    use(0, std::integral_constant<int, 0>{}, bits_as<floats>(a << 16), bits_as<floats>(b << 16));
    use(0, std::integral_constant<int, 1>{}, bits_as<floats>(a & 0xffff0000u), bits_as<floats>(b & 0xffff0000u));
  }
};

struct Q8 {
  static constexpr int kColumns = 32, kBytes = 32 * kPanel + 2 * kPanel;
  static constexpr bool kIsScaled = true, kHasMinimum = false;

  static const uint16_t* scales(const uint8_t* group, int part) { return reinterpret_cast<const uint16_t*>(group + 32 * kPanel) + part * kWide; }

  template <class Use>
  __attribute__((always_inline)) static void each_number(const uint8_t* group, int part, Use&& use) {
    const int8_t* from = reinterpret_cast<const int8_t*>(group) + part * kWide;
    for (int begin = 0; begin < 32; begin += 4, from += 4 * kPanel)
      unrolled<4>([&](auto i) __attribute__((always_inline)) { use(begin, i, load_bytes(from + i * kPanel), load_bytes(from + i * kPanel + kLanes)); });
  }

  template <class Use>
  __attribute__((always_inline)) static void each(const uint8_t* group, int part, Use&& use) {
    const floats a = load_halves(scales(group, part)), b = load_halves(scales(group, part) + kLanes);
    each_number(group, part, [&](int begin, auto i, floats v, floats w) __attribute__((always_inline)) { use(begin, i, v * a, w * b); });
  }
};

struct Q4 {
  static constexpr int kColumns = 32, kBytes = 16 * kPanel + 4 * kPanel;
  static constexpr bool kIsScaled = true, kHasMinimum = true;

  static const uint16_t* scales(const uint8_t* group, int part) { return reinterpret_cast<const uint16_t*>(group + 16 * kPanel) + part * kWide; }
  static const uint16_t* minima(const uint8_t* group, int part) { return scales(group, part) + kPanel; }

  template <class Use>
  __attribute__((always_inline)) static void each_number(const uint8_t* group, int part, Use&& use) {
    const uint32_t* from = reinterpret_cast<const uint32_t*>(group) + part * kWide;
    for (int begin = 0; begin < 32; begin += 8, from += kPanel) {
      const words a = load<words>(from), b = load<words>(from + kLanes);
      unrolled<8>([&](auto i) __attribute__((always_inline)) { use(begin, i, nibbles<i>(a), nibbles<i>(b)); });
    }
  }

  template <class Use>
  __attribute__((always_inline)) static void each(const uint8_t* group, int part, Use&& use) {
    const floats a = load_halves(scales(group, part)), b = load_halves(scales(group, part) + kLanes);
    const floats c = load_halves(minima(group, part)), d = load_halves(minima(group, part) + kLanes);
    each_number(group, part,
                [&](int begin, auto i, floats v, floats w) __attribute__((always_inline)) { use(begin, i, v * a + c, w * b + d); });
  }
};

// Each number is a 256th of what it stands for, which the scales make up for; a row that holds a NaN has it as its scale.
struct Fp8 {
  static constexpr int kColumns = 2, kBytes = 2 * kPanel;
  static constexpr bool kIsScaled = false;

  template <class Use>
  __attribute__((always_inline)) static void each(const uint8_t* group, int part, Use&& use) {
    const uint8_t* from = group + part * kWide;
    unrolled<2>([&](auto i) __attribute__((always_inline)) { use(0, i, load_fp8(from + i * kPanel), load_fp8(from + i * kPanel + kLanes)); });
  }
};

// A panel widened to float32: [columns][32], an even number of columns.
struct Widened {
  static constexpr int kColumns = 2, kBytes = 8 * kPanel;
  static constexpr bool kIsScaled = false;

  template <class Use>
  __attribute__((always_inline)) static void each(const uint8_t* group, int part, Use&& use) {
    const float* from = reinterpret_cast<const float*>(group) + part * kWide;
    unrolled<2>([&](auto i) __attribute__((always_inline)) { use(0, i, load<floats>(from + i * kPanel), load<floats>(from + i * kPanel + kLanes)); });
  }
};

// work(format) with the type of a format that is known when it runs, and is not int8.
template <class Work>
inline void with_format(int32_t format, Work&& work) {
  if (format == kQ4) return work(Q4{});
  if (format == kQ8) return work(Q8{});
  if (format == kFp8 || format == kFp8Blocks) return work(Fp8{});
  work(Bf16{});
}

}  // namespace piecework
