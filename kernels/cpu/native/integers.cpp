// The products of linear.h by x of 8 bits in groups of 32 columns, and weights as the file holds them: sums of a group are whole numbers, and
// exact; each is multiplied by the scales of both and added in float32. So a row's results are the same bits whatever rows are beside it.
#include "linear.h"
#include "weights.h"

namespace piecework {
namespace {

constexpr int kGroup = GroupedColumns::kGroup;

// Rows are unrolled by pragmas: as lambdas of `unrolled` they take compilers longer.

// c [R][32] = or += the products of blocks of a panel with as many columns of R rows of x. `at`: the first group of x's.
template <class Kind, int R>
void integer_products(const uint8_t* panel, const GroupedColumns* x, int at, int blocks, float* c, bool adds) {
  using Scales = typename Kind::Scales;
  using Sums = ByteSums<Kind::Numbers::kBits>;
  constexpr int kUnitBytes = Kind::kBytes / Kind::kUnits, kShift = Sums::kShift + Scales::kOffset, kSteps = Scales::kColumns / 8;
  constexpr bool kHasHalves = Kind::kGroups == 2, kHasMinimum = Scales::kHasMinimum && Scales::kOffset == 0;
  for (int part = 0; part < kParts; ++part) {
    const int row = part * kWide;
    floats totals[R][2] = {};
    if (adds)
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        totals[r][0] = load<floats>(c + r * kPanel + row);
        totals[r][1] = load<floats>(c + r * kPanel + row + kLanes);
      }
    const uint8_t* block = panel;
    for (int b = 0, g = at; b < blocks; ++b, block += Kind::kBytes)
      for (int u = 0; u < Kind::kUnits; ++u, ++g) {
        const uint8_t *unit = Kind::unit(block, u), *scales = Kind::scales(block);
        prefetch(block + u * kUnitBytes, kUnitBytes);
        floats scaled[R][2];  // the sum of the first half of a unit
        unrolled<Kind::kGroups>([&](auto half) __attribute__((always_inline)) {
          Sums sums[R][2];
          int32_t first[R];
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            first[r] = -kShift * (kHasHalves ? x[r].halves[2 * g + half] : x[r].sums[g]);
            sums[r][0].begin(first[r]), sums[r][1].begin(first[r]);
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
          unrolled<2>([&](auto side) __attribute__((always_inline)) {
            const int group = u * Kind::kGroups + half, from = row + side * kLanes;
            const floats scale = Scales::scale(scales, group, from);
            floats minimum{};
            if constexpr (kHasMinimum) minimum = Scales::minimum(scales, group, from);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
              const floats sum = __builtin_convertvector(sums[r][side].total(first[r]), floats);
              if constexpr (!kHasHalves)
                totals[r][side] += sum * (scale * x[r].scales[g]);
              else if constexpr (half == 0)
                scaled[r][side] = sum * scale;
              else
                totals[r][side] += (scaled[r][side] + sum * scale) * x[r].scales[g];
              if constexpr (kHasMinimum) totals[r][side] += minimum * (kHasHalves ? x[r].scaled_halves[2 * g + half] : x[r].scaled_sums[g]);
            }
          });
        });
      }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      store(c + r * kPanel + row, totals[r][0]);
      store(c + r * kPanel + row + kLanes, totals[r][1]);
    }
  }
}

}  // namespace

void GroupedColumns::set(const bf16* values, int count) {
  using signed_bytes = int8_t __attribute__((vector_size(kLanes)));
  constexpr int kVectors = kGroup / 2 / kLanes;  // of pairs
  ints lanes;
  for (int i = 0; i < kLanes; ++i) lanes[i] = i;
  for (int g = 0; g < count / kGroup; ++g, values += kGroup) {
    words pairs[kVectors];
    ints most{};
    for (int i = 0; i < kVectors; ++i) {
      pairs[i] = load<words>(values + 2 * kLanes * i);
      const ints even = (ints)(pairs[i] << 16 & 0x7fff0000u), odd = (ints)(pairs[i] & 0x7fff0000u);
      const ints more = even > odd ? even : odd;
      most = most > more ? most : more;
    }
    const float largest = bits_as<float>(largest_lane(most));
    // What is as small as this is 0: its inverse would not be finite.
    const bool is_zero = largest < 0x1p-100f;
    const float inverse = is_zero ? 0.0f : 127.0f / largest;
    const auto nearest = [&](words wide) {
      floats number = bits_as<floats>(wide) * inverse;
      number = number > 127.0f ? floats{} + 127.0f : number < -127.0f ? floats{} - 127.0f : number;
      return (ints)(number + 0x1.8p23f) - 0x4b400000;  // whose last bit counted ones
    };
    int8_t even[kGroup / 2], odd[kGroup / 2];
    ints sum[2] = {};  // of the halves
    for (int i = 0; i < kVectors; ++i) {
      const ints a = nearest(pairs[i] << 16), b = nearest(pairs[i] & 0xffff0000u);
      if constexpr (kVectors == 1) {
        const ints is_first = lanes < kLanes / 2;
        sum[0] = (a + b) & is_first, sum[1] = (a + b) & ~is_first;
      } else {
        sum[2 * i / kVectors] += a + b;
      }
      store(even + kLanes * i, __builtin_convertvector(a, signed_bytes));
      store(odd + kLanes * i, __builtin_convertvector(b, signed_bytes));
    }
    for (int i = 0; i < kGroup / 8; ++i) {
      std::memcpy(numbers + g * kGroup + 8 * i, even + 4 * i, 4);
      std::memcpy(numbers + g * kGroup + 8 * i + 4, odd + 4 * i, 4);
    }
    const int32_t low = sum_of_lanes(sum[0]), high = sum_of_lanes(sum[1]);
    scales[g] = is_zero ? 0.0f : largest * (1.0f / 127.0f);
    sums[g] = low + high;
    scaled_sums[g] = scales[g] * static_cast<float>(low + high);
    halves[2 * g] = low, halves[2 * g + 1] = high;
    scaled_halves[2 * g] = scales[g] * static_cast<float>(low);
    scaled_halves[2 * g + 1] = scales[g] * static_cast<float>(high);
  }
}

void Multiplier::multiply(const Linear& linear, const uint8_t* panel, const RowsOf<GroupedColumns>& x, const Span& span, float* to, bool adds) {
  const int blocks = (span.tokens + kIntegerRows - 1) / kIntegerRows, size = (span.tokens + blocks - 1) / blocks;
  panel += group_bytes(linear.format, span.begin);
  for (int t = 0; t < span.tokens; t += size, to += size * kPanel) {
    const GroupedColumns* from = x.at(span.begin / kColumnsAtOnce, span.first + t);
    with_constant<kIntegerRows>(std::min(size, span.tokens - t), [&](auto rows) {
      with_format(linear.format, [&](auto kind) {
        if constexpr (kind.kIsScaled)
          integer_products<decltype(kind), rows>(panel, from, span.begin % kColumnsAtOnce / kGroup, span.columns / kind.kColumns, to, adds);
      });
    });
  }
}

}  // namespace piecework
