// Norms and gated activations of rows of bfloat16, as bfloat16 or quantised to 8 bits; quantisation alone; and the norm and rotation of
// queries and keys.
#include <vector>

#include "rows.h"

namespace piecework {
namespace {

constexpr int64_t kAlone = 1 << 13;  // Numbers that take as long as waking another thread.

enum Source : int32_t { kRow = 0, kNorm = 1, kAddNorm = 2, kGated = 3 };
enum Kind : int32_t { kInts = 0, kFloat8s = 1, kBfloat16s = 2 };

struct Quantize {
  const bf16 *x, *residual, *weight;  // x [tokens][columns], or [2 * columns] for kGated; the others are set if the source has them.
  bf16* total;                        // x + residual.
  void* numbers;  // [tokens][columns] of the kind.
  float* scales;  // [tokens][columns / group]; none for kBfloat16.
  int64_t x_stride, residual_stride;
  Quantization how;
  int32_t source, kind, tokens, columns;
  float eps;
};

// The row to quantise, in `made` if it is not x's own.
const bf16* source_row(const Quantize& call, int64_t t, bf16* made) {
  const bf16* x = call.x + t * call.x_stride;
  bf16* total = call.total + t * call.columns;
  switch (call.source) {
    case kRow: return x;
    case kNorm: rms_norm(x, call.weight, call.columns, call.eps, made); break;
    case kAddNorm:
      add(x, call.residual + t * call.residual_stride, call.columns, total);
      rms_norm(total, call.weight, call.columns, call.eps, made);
      break;
    case kGated: silu_and_mul(x, x + call.columns, call.columns, made); break;
  }
  return made;
}

struct NormRotary {
  const bf16 *q, *k, *q_weight, *k_weight, *cos, *signed_sin;  // Without weights there is no norm. cos, signed_sin [tokens][size].
  bf16* out;                                                   // [tokens][heads + kv_heads][size]
  int64_t q_stride, k_stride;                                  // Distance between tokens.
  int32_t tokens, heads, kv_heads, size;
  float eps;
};

}  // namespace
}  // namespace piecework

extern "C" void piecework_quantize(const void* arguments, int threads) {
  using namespace piecework;
  const Quantize& call = *static_cast<const Quantize*>(arguments);
  const int64_t groups = call.kind == kBfloat16s || call.how.scale ? 0 : call.columns / call.how.group;
#pragma omp parallel num_threads(static_cast<int64_t>(call.tokens) * call.columns < kAlone ? 1 : threads)
  {
    std::vector<bf16> made(call.columns);
#pragma omp for schedule(static)
    for (int t = 0; t < call.tokens; ++t) {
      const int64_t first = static_cast<int64_t>(t) * call.columns;
      const bool is_kept = call.kind == kBfloat16s;
      const bf16* row = source_row(call, t, is_kept ? static_cast<bf16*>(call.numbers) + first : made.data());
      if (is_kept) continue;
      if (call.kind == kInts)
        quantize(row, call.columns, call.how, static_cast<int8_t*>(call.numbers) + first, call.scales + t * groups);
      else
        quantize(row, call.columns, call.how, static_cast<fp8*>(call.numbers) + first, call.scales + t * groups);
    }
  }
}

extern "C" void piecework_norm_rotary(const void* arguments, int threads) {
  using namespace piecework;
  const NormRotary& call = *static_cast<const NormRotary*>(arguments);
  const int heads = call.heads + call.kv_heads, size = call.size;
#pragma omp parallel num_threads(static_cast<int64_t>(call.tokens) * heads * size < kAlone ? 1 : threads)
  {
    std::vector<bf16> made(size);
#pragma omp for schedule(static)
    for (int t = 0; t < call.tokens; ++t) {
      const int64_t place = static_cast<int64_t>(t) * size;
      for (int h = 0; h < heads; ++h) {
        const bool is_query = h < call.heads;
        const bf16* head = is_query ? call.q + t * call.q_stride + h * size : call.k + t * call.k_stride + (h - call.heads) * size;
        if (call.q_weight) {
          rms_norm(head, is_query ? call.q_weight : call.k_weight, size, call.eps, made.data());
          head = made.data();
        }
        rotate(head, call.cos + place, call.signed_sin + place, size, call.out + place * heads + h * size);
      }
    }
  }
}
