// A decoder and one step of it, in the layout of step.py.
//
// T tokens, N hidden size, H query heads, K key/value heads, D head size.
#pragma once
#include "attention.h"
#include "linear.h"
#include "moe.h"
#include "rows.h"
#include "sampling.h"
#include "shared.h"

#include <vector>

namespace piecework {

// RMSNorm. Without a weight, numbers are not changed.
struct Norm {
  const bf16* weight;
  float eps;
  int32_t spans_heads;  // Whether it normalises all heads of queries, or of keys, together.

  void apply(const bf16* x, int size, bf16* out) const { rms_norm(x, weight, size, eps, out); }
};

enum Activation : int32_t { kSilu = 0, kGeluTanh = 1 };

struct FeedForward {
  Linear gate_up, down;
  int32_t activation;

  int width() const { return gate_up.rows / 2; }
};

// x + after(half(before(x))) * multiplier, for attention and then for the feed-forward part.
struct Layer {
  Norm before_attention, after_attention, before_feed_forward, after_feed_forward, q_norm, k_norm;
  Linear qkv, output;
  FeedForward dense;
  Routing routing;  // Replaces `dense` if there are experts.
  Experts experts;
  FeedForward shared;                // Run by all tokens, besides the experts; without rows there is none.
  Linear shared_gate;                // Its sigmoid is the factor of `shared`; without rows the factor is 1.
  const bf16 *cos, *signed_sin;      // [positions, turned].
  const float* sinks;                // [H], or null.
  void *k_cache, *v_cache;
  float multiplier, scale, softcap, k_scale, v_scale;
  int32_t turned, is_interleaved;    // Numbers of a head that are rotated; whether their pairs are adjacent.
  int32_t window, table;  // table: index of the step's table with its pages.
  CacheKind cache_kind;
  int32_t kept;  // Place of its input among the states that a row of `out` has after the hidden state; 0: it is not kept.

  bool mixes() const { return experts.count > 0; }
};

struct Model {
  const Layer* layers;
  Linear embedding;  // Its rows are those of this rank.
  Norm norm;
  Linear head;       // Gives logits; without rows they are not computed here.
  Member* member;    // Of the ranks, or null.
  int32_t num_layers, hidden, intermediate, heads, kv_heads, head_size, page_size, group, skipped;
  int32_t states;      // Inputs of layers that are kept, and
  int32_t keeps_last;  // whether the last of them is the input of `norm`.
  float embedding_scale;

  int out_columns() const { return hidden * (1 + states); }

  int queries() const { return heads * head_size; }
  int keys() const { return kv_heads * head_size; }
};

struct Step {
  const Model* model;
  const int64_t *ids, *positions;
  const int64_t* turns;  // [tokens]: the positions by which queries and keys rotate.
  const int64_t *slots[2], *tables[2];  // For layers that keep all pages, and for layers that keep a window's.
  const int32_t* query_lens;
  bf16* out;            // [T, N * (1 + kept states)], or null.
  // If `out` is null, one of the following is written for the tokens `sampled` [samples].
  const int64_t* sampled;
  int64_t* chosen;      // [samples] tokens: the likeliest, or as `draws` says; -1 if logits are not finite.
  float* logits;        // [samples, rows of the head]; working memory if there are `draws`.
  const Draw* draws;    // [samples], or null.
  const int32_t* adapters;  // [tokens]: the slot of each token's adapter, or -1. Null: no token has one.
  int64_t table_stride;
  int32_t requests, tokens, samples;

  // The length of each request, including its new tokens.
  std::vector<int32_t> seq_lens() const {
    std::vector<int32_t> lens(requests);
    for (int b = 0, last = -1; b < requests; ++b) lens[b] = static_cast<int32_t>(positions[last += query_lens[b]]) + 1;
    return lens;
  }
};

constexpr int kMostTokens = 64;

// Attention of a layer over rows [T, H + 2 K, D] of queries, keys and values, to `out` [T, H, D].
inline AttentionCall<bf16> attention_of(const Model& model, const Layer& layer, const Step& step, const int32_t* seq_lens, const bf16* qkv, bf16* out) {
  AttentionCall<bf16> call{};
  const int queries = model.queries(), keys = model.keys(), width = queries + 2 * keys;
  call.q = qkv, call.k = call.q + queries, call.v = call.k + keys, call.out = out;
  call.k_cache = layer.k_cache, call.v_cache = layer.v_cache, call.slots = step.slots[layer.table], call.table = step.tables[layer.table];
  call.query_lens = step.query_lens, call.seq_lens = seq_lens;
  call.q_stride = call.k_stride = call.v_stride = width, call.out_stride = queries, call.table_stride = step.table_stride;
  call.requests = step.requests, call.tokens = step.tokens, call.heads = model.heads, call.kv_heads = model.kv_heads;
  call.group = model.group, call.skipped = model.skipped;
  call.head_size = call.value_size = model.head_size, call.page_size = model.page_size, call.window = layer.window, call.scale = layer.scale;
  call.sinks = layer.sinks, call.softcap = layer.softcap, call.cache_kind = layer.cache_kind, call.k_scale = layer.k_scale, call.v_scale = layer.v_scale;
  return call;
}

// The rows that layers read and write.
struct StepRows {
  // `narrow_size`: the most numbers between the matrices of an adapter. `adapters`: as in `Step`.
  StepRows(int tokens, int samples, const int32_t* adapters, int narrow_size, const Model& model)
      : x(tokens, std::max({model.hidden, model.queries(), model.intermediate})),
        sampled(samples, model.hidden),
        residual(static_cast<size_t>(tokens) * model.hidden),
        normed(residual.size()) {
    if (adapters) updates = AdapterUpdates(adapters, tokens, narrow_size, std::max({model.hidden, model.queries(), model.intermediate}));
  }

  Input x, sampled;  // Of all tokens, and of those whose logits are needed.
  std::vector<bf16> residual, normed;  // [T, N]
  AdapterUpdates updates;              // Of the next products.
};

// The memory of a thread, and the rows that it works on, which threads may share.
struct StepThread {
  StepThread(const Model& model, int own_tokens, int own_samples, const int32_t* adapters, int narrow_size, StepRows& shared)
      : own(own_tokens, own_samples, adapters, narrow_size, model),
        rows(own_tokens > 0 ? own : shared),
        attention(model.head_size, model.head_size, std::max(kMostRows, model.heads), prefers_dots()),
        summand(model.hidden),
        gates(kMostTokens * kPanel),
        sums(model.member ? model.hidden : 0) {}

  int phase = 0;
  StepRows own, &rows;
  Scratch attention;
  Multiplier multiplier;
  std::vector<bf16> summand;  // [N]
  const Norm* after = nullptr;  // The norm and the factor of the previous half of a layer.
  float factor = 1.0f;
  std::vector<float> gates;  // [T, 32]
  std::vector<float> sums;   // [N], over ranks.
};

// Add row t of all ranks' slots in float32, into the thread's `summand`.
inline const bf16* sum_of_ranks(const Model& model, int t, StepThread& thread) {
  const auto row_of = [&](int rank) { return reinterpret_cast<const bf16*>(model.member->slot(rank)) + static_cast<size_t>(t) * model.hidden; };
  float* sums = thread.sums.data();
  const bf16 *first = row_of(0), *second = row_of(1);
#pragma omp simd
  for (int i = 0; i < model.hidden; ++i) sums[i] = to_float(first[i]) + to_float(second[i]);
  for (int rank = 2; rank < model.member->size; ++rank) {
    const bf16* other = row_of(rank);
#pragma omp simd
    for (int i = 0; i < model.hidden; ++i) sums[i] += to_float(other[i]);
  }
  bf16* to = thread.summand.data();
#pragma omp simd
  for (int i = 0; i < model.hidden; ++i) to[i] = rounded(sums[i]);
  return to;
}

}  // namespace piecework
