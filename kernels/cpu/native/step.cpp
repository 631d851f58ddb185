// A whole step of a decoder in bfloat16 as one call. Every value is rounded where plain torch rounds it.
//
// Of ranks each has some heads, columns between gate and down, and rows of the embedding. What is to be summed over them each writes to its
// slot (shared.h), and all read it while they add and normalise: a sum takes no pass of its own.
//
// T tokens, N hidden size, H query heads, K key/value heads, D head size.
#include <map>

#include "attention.h"
#include "linear.h"
#include "moe.h"
#include "rows.h"
#include "shared.h"
#include "team.h"

namespace piecework {
namespace {

constexpr int kMostTokens = 64;
constexpr int kFewTokens = 2;     // whose rows each thread computes for itself, which takes less time than waiting for another
constexpr int kItemsAThread = 6;  // at least, of a phase whose items are whole heads

struct Layer {
  const bf16 *input_norm, *post_norm, *q_norm, *k_norm;  // q_norm, k_norm: null where heads are not normalised
  Linear qkv, output, gate_up, down;
  Routing routing;
  Experts experts;  // in place of gate_up and down, where there are any
  void *k_cache, *v_cache;
  float scale, k_scale, v_scale;
  int32_t window;
  CacheKind cache_kind;
};

struct Model {
  const Layer* layers;
  const bf16 *embedding, *norm, *cos, *signed_sin;  // cos, signed_sin [positions, D]
  Member* member;                                   // among ranks, or null
  int32_t embedded;                                 // rows of the embedding that a rank has
  int32_t num_layers, hidden, intermediate, heads, kv_heads, head_size, page_size, group, skipped;
  float eps;
};

struct Step {
  const Model* model;
  const int64_t *ids, *positions, *slots, *table;
  const int32_t *query_lens, *seq_lens;
  bf16* out;  // [T, N]
  int64_t table_stride;
  int32_t requests, tokens;
};

// What the threads of a step share.
class Forward {
 public:
  Forward(const Step& step, int threads)
      : step_(step),
        model_(*step.model),
        threads_(threads),
        ranks_(model_.member),
        is_few_(!ranks_ && step.tokens <= kFewTokens),
        team_(threads),
        width_((model_.heads + 2 * model_.kv_heads) * model_.head_size),
        shared_(is_few_ ? 0 : step.tokens, model_) {
    const size_t tokens = step.tokens;
    if (ranks_)
      ranks_->enter(kDecodeStep, 0, static_cast<int64_t>(tokens) * model_.hidden);
    else
      own_.resize(tokens * model_.hidden);
    set_added();
    qkv_.resize(tokens * width_);
    attended_.resize(tokens * model_.heads * model_.head_size);
    activated_.resize(tokens * model_.intermediate);
    for (int i = 0; i < model_.num_layers; ++i) {
      const Layer& layer = model_.layers[i];
      if (layer.experts.count == 0) continue;
      logits_.resize(std::max(logits_.size(), tokens * layer.routing.router.rows));
      ids_.resize(std::max(ids_.size(), tokens * layer.routing.top_k));
    }
    weights_.resize(ids_.size());
    int64_t floats = 0;
    for (int i = 0; i < model_.num_layers; ++i) {
      const auto [place, is_new] = items_.try_emplace(model_.layers[i].window);
      if (is_new) floats = std::max(floats, make_items(call(model_.layers[i]), threads, place->second));
    }
    partials_.resize(floats);
  }

  void run() {
#pragma omp parallel num_threads(threads_)
    {
#pragma omp single
      team_.set_size(omp_get_num_threads());
      Thread thread(model_, is_few_ ? step_.tokens : 0, shared_);
      if (ranks_) look_up(thread);
      for (int i = 0; i < model_.num_layers; ++i) layer(model_.layers[i], i == 0, thread);
      wait_for_ranks();
      team_.each(thread.phase, step_.tokens, [&](int t) {
        add_to_residual(t, thread);
        rms_norm(residual(t, thread), model_.norm, model_.hidden, model_.eps, step_.out + static_cast<int64_t>(t) * model_.hidden);
      });
    }
  }

 private:
  // The rows that layers go on from.
  struct Rows {
    Rows(int tokens, const Model& model)
        : x(tokens, std::max({model.hidden, model.heads * model.head_size, model.intermediate})),
          residual(static_cast<size_t>(tokens) * model.hidden),
          normed(residual.size()) {}

    Input x;
    std::vector<bf16> residual, normed;  // [T, N]
  };

  // What a thread has to itself, and the rows that it works on, which others may share.
  struct Thread {
    Thread(const Model& model, int own_tokens, Rows& shared)
        : own(own_tokens, model),
          rows(own_tokens > 0 ? own : shared),
          attention(model.head_size, model.head_size, std::max(kMostRows, model.heads)),
          row(model.hidden),
          gates(kMostTokens * kPanel),
          sums(model.member ? model.hidden : 0) {}

    int phase = 0;
    Rows own, &rows;
    Scratch attention;
    Multiplier multiplier;
    std::vector<bf16> row;
    std::vector<float> gates;  // [T, 32]
    std::vector<float> sums;   // [N], over ranks
  };

  static bf16* row(bf16* rows, int t, int size) { return rows + static_cast<size_t>(t) * size; }
  static bf16* row(std::vector<bf16>& rows, int t, int size) { return row(rows.data(), t, size); }
  bf16* residual(int t, Thread& thread) { return row(thread.rows.residual, t, model_.hidden); }
  const bf16* row_of(int rank, int t) const {
    return reinterpret_cast<const bf16*>(ranks_->slot(rank)) + static_cast<size_t>(t) * model_.hidden;
  }

  // Where what is to be added next goes.
  void set_added() { added_ = ranks_ ? reinterpret_cast<bf16*>(ranks_->begin()) : own_.data(); }

  void post() {
    if (ranks_) ranks_->post();
  }

  // A failure is told at the end: threads stay together.
  void wait_for_ranks() {
    if (ranks_) ranks_->wait();
  }

  // work(t) for each token whose row this thread is to make; nobody goes on before all that others need are made.
  template <class Work>
  void each_row(Thread& thread, Work work) {
    if (!is_few_) return team_.each(thread.phase, step_.tokens, work);
    for (int t = 0; t < step_.tokens; ++t) work(t);
  }

  // Each rank writes the rows of its own tokens.
  void look_up(Thread& thread) {
    team_.each(
        thread.phase, step_.tokens,
        [&](int t) {
          const int64_t id = step_.ids[t] - static_cast<int64_t>(ranks_->rank) * model_.embedded;
          if (id < 0 || id >= model_.embedded) return;
          std::memcpy(row(added_, t, model_.hidden), model_.embedding + id * model_.hidden, model_.hidden * sizeof(bf16));
        },
        [&] { post(); });
  }

  const bf16* embedding_of(int t) const {
    const int64_t id = step_.ids[t];
    return ranks_ ? row_of(static_cast<int>(id / model_.embedded), t) : model_.embedding + id * model_.hidden;
  }

  void add_to_residual(int t, Thread& thread) {
    bf16* to = residual(t, thread);
    if (!ranks_) return add(to, row(added_, t, model_.hidden), model_.hidden, to);
    float* sums = thread.sums.data();
    const bf16 *first = row_of(0, t), *second = row_of(1, t);
#pragma omp simd
    for (int i = 0; i < model_.hidden; ++i) sums[i] = to_float(first[i]) + to_float(second[i]);
    for (int rank = 2; rank < ranks_->size; ++rank) {
      const bf16* other = row_of(rank, t);
#pragma omp simd
      for (int i = 0; i < model_.hidden; ++i) sums[i] += to_float(other[i]);
    }
#pragma omp simd
    for (int i = 0; i < model_.hidden; ++i) to[i] = rounded(to_float(to[i]) + as_rounded(sums[i]));
  }

  AttentionCall<bf16> call(const Layer& layer) {
    AttentionCall<bf16> call{};
    const int queries = model_.heads * model_.head_size, keys = model_.kv_heads * model_.head_size;
    call.q = qkv_.data(), call.k = call.q + queries, call.v = call.k + keys, call.out = attended_.data();
    call.k_cache = layer.k_cache, call.v_cache = layer.v_cache, call.slots = step_.slots, call.table = step_.table;
    call.query_lens = step_.query_lens, call.seq_lens = step_.seq_lens;
    call.q_stride = call.k_stride = call.v_stride = width_, call.out_stride = queries, call.table_stride = step_.table_stride;
    call.requests = step_.requests, call.tokens = step_.tokens, call.heads = model_.heads, call.kv_heads = model_.kv_heads;
    call.group = model_.group, call.skipped = model_.skipped;
    call.head_size = call.value_size = model_.head_size, call.page_size = model_.page_size, call.window = layer.window, call.scale = layer.scale;
    call.cache_kind = layer.cache_kind, call.k_scale = layer.k_scale, call.v_scale = layer.v_scale;
    return call;
  }

  void layer(const Layer& layer, bool is_first, Thread& thread) {
    normalise(layer.input_norm, layer.qkv, is_first, thread);
    project(layer, thread);
    attend(layer, thread);
    multiply_and_add(layer.output, attended_, thread);
    if (layer.experts.count > 0) return mix(layer, thread);
    normalise(layer.post_norm, layer.gate_up, false, thread);
    feed_forward(layer, thread);
  }

  // What the next norm is to add, of this rank. Rows of `from` are whole, and `added_` is where the result goes.
  void multiply_and_add(const Linear& linear, std::vector<bf16>& from, Thread& thread) {
    each_row(thread, [&](int t) { thread.rows.x.set(linear, t, row(from, t, linear.columns)); });
    multiply(linear, added_, thread, [&] { post(); });
  }

  // x = norm(residual), after what the last part of a layer gave was added, or the tokens were looked up.
  void normalise(const bf16* weight, const Linear& linear, bool is_first, Thread& thread) {
    wait_for_ranks();
    each_row(thread, [&](int t) {
      if (is_first)
        std::memcpy(residual(t, thread), embedding_of(t), model_.hidden * sizeof(bf16));
      else
        add_to_residual(t, thread);
      bf16* normed = row(thread.rows.normed, t, model_.hidden);
      rms_norm(residual(t, thread), weight, model_.hidden, model_.eps, normed);
      thread.rows.x.set(linear, t, normed);
    });
  }

  // out = the panels [first, last) of x times W^T.
  template <class Number>
  void multiply_panels(const Linear& linear, const RowsOf<Number>& x, int first, int last, bf16* out, Thread& thread) {
    for (int i = first; i < last; ++i)
      thread.multiplier.panel(linear, x, i, 0, x.tokens, [&](int t, int n, const float* values, int count) {
        bf16* to = row(out, t, linear.rows) + n;
        for (int r = 0; r < count; ++r) to[r] = rounded(values[r]);
      });
  }

  template <class Last>
  void multiply(const Linear& linear, bf16* out, Thread& thread, Last last) {
    thread.rows.x.as(linear, [&](auto x) {
      thread.multiplier.prepare(linear, x);
      const auto work = [&](int i) { multiply_panels(linear, x, i, i + 1, out, thread); };
      team_.each(thread.phase, (linear.rows + kPanel - 1) / kPanel, work, last);
    });
  }

  // Queries, keys and values: heads are turned, and keys and values stored, by who has made them where heads are whole panels and enough.
  void project(const Layer& layer, Thread& thread) {
    const AttentionCall<bf16> attention = call(layer);
    const CacheKernels<bf16> kernels = kernels_for<bf16>(layer.cache_kind);
    const int panels = model_.head_size / kPanel, queries = model_.heads, keys = model_.kv_heads, heads = queries + 2 * keys;
    if (model_.head_size % kPanel != 0 || heads < kItemsAThread * threads_) {
      multiply(layer.qkv, qkv_.data(), thread, [] {});
      return team_.each(thread.phase, step_.tokens, [&](int t) {
        for (int h = 0; h < queries + keys; ++h) turn(layer, t, h);
        kernels.store_row(attention, t);
      });
    }
    thread.rows.x.as(layer.qkv, [&](auto x) {
      thread.multiplier.prepare(layer.qkv, x);
      team_.each(thread.phase, heads, [&](int h) {
        multiply_panels(layer.qkv, x, h * panels, (h + 1) * panels, qkv_.data(), thread);
        for (int t = 0; t < step_.tokens; ++t) {
          if (h < queries + keys) turn(layer, t, h);
          if (h >= queries && h < queries + keys) kernels.store_keys(attention, t, h - queries, h - queries + 1);
          if (h >= queries + keys) kernels.store_values(attention, t, h - queries - keys, h - queries - keys + 1);
        }
      });
    });
  }

  // Normalises and turns a query or a key.
  void turn(const Layer& layer, int t, int h) {
    const int64_t place = step_.positions[t] * model_.head_size;
    bf16* head = row(qkv_, t, width_) + h * model_.head_size;
    const bf16* norm = h < model_.heads ? layer.q_norm : layer.k_norm;
    if (norm) rms_norm(head, norm, model_.head_size, model_.eps, head);
    rotate(head, model_.cos + place, model_.signed_sin + place, model_.head_size, head);
  }

  // The last to be done says where what is to be added goes: nobody reads the last sum any more.
  void attend(const Layer& layer, Thread& thread) {
    const AttentionCall<bf16> attention = call(layer);
    const std::vector<Item>& items = items_.at(layer.window);
    const CacheKernels<bf16> kernels = kernels_for<bf16>(layer.cache_kind);
    const int count = static_cast<int>(items.size());
    team_.each(thread.phase, count, [&](int i) { kernels.attend_item(attention, items[i], thread.attention, partials_.data()); },
               [&] { set_added(); });
    if (partials_.empty()) return;
    team_.each(thread.phase, count, [&](int i) {
      if (items[i].chunks > 0) merge_item(attention, items[i], thread.attention, partials_.data());
    });
  }

  // Gate and up rows of the same number are met together, so that neither is written.
  void feed_forward(const Layer& layer, Thread& thread) {
    const int panels = model_.intermediate / kPanel;
    thread.rows.x.as(layer.gate_up, [&](auto x) {
      thread.multiplier.prepare(layer.gate_up, x);
      const auto work = [&](int i) {
        thread.multiplier.panel(layer.gate_up, x, i, 0, x.tokens, [&](int t, int, const float* values, int) {
          float* gates = thread.gates.data() + t * kPanel;
#pragma omp simd
          for (int r = 0; r < kPanel; ++r) gates[r] = silu(as_rounded(values[r]));
        });
        thread.multiplier.panel(layer.gate_up, x, panels + i, 0, x.tokens, [&](int t, int, const float* values, int) {
          const float* gates = thread.gates.data() + t * kPanel;
          bf16* to = row(activated_, t, model_.intermediate) + i * kPanel;
#pragma omp simd
          for (int r = 0; r < kPanel; ++r) to[r] = rounded(gates[r] * as_rounded(values[r]));
        });
      };
      team_.each(thread.phase, panels, work, [&] { set_added(); });
    });
    multiply_and_add(layer.down, activated_, thread);
  }

  // The experts of each token instead of one layer for all.
  void mix(const Layer& layer, Thread& thread) {
    const Routing& routing = layer.routing;
    const Mixture::Choice choice{ids_.data(), weights_.data(), step_.tokens, routing.top_k};
    normalise(layer.post_norm, routing.router, false, thread);
    multiply(routing.router, logits_.data(), thread, [&] {
      for (int t = 0; t < step_.tokens; ++t)
        choose(routing, row(logits_, t, routing.router.rows), ids_.data() + t * routing.top_k, weights_.data() + t * routing.top_k);
      mixture_.group(layer.experts, choice);
      set_added();
    });
    mixture_.run(
        team_, thread.phase, layer.experts, choice, [&](int t) { return row(thread.rows.normed, t, model_.hidden); },
        [&](int t, int first, const float* sums, int count) {
          bf16* to = row(added_, t, model_.hidden) + first;
#pragma omp simd
          for (int i = 0; i < count; ++i) to[i] = rounded(sums[i]);
        },
        [&] { post(); });
  }

  const Step& step_;
  const Model& model_;
  const int threads_;
  Member* const ranks_;
  const bool is_few_;  // each thread has all rows to itself
  Team team_;
  const int width_;
  Rows shared_;
  bf16* added_ = nullptr;  // [T, N], of this rank
  std::vector<bf16> own_, qkv_, attended_, activated_;
  std::vector<bf16> logits_;    // [T, experts], of layers with experts
  std::vector<int64_t> ids_;    // [T, top_k]
  std::vector<float> weights_;  // [T, top_k]
  Mixture& mixture_ = Mixture::of_this_thread();
  std::map<int32_t, std::vector<Item>> items_;
  std::vector<float> partials_;
};

}  // namespace
}  // namespace piecework

// Whether all ranks have taken part.
extern "C" int piecework_step(const void* step, int threads) {
  const piecework::Step& given = *static_cast<const piecework::Step*>(step);
  piecework::Forward(given, threads).run();
  return !given.model->member || !given.model->member->failed();
}
