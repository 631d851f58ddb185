// A whole step of a decoder in bfloat16 as one call. Every value is rounded where plain torch rounds it.
//
// Of ranks each has some heads, columns between gate and down, and rows of the embedding. What is to be summed over them each writes to its
// slot (shared.h), and all read it while they add and normalise: a sum takes no pass of its own.
//
// T tokens, N hidden size, H query heads, K key/value heads, D head size.
#include <omp.h>

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
        team_(threads),
        width_((model_.heads + 2 * model_.kv_heads) * model_.head_size),
        x_(step.tokens, std::max({model_.hidden, model_.heads * model_.head_size, model_.intermediate})) {
    const size_t tokens = step.tokens;
    residual_.resize(tokens * model_.hidden);
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
      normed_.resize(tokens * model_.hidden);
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
      int phase = 0;
      Thread thread(model_);
      if (ranks_) look_up(phase);
      for (int i = 0; i < model_.num_layers; ++i) layer(model_.layers[i], i == 0, phase, thread);
      wait_for_ranks();
      team_.each(phase, step_.tokens, [&](int t) {
        add_to_residual(t, thread);
        rms_norm(residual(t), model_.norm, model_.hidden, model_.eps, step_.out + static_cast<int64_t>(t) * model_.hidden);
      });
    }
  }

 private:
  // What a thread has to itself.
  struct Thread {
    explicit Thread(const Model& model)
        : attention(model.head_size, model.head_size, std::max(kMostRows, model.heads)),
          row(model.hidden),
          gates(kMostTokens * kPanel),
          sums(model.member ? model.hidden : 0) {}

    Scratch attention;
    Multiplier multiplier;
    std::vector<bf16> row;
    std::vector<float> gates;  // [T, 32]
    std::vector<float> sums;   // [N], over ranks
  };

  static bf16* row(bf16* rows, int t, int size) { return rows + static_cast<size_t>(t) * size; }
  static bf16* row(std::vector<bf16>& rows, int t, int size) { return row(rows.data(), t, size); }
  bf16* residual(int t) { return row(residual_, t, model_.hidden); }
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

  // Each rank writes the rows of its own tokens.
  void look_up(int& phase) {
    team_.each(
        phase, step_.tokens,
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
    bf16* to = residual(t);
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

  void layer(const Layer& layer, bool is_first, int& phase, Thread& thread) {
    normalise(layer.input_norm, layer.qkv, is_first, phase, thread);
    multiply(layer.qkv, qkv_.data(), phase, thread, [] {});
    attend(layer, phase, thread.attention);
    multiply_and_add(layer.output, attended_, phase, thread);
    if (layer.experts.count > 0) return mix(layer, phase, thread);
    normalise(layer.post_norm, layer.gate_up, false, phase, thread);
    feed_forward(layer, phase, thread);
  }

  // What the next norm is to add, of this rank.
  void multiply_and_add(const Linear& linear, std::vector<bf16>& from, int& phase, Thread& thread) {
    team_.each(phase, step_.tokens, [&](int t) { x_.set(linear, t, row(from, t, linear.columns)); }, [&] { set_added(); });
    multiply(linear, added_, phase, thread, [&] { post(); });
  }

  // x = norm(residual), after what the last part of a layer gave was added, or the tokens were looked up. `keeps`: rows of it, too.
  void normalise(const bf16* weight, const Linear& linear, bool is_first, int& phase, Thread& thread, bool keeps = false) {
    wait_for_ranks();
    team_.each(phase, step_.tokens, [&](int t) {
      if (is_first)
        std::memcpy(residual(t), embedding_of(t), model_.hidden * sizeof(bf16));
      else
        add_to_residual(t, thread);
      bf16* normed = keeps ? row(normed_, t, model_.hidden) : thread.row.data();
      rms_norm(residual(t), weight, model_.hidden, model_.eps, normed);
      x_.set(linear, t, normed);
    });
  }

  template <class Last>
  void multiply(const Linear& linear, bf16* out, int& phase, Thread& thread, Last last) {
    x_.as(linear, [&](auto rows) {
      thread.multiplier.prepare(linear, rows);
      const auto work = [&](int i) {
        thread.multiplier.panel(linear, rows, i, 0, rows.tokens, [&](int t, int n, const float* values, int count) {
          bf16* to = row(out, t, linear.rows) + n;
          for (int r = 0; r < count; ++r) to[r] = rounded(values[r]);
        });
      };
      team_.each(phase, (linear.rows + kPanel - 1) / kPanel, work, last);
    });
  }

  void attend(const Layer& layer, int& phase, Scratch& scratch) {
    const AttentionCall<bf16> attention = call(layer);
    const std::vector<Item>& items = items_.at(layer.window);
    const CacheKernels<bf16> kernels = kernels_for<bf16>(layer.cache_kind);
    team_.each(phase, step_.tokens, [&](int t) {
      bf16* heads = row(qkv_, t, width_);
      const int64_t place = step_.positions[t] * model_.head_size;
      for (int h = 0; h < model_.heads + model_.kv_heads; ++h) {
        bf16* head = heads + h * model_.head_size;
        const bf16* norm = h < model_.heads ? layer.q_norm : layer.k_norm;
        if (norm) rms_norm(head, norm, model_.head_size, model_.eps, head);
        rotate(head, model_.cos + place, model_.signed_sin + place, model_.head_size, head);
      }
      kernels.store_row(attention, t);
    });
    team_.each(phase, static_cast<int>(items.size()), [&](int i) { kernels.attend_item(attention, items[i], scratch, partials_.data()); });
    team_.each(phase, partials_.empty() ? 0 : static_cast<int>(items.size()), [&](int i) {
      if (items[i].chunks > 0) merge_item(attention, items[i], scratch, partials_.data());
    });
  }

  // Gate and up rows of the same number are met together, so that neither is written.
  void feed_forward(const Layer& layer, int& phase, Thread& thread) {
    const int panels = model_.intermediate / kPanel;
    x_.as(layer.gate_up, [&](auto x) {
      thread.multiplier.prepare(layer.gate_up, x);
      team_.each(phase, panels, [&](int i) {
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
      });
    });
    multiply_and_add(layer.down, activated_, phase, thread);
  }

  // The experts of each token instead of one layer for all.
  void mix(const Layer& layer, int& phase, Thread& thread) {
    const Routing& routing = layer.routing;
    const Mixture::Choice choice{ids_.data(), weights_.data(), step_.tokens, routing.top_k};
    normalise(layer.post_norm, routing.router, false, phase, thread, true);
    multiply(routing.router, logits_.data(), phase, thread, [&] {
      for (int t = 0; t < step_.tokens; ++t)
        choose(routing, row(logits_, t, routing.router.rows), ids_.data() + t * routing.top_k, weights_.data() + t * routing.top_k);
      mixture_.group(layer.experts, choice);
      set_added();
    });
    mixture_.run(
        team_, phase, thread.multiplier, layer.experts, choice, [&](int t) { return row(normed_, t, model_.hidden); },
        [&](int t, const float* sums) {
          bf16* to = row(added_, t, model_.hidden);
#pragma omp simd
          for (int i = 0; i < model_.hidden; ++i) to[i] = rounded(sums[i]);
        },
        [&] { post(); });
  }

  const Step& step_;
  const Model& model_;
  const int threads_;
  Member* const ranks_;
  Team team_;
  const int width_;
  Input x_;
  bf16* added_ = nullptr;  // [T, N], of this rank
  std::vector<bf16> residual_, own_, qkv_, attended_, activated_;
  std::vector<bf16> logits_, normed_;  // of layers with experts: [T, experts], [T, N]
  std::vector<int64_t> ids_;           // [T, top_k]
  std::vector<float> weights_;         // [T, top_k]
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
