// Weights as the products read them: panels of 32 rows of W, side by side, so that a vector holds one column of several rows.
//
// A panel is a row of groups of columns, and at its end the powers of two and the scales of linear.h. How a group holds its numbers is the format's:
//   Bf16  2 columns: pairs of bfloat16, [32 rows][2]
//   formats of GGUF: 32 or 256 columns, as blocks.h tells
//   Fp8   2 columns: [2 columns][32 rows] e4m3
//   int8  4 columns: [32 rows][4] numbers plus 128, which bytes.cpp alone reads
#pragma once
#include "gguf/formats.h"
#include "linear.h"
#include "simd.h"

namespace piecework {

constexpr int kParts = kPanel / kWide;

// Of so many parts of a panel R rows of x make sums at once. One or two wait for memory, which is read line after line, not every other line
// twice, where both of AVX2's parts meet them together.
template <int R>
constexpr int kPartsAtOnce = R <= 2 && kParts == 2 ? 2 : 1;

constexpr int kAhead = 8192;  // bytes: as far ahead of the products weights are asked for; what memory gives a core while one line comes, and more

inline void prefetch(const uint8_t* from, int bytes) {
#pragma GCC unroll 32
  for (int line = 0; line < bytes; line += 64) __builtin_prefetch(from + kAhead + line);
}

// `each(group, part, use)` calls use(begin, i, a, b) for every column begin + i of a group: a and b are the rows [0, kLanes) and
// [kLanes, kWide) of the part, and i is known to the compiler.
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

// work(format) with the type of a format that is known when it runs, and is neither int8 nor mixed.
template <class Work>
inline void with_format(int32_t format, Work&& work) {
  if (format == kBf16) return work(Bf16{});
  if (format == kFp8 || format == kFp8Blocks) return work(Fp8{});
  GGUFFormats::with(format, [&](auto of) { work(typename decltype(of)::Kind{}); });
}

}  // namespace piecework
