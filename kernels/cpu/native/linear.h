// y = x W^T + b for rows of x and panels of W in the formats of weights.h.
//
// Few rows by float32 FMAs on numbers that are widened. Many rows in the fastest of the ways that the CPU has: these, dot products of
// bfloat16, or FMAs of float16. On Emerald Rapids they make 176, 86 and 352 GFLOP/s a core (docs/performance-cpu.md); others have twice as
// many dot products as FMAs, or no float16.
#pragma once
#include <algorithm>

#include "simd.h"

namespace piecework {

struct Linear {
  const uint8_t* weight;  // panels
  const bf16* bias;       // [rows], or null
  int32_t rows, columns, format;
};

constexpr int kPanel = 32;  // rows of W that lie side by side

enum Format : int32_t { kBf16 = 0, kQ8 = 1, kQ4 = 2 };

// Bytes of the groups of a panel, and of a panel.
int64_t group_bytes(int32_t format, int columns);
inline int64_t panel_bytes(int32_t format, int columns) { return group_bytes(format, columns) + kPanel * sizeof(float); }

// The last of a panel, [32]: for each row the largest power of two that is at most its largest number, with whose inverse it fits float16.
inline const float* row_powers(const Linear& linear, const uint8_t* panel) {
  return reinterpret_cast<const float*>(panel + group_bytes(linear.format, linear.columns));
}

constexpr int kColumnsAtOnce = 1024;  // that products are summed over before the sums are put down

struct half {
  uint16_t bits;
};

enum Way : int32_t { kFloats = 0, kDots = 1, kHalves = 2 };

#if defined(__AVX512BF16__)
constexpr bool kHasDots = true;
#else
constexpr bool kHasDots = false;
#endif
#if defined(__AVX512FP16__)
constexpr bool kHasHalves = true;
#else
constexpr bool kHasHalves = false;
#endif

// Rows of x whose sums fit the registers: two vectors of float32 each, or one of float16.
template <class Number>
constexpr int kRowsAtOnce = std::is_same_v<Number, half> ? 24 : kBlockRows;

// From a row of x to the next: a power of two would bring the rows' lines into few places of a cache.
template <class Number>
constexpr int kStrideOf = kColumnsAtOnce + 64 / static_cast<int>(sizeof(Number));

constexpr int kStride = kStrideOf<float>;

// The power of two by which divided a row's largest number lies in [2^8, 2^9), and the row divided by it as float16 (halves.cpp).
float half_factor(const bf16* values, int count);
void narrow(const bf16* values, int count, float factor, half* to);

// Rows of x, cut into blocks of columns: [blocks][tokens][kStrideOf], of which the first kColumnsAtOnce hold numbers.
template <class Number>
struct RowsOf {
  Number* x;
  int tokens;
  float* factors = nullptr;  // [tokens], of float16: by what a row is to be multiplied

  static size_t size(int tokens, int columns) { return static_cast<size_t>(blocks(columns)) * tokens * kStrideOf<Number>; }
  static int blocks(int columns) { return (columns + kColumnsAtOnce - 1) / kColumnsAtOnce; }

  // Columns of the block from token t on.
  Number* at(int block, int t) const { return x + (static_cast<int64_t>(block) * tokens + t) * kStrideOf<Number>; }

  // Where columns [first, last) of a row lie that are in one block.
  Number* columns(int t, int first) const { return at(first / kColumnsAtOnce, t) + first % kColumnsAtOnce; }

  void set(int t, const bf16* values, int count) const {
    if constexpr (std::is_same_v<Number, half>) factors[t] = half_factor(values, count);
    for (int first = 0; first < count; first += kColumnsAtOnce) {
      Number* to = columns(t, first);
      const int size = std::min(kColumnsAtOnce, count - first);
      if constexpr (std::is_same_v<Number, bf16>) {
        std::memcpy(to, values + first, size * sizeof(bf16));
      } else if constexpr (std::is_same_v<Number, half>) {
        narrow(values + first, size, factors[t], to);
      } else {
        for (int k = 0; k < size; ++k) to[k] = to_float(values[first + k]);
      }
    }
    end(t, count);
  }

  // The pairs of an odd number of columns end with a zero.
  void end(int t, int count) const {
    if (count % 2) columns(t, count - 1)[1] = Number{};
  }
};

using Rows = RowsOf<float>;

// What one thread needs beside the numbers themselves.
class Multiplier {
 public:
  // To be called before the panels of a linear.
  void prepare(const Linear& linear, const Rows& x);
  void prepare(const Linear&, const RowsOf<bf16>&) {}
  void prepare(const Linear&, const RowsOf<half>&) {}

  // Calls write(token, row, values, count), the results of `count` rows of W from `row` on, for the tokens [first, last).
  template <class Number, class Write>
  void panel(const Linear& linear, const RowsOf<Number>& x, int panel, int first, int last, Write write) {
    const int tokens = last - first;
    if (tile_.size() < static_cast<size_t>(tokens) * kPanel) tile_.resize(static_cast<size_t>(tokens) * kPanel);
    const uint8_t* weight = linear.weight + panel * panel_bytes(linear.format, linear.columns);
    multiply(linear, weight, x, first, tokens);
    const int row = panel * kPanel, count = std::min(kPanel, linear.rows - row);
    for (int t = 0; t < tokens; ++t) {
      float* values = tile_.data() + static_cast<size_t>(t) * kPanel;
      if (linear.bias)
        for (int i = 0; i < count; ++i) values[i] += to_float(linear.bias[row + i]);
      write(first + t, row, values, count);
    }
  }

 private:
  // The products of a panel with the rows [first, first + tokens) of x, into the tile [tokens][32].
  void multiply(const Linear& linear, const uint8_t* panel, const Rows& x, int first, int tokens);

  // The same by dot products of bfloat16 (dots.cpp), to which weights of other formats are rounded.
  void multiply(const Linear& linear, const uint8_t* panel, const RowsOf<bf16>& x, int first, int tokens);

  // The same by FMAs of float16 (halves.cpp), to which weights of 4 and 8 bits are rounded, and sums of a few products.
  void multiply(const Linear& linear, const uint8_t* panel, const RowsOf<half>& x, int first, int tokens);

  template <class Kind>
  void multiply_as(const uint8_t* panel, int columns, const Rows& x, int first, int tokens);

  Aligned<float> tile_, widened_, x_sums_;
  Aligned<uint32_t> pairs_;
  Aligned<half> halves_;
};

// The way in which products with so many rows of x are made: by FMAs of float32 where there are few, else as this CPU does it fastest,
// which is found out once, by trying all that it has.
Way way_of(const Linear& linear, int tokens);

// Rows of x in the form that a way takes them in, each way's in the same memory.
class Input {
 public:
  Input(int tokens, int most_columns) : tokens_(tokens), memory_(Rows::size(tokens, most_columns)), factors_(tokens) {}

  // work(rows) with the rows as the way takes them.
  template <class Work>
  void as(Way way, Work&& work) {
    void* memory = memory_.data();
    if (way == kHalves) return work(RowsOf<half>{static_cast<half*>(memory), tokens_, factors_.data()});
    if (way == kDots) return work(RowsOf<bf16>{static_cast<bf16*>(memory), tokens_});
    work(Rows{memory_.data(), tokens_});
  }

  void set(Way way, int t, const bf16* values, int count) {
    as(way, [&](auto rows) { rows.set(t, values, count); });
  }

 private:
  int tokens_;
  Aligned<float> memory_, factors_;
};

}  // namespace piecework
