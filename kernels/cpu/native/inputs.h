// Rows of x in the forms that the products of linear.h take them in.
#pragma once
#include <algorithm>

#include "rows.h"
#include "simd.h"

namespace piecework {

constexpr int kColumnsAtOnce = 1024;  // that products are summed over before the sums are put down

struct half {
  uint16_t bits;
};

// Columns of a row of x in 8 bits (integers.cpp): of each eight, 0, 2, 4, 6 before 1, 3, 5, 7, as words of weights have them (blocks.h). Each
// group of 32 has a scale, the sums of its numbers and of those of its halves, and these times the scale. For pairs.h the sums are minus those
// of each lane of 16 bits, which has two of each four numbers.
struct GroupedColumns {
  static constexpr int kGroup = 32, kGroups = kColumnsAtOnce / kGroup;

  int8_t numbers[kColumnsAtOnce];
  float scales[kGroups], scaled_sums[kGroups], scaled_halves[2 * kGroups];
#if defined(__AVX512VNNI__)
  float ones[kGroups];  // the scales times minus kOnes (unpacked.h)
#else
  int32_t sums[kGroups];
#endif
  int32_t halves[2 * kGroups];

  // Whole groups, from column `first` on. `in_pairs`: rounded for numbers of 8 bits in pairs.h.
  void set(const bf16* values, int count, int first, bool in_pairs);
};

// From a row of x to the next: a power of two would bring the rows' lines into few places of a cache.
template <class Number>
constexpr int kStrideOf = kColumnsAtOnce + 64 / static_cast<int>(sizeof(Number));

template <>
inline constexpr int kStrideOf<GroupedColumns> = 1;

constexpr int kStride = kStrideOf<float>;

// The power of two by which divided a row's largest number lies in [2^8, 2^9), and the row divided by it as float16 (halves.cpp).
float half_factor(const bf16* values, int count);
void narrow(const bf16* values, int count, float factor, half* to);

// Bytes as the products take them, ended by zeros, and their corrections [1 + 8] (bytes.cpp).
void set_bytes(const int8_t* values, int count, byte* to, int32_t* corrections);

// Rows of x, cut into blocks of columns: [blocks][tokens][kStrideOf], of which the first kColumnsAtOnce hold numbers.
template <class Number>
struct RowsOf {
  Number* x;
  int tokens;
  float* factors = nullptr;       // [tokens], of float16: by what a row is to be multiplied
  const float* scales = nullptr;  // [tokens][groups] of what was quantised, or one for all, and then no groups
  int groups = 0;
  bool in_pairs = false;  // how groups of 8 bits are rounded

  float scale(int t, int segment) const {
    if (groups == 0) return scales ? *scales : 1.0f;
    return scales[static_cast<int64_t>(t) * groups + (groups > 1 ? segment : 0)];
  }

  static size_t size(int tokens, int columns) { return static_cast<size_t>(blocks(columns)) * tokens * kStrideOf<Number>; }
  static int blocks(int columns) { return (columns + kColumnsAtOnce - 1) / kColumnsAtOnce; }

  // Columns of the block from token t on.
  Number* at(int block, int t) const { return x + (static_cast<int64_t>(block) * tokens + t) * kStrideOf<Number>; }

  // Where columns [first, last) of a row lie that are in one block.
  Number* columns(int t, int first) const { return at(first / kColumnsAtOnce, t) + first % kColumnsAtOnce; }

  void set(int t, const bf16* values, int count) const {
    if constexpr (std::is_same_v<Number, GroupedColumns>) {
      for (int first = 0; first < count; first += kColumnsAtOnce)
        at(first / kColumnsAtOnce, t)->set(values + first, std::min(kColumnsAtOnce, count - first), 0, in_pairs);
      return;
    } else {
      set_numbers(t, values, count);
    }
  }

  // Columns [first, first + count) of a row alone, in whole groups; not of float16, whose factor all of the row decides.
  void set_part(int t, int first, const bf16* values, int count) const {
    for (const int last = first + count; first < last;) {
      const int size = std::min(last - first, kColumnsAtOnce - first % kColumnsAtOnce);
      if constexpr (std::is_same_v<Number, GroupedColumns>) {
        at(first / kColumnsAtOnce, t)->set(values, size, first % kColumnsAtOnce, in_pairs);
      } else if constexpr (std::is_same_v<Number, bf16>) {
        std::memcpy(columns(t, first), values, size * sizeof(bf16));
      } else if constexpr (std::is_same_v<Number, float>) {
        float* to = columns(t, first);
        for (int k = 0; k < size; ++k) to[k] = to_float(values[k]);
      }
      first += size, values += size;
    }
  }

  void set_numbers(int t, const bf16* values, int count) const {
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

  void set(int t, const fp8* values, int count) const {
    static thread_local std::vector<bf16> wide;
    wide.resize(count);
    for (int k = 0; k < count; ++k) wide[k] = from_float<bf16>(to_float(values[k]));
    set(t, wide.data(), count);
  }

  // Each block's columns are followed by the correction of products with weights to which 128 was added, of all and of each segment
  // (bytes.cpp).
  void set(int t, const int8_t* values, int count) const {
    for (int first = 0; first < count; first += kColumnsAtOnce) {
      Number* to = columns(t, first);
      const int size = std::min(kColumnsAtOnce, count - first);
      set_bytes(values + first, size, to, reinterpret_cast<int32_t*>(to + kColumnsAtOnce));
    }
  }

  // The pairs of an odd number of columns end with a zero.
  void end(int t, int count) const {
    if (count % 2) columns(t, count - 1)[1] = Number{};
  }
};

using Rows = RowsOf<float>;

}  // namespace piecework
