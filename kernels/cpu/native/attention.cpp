// Paged attention as C functions: `call` is an AttentionCall, laid out as `attention.py` describes it.
#include "attention.h"

#include <cstdio>
#include <cstdlib>

namespace piecework {

namespace {

Caches caches = {{kernels_of<bf16, bf16>()}, {}};

template <class T>
CacheKernels<T> loaded(const CacheKernels<T>& kernels) {
  if (kernels.attend_item) return kernels;
  std::fprintf(stderr, "piecework: the kernels of this kind of KV cache are not loaded\n");
  std::abort();
}

}  // namespace

template int64_t make_items(const AttentionCall<bf16>& call, int threads, std::vector<Item>& items);
template void merge_item(const AttentionCall<bf16>& call, const Item& item, Scratch& scratch, const float* partials);

template <>
CacheKernels<bf16> kernels_for(CacheKind kind) {
  return loaded(caches.narrow[static_cast<int>(kind)]);
}

template <>
CacheKernels<float> kernels_for(CacheKind) {
  return loaded(caches.floats);
}

namespace {

constexpr int64_t kAlone = 1 << 17;  // Number of products that take as long as waking another thread.

template <class T>
void attention(const AttentionCall<T>& call, int most_threads) {
  int64_t keys = 0;
  for (int b = 0; b < call.requests; ++b) keys += call.query_lens[b] * static_cast<int64_t>(call.seq_lens[b]);
  const int threads = keys * call.heads * call.head_size < kAlone ? 1 : most_threads;
  static thread_local std::vector<Item> items;
  static thread_local std::vector<float> partials;
  const int64_t floats = make_items(call, threads, items);
  if (static_cast<int64_t>(partials.size()) < floats) partials.resize(floats);
  const CacheKernels<T> kernels = kernels_for<T>(call.cache_kind);
  float* waiting = partials.data();
  const Item* work = items.data();
  const int count = static_cast<int>(items.size());
#pragma omp parallel num_threads(threads)
  {
    Scratch scratch(call.head_size, call.value_size, std::max(kMostRows, call.most_heads()), prefers_dots());
#pragma omp for schedule(static)
    for (int row = 0; row < call.tokens; ++row) kernels.store_row(call, row);
#pragma omp for schedule(dynamic)
    for (int i = 0; i < count; ++i) kernels.attend_item(call, work[i], i + threads < count ? work + i + threads : nullptr, scratch, waiting);
    if (floats > 0) {
#pragma omp for schedule(dynamic)
      for (int i = 0; i < count; ++i)
        if (work[i].chunks > 0) merge_item(call, work[i], scratch, waiting);
    }
  }
}

}  // namespace
}  // namespace piecework

// What the libraries of other kinds of caches add themselves to.
extern "C" void* piecework_caches() { return &piecework::caches; }

extern "C" void piecework_attention_bf16(const void* call, int threads) {
  piecework::attention(*static_cast<const piecework::AttentionCall<piecework::bf16>*>(call), threads);
}

extern "C" void piecework_attention_f32(const void* call, int threads) {
  piecework::attention(*static_cast<const piecework::AttentionCall<float>*>(call), threads);
}
