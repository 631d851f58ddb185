// y = x W^T + b in float32 sums, for rows of x and panels of W in the formats of weights.h.
//
// Either by float32 FMAs on numbers that are widened, or, for many rows, by bfloat16's own dot products. Which is faster is the CPU's: on
// Emerald Rapids FMAs make 176 GFLOP/s a core and `vdpbf16ps` 86 (docs/performance-cpu.md), others have twice as many dot products as FMAs.
#pragma once
#include <algorithm>
#include <vector>

#include "common.h"

namespace piecework {

struct Linear {
  const uint8_t* weight;  // panels
  const bf16* bias;       // [rows], or null
  int32_t rows, columns, format;
};

constexpr int kPanel = 32;  // rows of W that lie side by side

enum Format : int32_t { kBf16 = 0, kQ8 = 1, kQ4 = 2 };

// Bytes of a panel.
int64_t panel_bytes(int32_t format, int columns);

constexpr int kColumnsAtOnce = 1024;  // that products are summed over before the sums are put down

// From a row of x to the next: a power of two would bring the rows' lines into few places of a cache.
template <class Number>
constexpr int kStrideOf = kColumnsAtOnce + 64 / static_cast<int>(sizeof(Number));

constexpr int kStride = kStrideOf<float>;

// Rows of x, cut into blocks of columns: [blocks][tokens][kStrideOf], of which the first kColumnsAtOnce hold numbers.
template <class Number>
struct RowsOf {
  Number* x;
  int tokens;

  static size_t size(int tokens, int columns) { return static_cast<size_t>(blocks(columns)) * tokens * kStrideOf<Number>; }
  static int blocks(int columns) { return (columns + kColumnsAtOnce - 1) / kColumnsAtOnce; }

  // Columns of the block from token t on.
  Number* at(int block, int t) const { return x + (static_cast<int64_t>(block) * tokens + t) * kStrideOf<Number>; }

  // Where columns [first, last) of a row lie that are in one block.
  Number* columns(int t, int first) const { return at(first / kColumnsAtOnce, t) + first % kColumnsAtOnce; }

  void set(int t, const bf16* values, int count) const {
    for (int first = 0; first < count; first += kColumnsAtOnce) {
      Number* to = columns(t, first);
      const int size = std::min(kColumnsAtOnce, count - first);
      if constexpr (std::is_same_v<Number, bf16>) {
        std::memcpy(to, values + first, size * sizeof(bf16));
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

  template <class Kind>
  void multiply_as(const uint8_t* panel, int columns, const Rows& x, int first, int tokens);

  std::vector<float> tile_, widened_, x_sums_;
  std::vector<uint32_t> pairs_;
};

// Whether this CPU makes products of many rows faster by dot products of bfloat16 than by FMAs; found out once, by both.
bool dots_are_faster();

}  // namespace piecework
