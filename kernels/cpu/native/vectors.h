// Vectors of the widest kind that the kernels are compiled for, their memory, and loops that the compiler unrolls.
#pragma once
#include <cmath>
#include <new>
#include <utility>
#include <vector>

#include "common.h"

namespace piecework {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kBlockRows = 12, kIntegerRows = 8;
#elif defined(__AVX2__) && defined(__AVXVNNI__)
constexpr int kLanes = 8, kBlockRows = 6, kIntegerRows = 3;
#elif defined(__AVX2__)
constexpr int kLanes = 8, kBlockRows = 6, kIntegerRows = 8;
#elif defined(__ARM_NEON)
constexpr int kLanes = 4, kBlockRows = 12, kIntegerRows = 6;
#else
constexpr int kLanes = 4, kBlockRows = 6, kIntegerRows = 3;
#endif
// kBlockRows: rows with two vectors of sums each that fit the registers beside their inputs. kIntegerRows: rows with as many vectors of
// integers, or, with pairs.h, in two alternating blocks.

using floats = float __attribute__((vector_size(4 * kLanes)));
using words = uint32_t __attribute__((vector_size(4 * kLanes)));
using ints = int32_t __attribute__((vector_size(4 * kLanes)));

// Aligned memory, because a vector that lies across two cache lines takes twice as long to read.
template <class T>
struct AlignedAllocator {
  using value_type = T;
  static constexpr std::align_val_t kLine{64};

  AlignedAllocator() = default;
  template <class U>
  AlignedAllocator(const AlignedAllocator<U>&) {}
  T* allocate(size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), kLine)); }
  void deallocate(T* memory, size_t) { ::operator delete(memory, kLine); }
  template <class U>
  bool operator==(const AlignedAllocator<U>&) const { return true; }
  template <class U>
  bool operator!=(const AlignedAllocator<U>&) const { return false; }
};

template <class T>
using Aligned = std::vector<T, AlignedAllocator<T>>;

template <class Vector, class T>
inline Vector load(const T* from) {
  static_assert(!std::is_same_v<T, void>);
  Vector v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

template <int... I>
inline floats splat(float x, std::integer_sequence<int, I...>) {
  return floats{(static_cast<void>(I), x)...};
}

// Not a sum with zeros, which would need one more instruction, to turn -0 into 0.
inline floats splat(float x) { return splat(x, std::make_integer_sequence<int, kLanes>{}); }

template <class Vector, class T>
inline void store(T* to, Vector v) {
  std::memcpy(to, &v, sizeof v);
}

template <class To, class From>
inline To bits_as(From v) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  std::memcpy(&result, &v, sizeof v);
  return result;
}

inline float half_to_float(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16, exponent = (bits >> 10) & 31u, fraction = bits & 0x3ffu;
  if (exponent == 0) {
    const float size = static_cast<float>(fraction) * 0x1p-24f;
    return sign ? -size : size;
  }
  const uint32_t wide = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13;
  float result;
  std::memcpy(&result, &wide, sizeof result);
  return result;
}

inline uint16_t float_to_half(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (size >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  const float shifted = std::fabs(x) + 0.5f;  // Its last bit is worth float16's smallest number.
  uint32_t small;
  std::memcpy(&small, &shifted, sizeof small);
  const uint32_t large = ((size + 0xfffu + (size >> 13 & 1u)) >> 13) - (112u << 10);
  return static_cast<uint16_t>(sign | (size < 0x38800000u ? small & 0x7ffu : large));
}

// Store kLanes float32 rounded to bfloat16, as in `from_float`.
inline void store_rounded(bf16* to, floats v) {
  using shorts = uint16_t __attribute__((vector_size(2 * kLanes)));
  const words bits = bits_as<words>(v), rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  const words is_number = (words)(v == v);
  store(to, __builtin_convertvector((rounded & is_number) | (~is_number & 0x7fc0u), shorts));
}

// Numbers of e4m3 divided by 256. 480 / 256 comes from all ones except the sign, and becomes NaN.
inline floats with_nan(floats v) { return bits_as<floats>(bits_as<ints>(v) | ((v * v > 3.3f) & 0x7fc00000)); }

// 1.5 * 2^23: the last bit of a float32 of this size is worth 1, so adding an integer to its bits adds it to the number.
constexpr float kOnes = 0x1.8p23f;

// Sums of products of each row's weights with int8, four columns at a time. Weights are unsigned with up to 7 bits, or signed with 8.
// `first` is the start of a sum, and is passed to `total` again: -kShift times the sum of the int8.
template <int Bits>
struct PlainByteSums {
  static constexpr int kShift = 0;
  ints sums;

  void begin(int32_t first) { sums = ints{} + first; }
  void add(words weights, const int8_t* x) {
    for (int i = 0; i < 4; ++i) sums += ((ints)(weights << (24 - 8 * i)) >> 24) * static_cast<int32_t>(x[i]);
  }
  floats total(int32_t) const { return __builtin_convertvector(sums, floats); }
};

template <class Work, size_t... I>
__attribute__((always_inline)) inline void unrolled(Work&& work, std::index_sequence<I...>) {
  (work(std::integral_constant<int, static_cast<int>(I)>{}), ...);
}

// Call work(0) to work(N - 1), with each number known to the compiler.
template <int N, class Work>
__attribute__((always_inline)) inline void unrolled(Work&& work) {
  unrolled(work, std::make_index_sequence<N>{});
}

// Call work(integral_constant) with a number in [1, N] that is known at run time.
template <int N, class Work>
inline void with_constant(int number, Work&& work) {
  if constexpr (N > 1) {
    if (number < N) return with_constant<N - 1>(number, work);
  }
  work(std::integral_constant<int, N>{});
}

}  // namespace piecework
