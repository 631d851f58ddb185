// Weights in the form that products read: panels of 32 rows of W, interleaved, so that a vector holds one column of several rows.
//
// A panel is a sequence of groups of columns, followed by the powers of two and the scales of linear.h. The layout of a group depends on
// the format:
//
//   Bf16             2 columns: pairs of bfloat16, [32 rows][2]
//   formats of GGUF  32 or 256 columns, see blocks.h
//   Fp8              2 columns: [2 columns][32 rows] e4m3
//   int8             4 columns: [32 rows][4] numbers plus 128, which only bytes.cpp reads
#pragma once
#include "gguf/formats.h"
#include "linear.h"
#include "simd.h"

namespace piecework {

constexpr int kParts = kPanel / kWide;

// Number of parts of a panel for which R rows of x make sums at once. One or two rows wait for memory. It is read in order if they process
// both of AVX2's parts together; otherwise every second line is read twice.
template <int R>
constexpr int kPartsAtOnce = R <= 2 && kParts == 2 ? 2 : 1;

constexpr int kAhead = 8192;  // Bytes by which weights are prefetched ahead: more than memory delivers to a core during one access.

inline void prefetch(const uint8_t* from, int bytes) {
#pragma GCC unroll 32
  for (int line = 0; line < bytes; line += 64) __builtin_prefetch(from + kAhead + line);
}

// `each(group, part, use)` calls use(begin, i, a, b) for every column begin + i of a group: a and b are the rows [0, kLanes) and [kLanes,
// kWide) of the part, and i is known to the compiler.
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

// Numbers are divided by 256, which the scales compensate. A row that holds a NaN has NaN as its scale.
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

// Call work(format) with the type of a format that is known at run time, and is neither int8 nor mixed.
template <class Work>
inline void with_format(int32_t format, Work&& work) {
  if (format == kBf16) return work(Bf16{});
  if (format == kFp8 || format == kFp8Blocks) return work(Fp8{});
  GGUFFormats::with(format, [&](auto of) { work(typename decltype(of)::Kind{}); });
}

}  // namespace piecework
