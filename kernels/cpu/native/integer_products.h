// The products of integers.cpp, for one format of weights and every number of rows that are multiplied together.
#pragma once
#include "linear.h"
#include "pairs.h"
#include "unpacked.h"
#include "weights.h"

namespace piecework {

constexpr int kGroup = GroupedColumns::kGroup;

// Rows are unrolled by pragmas. With lambdas of `unrolled`, compilers take longer.

// c [R][32] = or += the products of a panel's blocks with as many columns of R rows of x. `at` is the first group of x. With every unpacked
// unit, `lines` lines from `next` on are prefetched. Not inlined, so that port_model.py finds each loop by its name.
template <class Kind, int R>
[[gnu::noinline]] void integer_products(const uint8_t* panel, const GroupedColumns* x, int at, int blocks, float* c, bool adds,
                                        const uint8_t* next = nullptr, int lines = 0) {
  using Scales = typename Kind::Scales;
  using Sums = ByteSums<Kind::Numbers::kBits>;
  constexpr int kUnitBytes = Kind::kBytes / Kind::kUnits, kShift = Sums::kShift + Scales::kOffset, kSteps = Scales::kColumns / 8;
  constexpr bool kHasHalves = Kind::kGroups == 2, kHasMinimum = Scales::kHasMinimum && Scales::kOffset == 0;
  constexpr bool kInMemory = kLanes == 16 && kHasMinimum && R > 6;  // Whether totals are in memory: sums fill half of the registers.
  alignas(64) int32_t starts[kHasStarts<Kind, R> ? R : 1][2 * GroupedColumns::kGroups];
  if constexpr (kHasStarts<Kind, R>)
    for (int r = 0; r < R; ++r) set_starts<Kind>(x[r], at, blocks, starts[r]);
  for (int part = 0; part < kParts; ++part) {
    const int row = part * kWide;
    floats totals[kInMemory ? 1 : R][2] = {};
    if constexpr (kInMemory) {
      if (!adds)
        for (int r = 0; r < R; ++r) store(c + r * kPanel + row, floats{}), store(c + r * kPanel + row + kLanes, floats{});
    } else if (adds) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        totals[r][0] = load<floats>(c + r * kPanel + row);
        totals[r][1] = load<floats>(c + r * kPanel + row + kLanes);
      }
    }
    const uint8_t* block = panel;
    for (int b = 0, g = at; b < blocks; ++b, block += Kind::kBytes)
      for (int u = 0; u < Kind::kUnits; ++u, ++g) {
        const uint8_t *unit = Kind::unit(block, u), *scales = Kind::scales(block);
        if constexpr (kIsUnpacked<Kind>)
          for (int line = 0; line < lines; ++line, next += 64) __builtin_prefetch(next);
        else
          prefetch(block + u * kUnitBytes, kUnitBytes);
        floats scaled[R][2];  // The sum of the first half of a unit.
        unrolled<Kind::kGroups>([&](auto half) __attribute__((always_inline)) {
          Sums sums[R][2];
          int32_t first[R] = {};
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            if constexpr (kHasStarts<Kind, R>) {
              const int32_t bits = starts[r][Kind::kGroups * (g - at) + half];
              sums[r][0].begin_at(bits), sums[r][1].begin_at(bits);
            } else {
              first[r] = kShift == 0 ? 0 : -kShift * (kHasHalves ? x[r].halves[2 * g + half] : sum_of(x[r], g));
              sums[r][0].begin(first[r]), sums[r][1].begin(first[r]);
            }
          }
          unrolled<2 * kSteps>([&](auto i) __attribute__((always_inline)) {
            constexpr int kJ = half * kSteps + i / 2, kP = i % 2;
            const words v = Kind::Numbers::template four<kJ, kP>(unit, row), w = Kind::Numbers::template four<kJ, kP>(unit, row + kLanes);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
              const int8_t* from = x[r].numbers + g * kGroup + 8 * kJ + 4 * kP;
              sums[r][0].add(v, from);
              sums[r][1].add(w, from);
            }
          });
          const int group = u * Kind::kGroups + half;
          floats scale[2], minimum[2] = {};
          unrolled<2>([&](auto side) __attribute__((always_inline)) {
            scale[side] = Scales::scale(scales, group, row + side * kLanes);
            if constexpr (kHasMinimum) minimum[side] = Scales::minimum(scales, group, row + side * kLanes);
          });
          // Read x before storing: for the compiler, the stored memory may overlap x.
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            const floats by = splat(x[r].scales[g]), least = splat(kHasHalves ? x[r].scaled_halves[2 * g + half] : x[r].scaled_sums[g]);
            const floats ones = ones_at(x[r], g);
            unrolled<2>([&](auto side) __attribute__((always_inline)) {
              const int from = row + side * kLanes;
              if constexpr (half == 0 && kIsUnpacked<Kind> && kHasHalves)
                scaled[r][side] = sums[r][side].scaled(scale[side], ones_of<Kind>(scales, from));
              else if constexpr (half == 0 && kHasHalves)
                scaled[r][side] = sums[r][side].total(first[r]) * scale[side];
              if constexpr (half == 0 && kHasHalves && !kHasMinimum) return;
              floats total = kInMemory ? load<floats>(c + r * kPanel + from) : totals[kInMemory ? 0 : r][side];
              if constexpr (!kHasHalves && kHasOnes)
                total = multiply_add(total, sums[r][side].scaled(by, ones), scale[side]);
              else if constexpr (!kHasHalves)
                total = multiply_add(total, sums[r][side].total(first[r]), scale[side] * by);
              else if constexpr (half == 1)
                total = multiply_add(total, multiply_add(scaled[r][side], sums[r][side].total(first[r]), scale[side]), by);
              if constexpr (kHasMinimum) total = multiply_add(total, minimum[side], least);
              if constexpr (kInMemory)
                store(c + r * kPanel + from, total);
              else
                totals[r][side] = total;
            });
          }
          if constexpr (kInMemory) asm volatile("" ::: "memory");
        });
      }
    if constexpr (!kInMemory)
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        store(c + r * kPanel + row, totals[r][0]);
        store(c + r * kPanel + row + kLanes, totals[r][1]);
      }
  }
}

// The same, with a few columns of all parts of the panel before the next ones, so that memory is read in order.
template <class Kind, int R>
void integer_products_in_order(const uint8_t* panel, const GroupedColumns* x, int at, int blocks, float* c, bool adds) {
  constexpr int kAtOnce = 8 / Kind::kUnits;
  for (int b = 0; b < blocks; b += kAtOnce, panel += kAtOnce * Kind::kBytes, at += 8, adds = true)
    integer_products<Kind, R>(panel, x, at, std::min(kAtOnce, blocks - b), c, adds);
}

// The same for at least kLeastUnpackedRows rows of x: the panel is unpacked, some units at a time. The next units are prefetched meanwhile.
template <class Kind>
void many_products(const uint8_t* panel, const GroupedColumns* x, int at, int blocks, int rows, float* c, bool adds) {
  using Made = UnpackedOf<Kind>;
  constexpr int kAtOnce = kUnitsAtOnce / Kind::kUnits, kRows = kUnpackedRows<Made>;
  static_assert(kLeastUnpackedRows >= kRows * (kRows - 1), "else there are blocks of fewer rows than kRows - 1");
  alignas(64) uint8_t made[kUnitsAtOnce * Made::kBytes];
  const int parts = (rows + kRows - 1) / kRows, times = (blocks + kAtOnce - 1) / kAtOnce, size = (blocks + times - 1) / times;
  for (int b = 0; b < blocks; b += size, panel += size * Kind::kBytes, adds = true) {
    const int some = std::min(size, blocks - b), units = some * Kind::kUnits, first = at + b * Kind::kUnits;
    unpack<Kind>(panel, some, made);
    const int bytes = size * Kind::kBytes, lines = bytes / (64 * parts * units) + 1;
    for (int part = 0, t = 0; part < parts; ++part) {
      const int end = rows * (part + 1) / parts, asked = 64 * lines * units * part;
      const auto multiply = end - t == kRows ? integer_products<Made, kRows> : integer_products<Made, kRows - 1>;
      multiply(made, x + t, first, units, c + t * kPanel, adds, panel + bytes + asked, asked < bytes ? lines : 0);
      t = end;
    }
  }
}

// Products of a panel's blocks with `rows` rows of x. `unpacks`: whether the panel may be unpacked once for many rows.
template <class Kind>
void all_integer_products(const uint8_t* panel, const GroupedColumns* x, int at, int columns, int rows, float* c, bool adds, bool unpacks) {
  const int count = columns / Kind::kColumns;
  if constexpr (kHasUnpacked)
    if (rows >= kLeastUnpackedRows && unpacks) return many_products<Kind>(panel, x, at, count, rows, c, adds);
  const int most = rows > kIntegerRows ? kManyRows : kIntegerRows;
  const int blocks = (rows + most - 1) / most, size = rows > 0 ? (rows + blocks - 1) / blocks : 1;
  for (; rows > 0; rows -= size, x += size, c += size * kPanel)
    with_constant<kIntegerRows>(std::min(size, rows), [&](auto some) {
      if constexpr (kHasPairs)
        pair_products<Kind, some>(panel, x, at, count, c, adds, blocks > 1 ? rows : 0);
      else if constexpr (kParts == 2)
        integer_products_in_order<Kind, some>(panel, x, at, count, c, adds);
      else
        integer_products<Kind, some>(panel, x, at, count, c, adds);
    });
}

}  // namespace piecework
