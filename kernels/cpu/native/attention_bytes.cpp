// Attention in bfloat16 over a KV cache in 8 bits.
#include "attention.h"

namespace piecework {

CacheKernels<bf16> byte_kernels_for(CacheKind kind) {
  if (kind == CacheKind::kE4M3) return kernels_of<bf16, fp8>();
  if (kind == CacheKind::kE5M2) return kernels_of<bf16, e5m2>();
  return kernels_of<bf16, int8_t>();
}

}  // namespace piecework
