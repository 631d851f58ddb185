// Attention over one kind of KV cache: PIECEWORK_CACHE, such as int8. Each kind but bfloat16's is a library of its own, because most models
// use none of them.
#include "attention.h"

#define NAME_OF(cache) piecework_cache_##cache
#define NAMED(cache) NAME_OF(cache)

namespace piecework {
namespace {

template <class Number, CacheKind kKind>
struct Narrow {
  static void add_to(Caches& caches) { caches.narrow[static_cast<int>(kKind)] = kernels_of<bf16, Number>(); }
};

// The values of --kv-cache-dtype, and float32 for models of that dtype.
using fp8_e4m3 = Narrow<fp8, CacheKind::kE4M3>;
using fp8_e5m2 = Narrow<e5m2, CacheKind::kE5M2>;
using int8 = Narrow<int8_t, CacheKind::kInt8>;
struct float32 {
  static void add_to(Caches& caches) { caches.floats = kernels_of<float, float>(); }
};

}  // namespace
}  // namespace piecework

extern "C" void NAMED(PIECEWORK_CACHE)(void* caches) { piecework::PIECEWORK_CACHE::add_to(*static_cast<piecework::Caches*>(caches)); }
