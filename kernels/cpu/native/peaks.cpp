// The peak rates of this machine: streams through memory, and chains of multiply-adds in registers.
#include "simd.h"

namespace piecework {
namespace {

enum Kind : int32_t { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2, kInt8 = 3 };

constexpr int kChains = 12;  // Independent sums: more than the latency of a multiply-add times the number of its units.

// Keep a sum, so that the compiler neither shortens nor removes the loop.
template <class Vector>
__attribute__((always_inline)) inline void keep(Vector& sum) {
#if defined(__AVX2__)
  asm volatile("" : "+v"(sum));
#else
  asm volatile("" : "+m"(sum));
#endif
}

// Return the number of operations, two per multiply-add, of `rounds` times kChains steps.
template <class Vector, class Step>
int64_t run(int64_t rounds, int threads, int operations, Step step) {
#pragma omp parallel num_threads(threads)
  {
    Vector sums[kChains] = {}, a{}, b{};
    keep(a), keep(b);
    for (int64_t i = 0; i < rounds; ++i)
      unrolled<kChains>([&](auto chain) __attribute__((always_inline)) {
        step(sums[chain], a, b);
        keep(sums[chain]);
      });
  }
  return rounds * threads * kChains * operations;
}

int64_t multiply_adds(int32_t kind, int64_t rounds, int threads) {
  if (kind == kFloat32) return run<floats>(rounds, threads, 2 * kLanes, [](floats& sum, floats a, floats b) { sum = a * b + sum; });
#if defined(__AVX512BF16__)
  if (kind == kBfloat16)
    return run<floats>(rounds, threads, 4 * kLanes, [](floats& sum, floats a, floats b) {
      sum = (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
    });
#endif
#if defined(__AVX512FP16__)
  if (kind == kFloat16)
    return run<floats>(rounds, threads, 4 * kLanes, [](floats& sum, floats a, floats b) {
      sum = (floats)_mm512_fmadd_ph((__m512h)a, (__m512h)b, (__m512h)sum);
    });
#endif
#if defined(__AVX512VNNI__)
  if (kind == kInt8)
    return run<ints>(rounds, threads, 8 * kLanes, [](ints& sum, ints a, ints b) {
      sum = (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
    });
#elif defined(__AVXVNNI__)
  if (kind == kInt8)
    return run<ints>(rounds, threads, 8 * kLanes, [](ints& sum, ints a, ints b) {
      sum = (ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
    });
#elif defined(__AVX2__) && !defined(__AVX512F__)
  // Without dot products of bytes, pairs are added in 16 bits, which is the fastest that AVX2 offers for bytes, and fits weights of up to 5
  // bits (pairs.h). One factor is the sum, so that each product is computed anew.
  if (kind == kInt8)
    return run<ints>(rounds, threads, 8 * kLanes, [](ints& sum, ints a, ints b) {
      sum = (ints)_mm256_add_epi16((__m256i)b, _mm256_maddubs_epi16((__m256i)a, (__m256i)sum));
    });
#endif
  return 0;
}

}  // namespace
}  // namespace piecework

// Run multiply-adds of this kind, and return the number of operations, or 0 if the kernels have no such instruction.
extern "C" int64_t piecework_multiply_adds(int32_t kind, int64_t rounds, int threads) {
  return piecework::multiply_adds(kind, rounds, threads);
}

// a [count] = b + 3 c. Each thread has its own range.
extern "C" void piecework_triad(float* a, const float* b, const float* c, int64_t count, int threads) {
#pragma omp parallel for simd num_threads(threads) schedule(static)
  for (int64_t i = 0; i < count; ++i) a[i] = b[i] + 3.0f * c[i];
}

// Return the sum of words [count], which are read once. Each thread has its own range.
extern "C" uint32_t piecework_read(const uint32_t* words, int64_t count, int threads) {
  uint32_t sum = 0;
#pragma omp parallel for simd num_threads(threads) schedule(static) reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) sum += words[i];
  return sum;
}
