// The products of linear.h with x in 8 bits in groups of 32 columns, and weights as in the file. The sum of a group is an exact integer. It
// is multiplied by both scales and added in float32. The result of a row does not depend on other rows.
#include "format.h"
#include "linear.h"
#include "pairs.h"
#include "unpacked.h"
#include "weights.h"

namespace piecework {
namespace {

constexpr int kGroup = GroupedColumns::kGroup;

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
  const FormatKernels& kernels = kernels_of(linear.format);
  const GroupedColumns* from = x.at(span.begin / kColumnsAtOnce, span.first);
  const int at = span.begin % kColumnsAtOnce / kGroup;
  kernels.integers(panel + group_bytes(linear.format, span.begin), from, at, span.columns, span.tokens, to, adds,
                   kHasUnpacked && span.tokens >= kLeastUnpackedRows && unpacks_panels());
}

}  // namespace piecework
