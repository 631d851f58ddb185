// Rows of x in the forms that the products of linear.h need.
#pragma once
#include <algorithm>

#include "rows.h"
#include "simd.h"

namespace piecework {

constexpr int kColumnsAtOnce = 1024;  // Columns whose products are summed before the sums are stored.

struct half {
  uint16_t bits;
};

// Columns of a row of x in 8 bits (integers.cpp). In each group of eight, columns 0, 2, 4, 6 come before 1, 3, 5, 7, as in words of weights
// (blocks.h). Each group of 32 has a scale, the sum of its numbers, those of its halves, and these times the scale. For pairs.h, the sums
// are negated and made per 16-bit lane, which has two of each four numbers.
struct GroupedColumns {
  static constexpr int kGroup = 32, kGroups = kColumnsAtOnce / kGroup;

  int8_t numbers[kColumnsAtOnce];
  float scales[kGroups], scaled_sums[kGroups], scaled_halves[2 * kGroups];
#if defined(__AVX512VNNI__)
  float ones[kGroups];  // The scales times -kOnes (unpacked.h).
#else
  int32_t sums[kGroups];
#endif
  int32_t halves[2 * kGroups];

  // Set whole groups, from column `first` on. `in_pairs`: rounded for 8-bit numbers in pairs.h.
  void set(const bf16* values, int count, int first, bool in_pairs);
};

// Distance of two rows of x. A power of two would map the lines of all rows to few places of a cache.
template <class Number>
constexpr int kStrideOf = kColumnsAtOnce + 64 / static_cast<int>(sizeof(Number));

template <>
inline constexpr int kStrideOf<GroupedColumns> = 1;

constexpr int kStride = kStrideOf<float>;

// The power of two that brings a row's largest number into [2^8, 2^9) by division; and the row divided by it, as float16 (halves.cpp).
float half_factor(const bf16* values, int count);
void narrow(const bf16* values, int count, float factor, half* to);

// Set bytes as the products need them, with zeros at the end, and their corrections [1 + 8] (bytes.cpp).
void set_bytes(const int8_t* values, int count, byte* to, int32_t* corrections);

// Rows of x, split into blocks of columns: [blocks][tokens][kStrideOf], of which the first kColumnsAtOnce hold numbers.
template <class Number>
struct RowsOf {
  Number* x;
  int tokens;
  float* factors = nullptr;       // [tokens], for float16: the factor of each row.
  const float* scales = nullptr;  // [tokens][groups] of quantised x, or one for all if there are no groups.
  int groups = 0;
  bool in_pairs = false;  // Whether 8-bit groups are rounded for pairs.h.

  float scale(int t, int segment) const {
    if (groups == 0) return scales ? *scales : 1.0f;
    return scales[static_cast<int64_t>(t) * groups + (groups > 1 ? segment : 0)];
  }

  static size_t size(int tokens, int columns) { return static_cast<size_t>(blocks(columns)) * tokens * kStrideOf<Number>; }
  static int blocks(int columns) { return (columns + kColumnsAtOnce - 1) / kColumnsAtOnce; }

  // The block's columns of token t.
  Number* at(int block, int t) const { return x + (static_cast<int64_t>(block) * tokens + t) * kStrideOf<Number>; }

  // The columns [first, last) of a row, all in one block.
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

  // Set columns [first, first + count) of a row, in whole groups. Not for float16, whose factor depends on the whole row.
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

  // The columns of a block are followed by the corrections for weights to which 128 was added: for all columns and for each segment
  // (bytes.cpp).
  void set(int t, const int8_t* values, int count) const {
    for (int first = 0; first < count; first += kColumnsAtOnce) {
      Number* to = columns(t, first);
      const int size = std::min(kColumnsAtOnce, count - first);
      set_bytes(values + first, size, to, reinterpret_cast<int32_t*>(to + kColumnsAtOnce));
    }
  }

  // An odd number of columns ends with a zero, to complete the pair.
  void end(int t, int count) const {
    if (count % 2) columns(t, count - 1)[1] = Number{};
  }
};

using Rows = RowsOf<float>;

}  // namespace piecework
