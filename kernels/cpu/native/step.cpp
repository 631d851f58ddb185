// A whole step of a decoder in bfloat16 as one call. Every value is rounded where plain torch rounds it.
//
// T tokens, N hidden size, H query heads, K key/value heads, D head size.
#include <omp.h>

#include <map>

#include "attention.h"
#include "linear.h"
#include "rows.h"
#include "team.h"

namespace piecework {
namespace {

constexpr int kMostTokens = 64;

struct Layer {
  const bf16 *input_norm, *post_norm, *q_norm, *k_norm;  // q_norm, k_norm: null where heads are not normalised
  Linear qkv, output, gate_up, down;
  void *k_cache, *v_cache;
  float scale, k_scale, v_scale;
  int32_t window;
  CacheKind cache_kind;
};

struct Model {
  const Layer* layers;
  const bf16 *embedding, *norm, *cos, *signed_sin;  // cos, signed_sin [positions, D]
  int32_t num_layers, hidden, intermediate, heads, kv_heads, head_size, page_size;
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
        team_(11 * model_.num_layers + 1),
        width_((model_.heads + 2 * model_.kv_heads) * model_.head_size),
        x_(step.tokens, std::max({model_.hidden, model_.heads * model_.head_size, model_.intermediate})) {
    const size_t tokens = step.tokens;
    residual_.resize(tokens * model_.hidden);
    added_.resize(tokens * model_.hidden);
    qkv_.resize(tokens * width_);
    attended_.resize(tokens * model_.heads * model_.head_size);
    activated_.resize(tokens * model_.intermediate);
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
      for (int i = 0; i < model_.num_layers; ++i) layer(model_.layers[i], i == 0, phase, thread);
      team_.each(phase, step_.tokens, [&](int t) {
        add(residual(t), row(added_, t, model_.hidden), model_.hidden, residual(t));
        rms_norm(residual(t), model_.norm, model_.hidden, model_.eps, step_.out + static_cast<int64_t>(t) * model_.hidden);
      });
    }
  }

 private:
  // What a thread has to itself.
  struct Thread {
    explicit Thread(const Model& model)
        : attention(model.head_size, std::max(kMostRows, model.heads / model.kv_heads)), row(model.hidden), gates(kMostTokens * kPanel) {}

    Scratch attention;
    Multiplier multiplier;
    std::vector<bf16> row;
    std::vector<float> gates;  // [T, 32]
  };

  bf16* row(std::vector<bf16>& rows, int t, int size) { return rows.data() + static_cast<size_t>(t) * size; }
  bf16* residual(int t) { return row(residual_, t, model_.hidden); }

  AttentionCall<bf16> call(const Layer& layer) {
    AttentionCall<bf16> call{};
    const int queries = model_.heads * model_.head_size, keys = model_.kv_heads * model_.head_size;
    call.q = qkv_.data(), call.k = call.q + queries, call.v = call.k + keys, call.out = attended_.data();
    call.k_cache = layer.k_cache, call.v_cache = layer.v_cache, call.slots = step_.slots, call.table = step_.table;
    call.query_lens = step_.query_lens, call.seq_lens = step_.seq_lens;
    call.q_stride = call.k_stride = call.v_stride = width_, call.out_stride = queries, call.table_stride = step_.table_stride;
    call.requests = step_.requests, call.tokens = step_.tokens, call.heads = model_.heads, call.kv_heads = model_.kv_heads;
    call.head_size = model_.head_size, call.page_size = model_.page_size, call.window = layer.window, call.scale = layer.scale;
    call.cache_kind = layer.cache_kind, call.k_scale = layer.k_scale, call.v_scale = layer.v_scale;
    return call;
  }

  void layer(const Layer& layer, bool is_first, int& phase, Thread& thread) {
    normalise(layer.input_norm, layer.qkv, is_first, phase, thread);
    multiply(layer.qkv, qkv_, phase, thread);
    attend(layer, phase, thread.attention);
    set_rows(layer.output, attended_, phase);
    multiply(layer.output, added_, phase, thread);
    normalise(layer.post_norm, layer.gate_up, false, phase, thread);
    feed_forward(layer, phase, thread);
  }

  // x = the rows that a linear takes.
  void set_rows(const Linear& linear, std::vector<bf16>& from, int& phase) {
    team_.each(phase, step_.tokens, [&](int t) { x_.set(linear, t, row(from, t, linear.columns)); });
  }

  // x = norm(residual), after what the last part of a layer gave was added, or the tokens were looked up.
  void normalise(const bf16* weight, const Linear& linear, bool is_first, int& phase, Thread& thread) {
    team_.each(phase, step_.tokens, [&](int t) {
      if (is_first)
        std::memcpy(residual(t), model_.embedding + step_.ids[t] * model_.hidden, model_.hidden * sizeof(bf16));
      else
        add(residual(t), row(added_, t, model_.hidden), model_.hidden, residual(t));
      rms_norm(residual(t), weight, model_.hidden, model_.eps, thread.row.data());
      x_.set(linear, t, thread.row.data());
    });
  }

  void multiply(const Linear& linear, std::vector<bf16>& out, int& phase, Thread& thread) {
    x_.as(linear, [&](auto rows) {
      thread.multiplier.prepare(linear, rows);
      team_.each(phase, (linear.rows + kPanel - 1) / kPanel, [&](int i) {
        thread.multiplier.panel(linear, rows, i, 0, rows.tokens, [&](int t, int n, const float* values, int count) {
          bf16* to = out.data() + static_cast<size_t>(t) * linear.rows + n;
          for (int r = 0; r < count; ++r) to[r] = rounded(values[r]);
        });
      });
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
    set_rows(layer.down, activated_, phase);
    multiply(layer.down, added_, phase, thread);
  }

  const Step& step_;
  const Model& model_;
  const int threads_;
  Team team_;
  const int width_;
  Input x_;
  std::vector<bf16> residual_, added_, qkv_, attended_, activated_;
  std::map<int32_t, std::vector<Item>> items_;
  std::vector<float> partials_;
};

}  // namespace
}  // namespace piecework

extern "C" void piecework_step(const void* step, int threads) {
  piecework::Forward(*static_cast<const piecework::Step*>(step), threads).run();
}
