// The products of linear.h with x in 8 bits in groups of 32 columns, and weights as in the file. The sum of a group is an exact integer. It
// is multiplied by both scales and added in float32. The result of a row does not depend on other rows.
#include "linear.h"
#include "pairs.h"
#include "unpacked.h"
#include "weights.h"

namespace piecework {
namespace {

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

// The even and the odd columns of a group as bytes, four of each in turn.
template <int Vectors>
inline void store_by_fours(int8_t* to, const ints (&even)[Vectors], const ints (&odd)[Vectors]) {
#if defined(__AVX512F__)
  const __m128i a = _mm512_cvtepi32_epi8((__m512i)even[0]), b = _mm512_cvtepi32_epi8((__m512i)odd[0]);
  store(to, _mm_unpacklo_epi32(a, b)), store(to + 16, _mm_unpackhi_epi32(a, b));
#else
  using signed_bytes = int8_t __attribute__((vector_size(kLanes)));
  int8_t bytes[2][Vectors * kLanes];
  for (int i = 0; i < Vectors; ++i) {
    store(bytes[0] + kLanes * i, __builtin_convertvector(even[i], signed_bytes));
    store(bytes[1] + kLanes * i, __builtin_convertvector(odd[i], signed_bytes));
  }
  for (int i = 0; i < Vectors * kLanes / 4; ++i) {
    std::memcpy(to + 8 * i, bytes[0] + 4 * i, 4);
    std::memcpy(to + 8 * i + 4, bytes[1] + 4 * i, 4);
  }
#endif
}

// Set to [2] to the sums of the first and the last half of a group's columns.
template <int Vectors>
inline void sum_halves(const ints (&even)[Vectors], const ints (&odd)[Vectors], int32_t* to) {
#if defined(__AVX512F__)
  const __m512i sums = (__m512i)(even[0] + odd[0]);
  const __m256i pairs = _mm256_hadd_epi32(_mm512_castsi512_si256(sums), _mm512_extracti64x4_epi64(sums, 1));
  const __m128i fours = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_hadd_epi32(fours, fours));
#else
  ints sums[2] = {};
  for (int i = 0; i < Vectors; ++i) sums[2 * i / Vectors] += even[i] + odd[i];
  to[0] = sum_of_lanes(sums[0]), to[1] = sum_of_lanes(sums[1]);
#endif
}

}  // namespace

void GroupedColumns::set(const bf16* values, int count, int first, bool in_pairs) {
  constexpr int kVectors = kGroup / 2 / kLanes;  // Vectors of pairs.
  const int begin = first / kGroup, end = begin + count / kGroup;
  for (int g = begin; g < end; ++g, values += kGroup) {
    words pairs[kVectors];
    ints most{};
    for (int i = 0; i < kVectors; ++i) {
      pairs[i] = load<words>(values + 2 * kLanes * i);
      const ints even = (ints)(pairs[i] << 16 & 0x7fff0000u), odd = (ints)(pairs[i] & 0x7fff0000u);
      const ints more = even > odd ? even : odd;
      most = most > more ? most : more;
    }
    if constexpr (kHasPairs)
      if (in_pairs) most = most_of_pairs(most, pairs);
    const float largest = bits_as<float>(largest_lane(most));
    // A group of such small numbers becomes 0, because the inverse of its scale would not be finite.
    const bool is_zero = largest < 0x1p-100f;
    const float inverse = is_zero ? 0.0f : 127.0f / largest;
    // If numbers are not finite, the scale is not finite either, and the integers may have any value.
    ints even[kVectors], odd[kVectors];
    for (int i = 0; i < kVectors; ++i) {
      even[i] = nearest_ints(bits_as<floats>(pairs[i] << 16) * inverse);
      odd[i] = nearest_ints(bits_as<floats>(pairs[i] & 0xffff0000u) * inverse);
    }
    if constexpr (!kHasPairs) {
      store_by_fours(numbers + g * kGroup, even, odd);
      sum_halves(even, odd, halves + 2 * g);
    }
    scales[g] = is_zero ? 0.0f : shortened(largest * (1.0f / 127.0f));
    if constexpr (kHasPairs) set_pairs(*this, g, even, odd);
  }
  if constexpr (kHasPairs) return;
  for (int g = begin; g < end; ++g) {
    const int32_t sum = halves[2 * g] + halves[2 * g + 1];
    scaled_sums[g] = scales[g] * static_cast<float>(sum);
    set_sum(*this, g, sum);
  }
  for (int i = 2 * begin; i < 2 * end; ++i) scaled_halves[i] = scales[i / 2] * static_cast<float>(halves[i]);
}

bool rounds_pairs(const Linear& linear) {
  bool is_wide = false;
  if constexpr (kHasPairs)
    each_format(linear, [&](int32_t format) {
      with_format(format, [&](auto kind) {
        if constexpr (kind.kIsScaled) is_wide |= kIsWide<typename decltype(kind)::Numbers>;
      });
    });
  return is_wide;
}

void Multiplier::multiply(const Linear& linear, const uint8_t* panel, const RowsOf<GroupedColumns>& x, const Span& span, float* to, bool adds) {
  const GroupedColumns* from = x.at(span.begin / kColumnsAtOnce, span.first);
  const int at = span.begin % kColumnsAtOnce / kGroup;
  int rest = span.tokens;  // Rows of x.
  panel += group_bytes(linear.format, span.begin);
  if constexpr (kHasUnpacked)
    if (rest >= kLeastUnpackedRows && unpacks_panels())
      return with_format(linear.format, [&](auto kind) {
        if constexpr (kind.kIsScaled) many_products<decltype(kind)>(panel, from, at, span.columns / kind.kColumns, rest, to, adds);
      });
  const int most = rest > kIntegerRows ? kManyRows : kIntegerRows;
  const int blocks = (rest + most - 1) / most, size = rest > 0 ? (rest + blocks - 1) / blocks : 1;
  for (; rest > 0; rest -= size, from += size, to += size * kPanel) {
    with_constant<kIntegerRows>(std::min(size, rest), [&](auto rows) {
      with_format(linear.format, [&](auto kind) {
        if constexpr (kind.kIsScaled && kHasPairs)
          pair_products<decltype(kind), rows>(panel, from, at, span.columns / kind.kColumns, to, adds, blocks > 1 ? rest : 0);
        else if constexpr (kind.kIsScaled && kParts == 2)
          integer_products_in_order<decltype(kind), rows>(panel, from, at, span.columns / kind.kColumns, to, adds);
        else if constexpr (kind.kIsScaled)
          integer_products<decltype(kind), rows>(panel, from, at, span.columns / kind.kColumns, to, adds);
      });
    });
  }
}

}  // namespace piecework
