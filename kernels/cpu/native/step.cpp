// A whole step of a decoder in bfloat16 as one call. Values are rounded where plain torch rounds them.
//
// With several ranks, each has some heads, some columns between gate and down, and some rows of the embedding. Each rank writes its
// summands to its slot (shared.h), and all ranks read them while they add and normalise, so a sum needs no separate pass.
#include "step.h"

#include <functional>
#include <map>

#include "heads.h"
#include "likeliest.h"
#include "team.h"

namespace piecework {
namespace {

// What the last thread does at the end of a phase. Not a template parameter, because each phase would be compiled for each of them.
using Last = std::function<void()>;
using Done = std::function<void(int)>;
// For the same reason, what is done with a whole row is not inlined.

// Up to this number, each thread computes all rows itself, which is faster than waiting for another thread.
constexpr int kFewTokens = 2;

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
        width_(model_.queries() + 2 * model_.keys()),
        seq_lens_(step.seq_lens()),
        narrow_size_(step.adapters ? most_narrow(model_) : 0),
        shared_(is_few_ ? 0 : step.tokens, is_few_ ? 0 : step.samples, step.adapters, narrow_size_, model_),
        heads_made_(step.tokens, model_.queries()),
        heads_(model_.heads + 2 * model_.kv_heads, model_.head_size),
        likeliest_(threads, step.logits ? 0 : step.samples) {
    const size_t tokens = step.tokens;
    if (ranks_)
      ranks_->enter(kDecodeStep, 0, static_cast<int64_t>(tokens) * model_.hidden);
    else
      own_.resize(tokens * model_.hidden);
    set_added();
    qkv_.resize(tokens * width_);
    attended_.resize(tokens * model_.queries());
    activated_.resize(tokens * model_.intermediate);
    for (int i = 0; i < model_.num_layers; ++i) {
      const Layer& layer = model_.layers[i];
      if (!layer.mixes()) continue;
      logits_.resize(std::max(logits_.size(), tokens * layer.routing.router.rows));
      ids_.resize(std::max(ids_.size(), tokens * layer.routing.top_k));
    }
    weights_.resize(ids_.size());
    beside_.resize(tokens * model_.hidden);
    shared_gates_.resize(tokens);
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
      team_.set_size(omp_get_num_threads());
      StepThread thread(model_, is_few_ ? step_.tokens : 0, is_few_ ? step_.samples : 0, step_.adapters, narrow_size_, shared_);
      if (ranks_) look_up(thread);
      for (int i = 0; i < model_.num_layers; ++i) layer(model_.layers[i], i == 0, thread);
      wait_for_ranks();
      if (step_.samples > 0)
        compute_logits(thread);
      else
        team_.each(thread.phase, step_.tokens, [&](int t) {
          add_to_residual(t, thread);
          bf16* out = row(step_.out, t, model_.out_columns());
          model_.norm.apply(residual(t, thread), model_.hidden, out);
          if (model_.keeps_last) std::memcpy(out + model_.states * model_.hidden, residual(t, thread), model_.hidden * sizeof(bf16));
        });
    }
  }

 private:
  static bf16* row(bf16* rows, int t, int size) { return rows + static_cast<size_t>(t) * size; }
  static bf16* row(std::vector<bf16>& rows, int t, int size) { return row(rows.data(), t, size); }
  bf16* residual(int t, StepThread& thread) { return row(thread.rows.residual, t, model_.hidden); }
  const bf16* row_of(int rank, int t) const {
    return reinterpret_cast<const bf16*>(ranks_->slot(rank)) + static_cast<size_t>(t) * model_.hidden;
  }

  // Set where the next summands are written.
  void set_added() { added_ = ranks_ ? reinterpret_cast<bf16*>(ranks_->begin()) : own_.data(); }

  void post() {
    if (ranks_) ranks_->post();
  }

  // A failure is reported at the end, so that threads stay together.
  void wait_for_ranks() {
    if (ranks_) ranks_->wait();
  }

  // Call work(t) for each row of this thread. No thread continues before all rows that others need are done.
  template <class Work>
  void each_row(StepThread& thread, int count, Work work) {
    if (!is_few_) return team_.each(thread.phase, count, work);
    for (int t = 0; t < count; ++t) work(t);
  }

  // Each rank writes the rows of its own tokens.
  void look_up(StepThread& thread) {
    team_.each(
        thread.phase, step_.tokens,
        [&](int t) {
          const int64_t id = step_.ids[t] - static_cast<int64_t>(ranks_->rank) * model_.embedding.rows;
          if (id >= 0 && id < model_.embedding.rows) embed(model_.embedding, id, row(added_, t, model_.hidden));
        },
        [&] { post(); });
  }

  void embedding_of(int t, bf16* to) const {
    const int64_t id = step_.ids[t];
    if (!ranks_) return embed(model_.embedding, id, to);
    std::memcpy(to, row_of(static_cast<int>(id / model_.embedding.rows), t), model_.hidden * sizeof(bf16));
  }

  // The result of the previous half of a layer.
  const bf16* added(int t, StepThread& thread) {
    return ranks_ ? sum_of_ranks(model_, t, thread) : row(added_, t, model_.hidden);
  }

  __attribute__((noinline)) void add_to_residual(int t, StepThread& thread) {
    const bf16* from = added(t, thread);
    bf16* summand = thread.summand.data();
    if (thread.after->weight) thread.after->apply(from, model_.hidden, summand), from = summand;
    if (thread.factor != 1.0f) scale(from, thread.factor, model_.hidden, summand), from = summand;
    add(residual(t, thread), from, model_.hidden, residual(t, thread));
  }

  AttentionCall<bf16> call(const Layer& layer) { return attention_of(model_, layer, step_, seq_lens_.data(), qkv_.data(), attended_.data()); }

  void layer(const Layer& layer, bool is_first, StepThread& thread) {
    normalise(layer.before_attention, layer.qkv, is_first, thread, layer.kept);
    project(layer, thread);
    attend(layer, thread);
    if (lays_out_heads(layer)) {
      if (adapts(layer.output)) each_row(thread, step_.tokens, [&](int t) { keep(layer.output, t, row(attended_, t, model_.queries()), thread); });
      multiply(layer.output, heads_made_, added_, thread, [&] { post(); });
    } else {
      multiply_rows(layer.output, attended_, added_, thread, [&] { post(); });
    }
    thread.after = &layer.after_attention, thread.factor = layer.multiplier;
    normalise(layer.before_feed_forward, layer.mixes() ? layer.routing.router : layer.dense.gate_up, false, thread);
    if (layer.mixes()) {
      mix(layer, thread);
    } else {
      open(layer.dense, thread, [&] { set_added(); });
      multiply_rows(layer.dense.down, activated_, added_, thread, [&] { post(); });
    }
    thread.after = &layer.after_feed_forward;
  }

  // x = norm(residual), after the result of the previous half was added, or the tokens were looked up.
  // `kept`: see `Layer`.
  void normalise(const Norm& norm, const Linear& linear, bool is_first, StepThread& thread, int kept = 0) {
    wait_for_ranks();
    // If each thread has all rows, one of them writes.
    const bool keeps = kept > 0 && step_.out && (!is_few_ || omp_get_thread_num() == 0);
    each_row(thread, step_.tokens, [&](int t) {
      if (is_first) {
        embedding_of(t, residual(t, thread));
        scale(residual(t, thread), model_.embedding_scale, model_.hidden, residual(t, thread));
      } else {
        add_to_residual(t, thread);
      }
      if (keeps) std::memcpy(row(step_.out, t, model_.out_columns()) + kept * model_.hidden, residual(t, thread), model_.hidden * sizeof(bf16));
      const bf16* normed = normalised(norm, t, thread);
      thread.rows.x.set(linear, t, normed);
      keep(linear, t, normed, thread);
    });
  }

  bool adapts(const Linear& linear) const { return step_.adapters && linear.adapters; }

  // Keep an input of a linear for the updates of adapters.
  void keep(const Linear& linear, int t, const bf16* x, StepThread& thread) const {
    if (adapts(linear) && step_.adapters[t] >= 0) thread.rows.updates.set(*linear.adapters, t, x);
  }

  // Prepare the updates for the products with a linear, of which all inputs are kept.
  void shrink(const Linear& linear, StepThread& thread) {
    if (!adapts(linear)) return;
    const auto work = [&](int i) { thread.rows.updates.shrink(*linear.adapters, i); };
    each_row(thread, thread.rows.updates.shrinks(*linear.adapters), work);
  }

  // Panel i of the products with a linear, updated.
  Tile updated_panel(const Linear& linear, const Products& products, int i, const StepThread& thread) const {
    if (!adapts(linear)) return products.panel(i);
    thread.rows.updates.fetch(*linear.adapters, i * kPanel);
    const Tile tile = products.panel(i);
    thread.rows.updates.expand(*linear.adapters, tile.row, tile.values);
    return tile;
  }

  // The most numbers between the matrices of the adapters of a linear.
  static int most_narrow(const Model& model) {
    int most = 0;
    for (int i = 0; i < model.num_layers; ++i) {
      const Layer& layer = model.layers[i];
      for (const Linear* linear : {&layer.qkv, &layer.output, &layer.dense.gate_up, &layer.dense.down, &layer.shared.gate_up, &layer.shared.down, &layer.shared_gate})
        if (linear->adapters) most = std::max(most, linear->adapters->narrow_size());
    }
    return most;
  }

  __attribute__((noinline)) const bf16* normalised(const Norm& norm, int t, StepThread& thread) {
    bf16* normed = row(thread.rows.normed, t, model_.hidden);
    if (norm.weight)
      norm.apply(residual(t, thread), model_.hidden, normed);
    else
      std::memcpy(normed, residual(t, thread), model_.hidden * sizeof(bf16));
    return normed;
  }

  // out = rows [T, columns] times W^T.
  void multiply_rows(const Linear& linear, std::vector<bf16>& from, bf16* out, StepThread& thread, const Last& last) {
    each_row(thread, step_.tokens, [&](int t) {
      thread.rows.x.set(linear, t, row(from, t, linear.columns));
      keep(linear, t, row(from, t, linear.columns), thread);
    });
    multiply(linear, thread.rows.x, out, thread, last);
  }

  // `done(i)`, if given, is called after panel i.
  void multiply(const Linear& linear, const Input& rows, bf16* out, StepThread& thread, const Last& last, const Done& done = {}) {
    shrink(linear, thread);
    rows.prepare(linear, thread.multiplier);
    const Products products = rows.products(linear, thread.multiplier);
    const auto work = [&](int i) {
      const Tile tile = updated_panel(linear, products, i, thread);
      tile.each([&](int t, const float* values) {
        bf16* to = row(out, t, linear.rows) + tile.row;
        for (int r = 0; r < tile.count; ++r) to[r] = rounded(values[r]);
      });
      if (done) done(i);
    };
    team_.each(thread.phase, (linear.rows + kPanel - 1) / kPanel, work, std::cref(last));
  }

  // Compute queries, keys and values. The thread that makes the last panel of a head rotates it and stores it in the cache. Work by whole
  // heads takes longer on two threads.
  void project(const Layer& layer, StepThread& thread) {
    const AttentionCall<bf16> attention = call(layer);
    const CacheKernels<bf16> kernels = kernels_for<bf16>(layer.cache_kind);
    const auto finish = [&](int h) {
      const int key = h - model_.heads, value = key - model_.kv_heads;
      for (int t = 0; t < step_.tokens; ++t) {
        if (value < 0) turn(layer, t, h);
        if (value >= 0)
          kernels.store_values(attention, t, value, value + 1);
        else if (key >= 0)
          kernels.store_keys(attention, t, key, key + 1);
      }
    };
    if (layer.q_norm.weight && layer.q_norm.spans_heads) {
      multiply(layer.qkv, thread.rows.x, qkv_.data(), thread, [] {});
      return team_.each(thread.phase, step_.tokens, [&](int t) {
        bf16 *q = row(qkv_, t, width_), *k = q + model_.queries();
        layer.q_norm.apply(q, model_.queries(), q), layer.k_norm.apply(k, model_.keys(), k);
        for (int h = 0; h < model_.heads + model_.kv_heads; ++h) turn(layer, t, h);
        kernels.store_row(attention, t);
      });
    }
    multiply(layer.qkv, thread.rows.x, qkv_.data(), thread, [] {}, [&](int panel) { heads_.meet(panel, finish); });
  }

  // Normalise and rotate a query or a key.
  __attribute__((noinline)) void turn(const Layer& layer, int t, int h) {
    const int64_t place = step_.turns[t] * layer.turned;
    bf16* head = row(qkv_, t, width_) + h * model_.head_size;
    const Norm& norm = h < model_.heads ? layer.q_norm : layer.k_norm;
    if (norm.weight && !norm.spans_heads) norm.apply(head, model_.head_size, head);
    if (layer.is_interleaved) side_by_side(head, layer.turned);
    if (layer.turned > 0) rotate(head, layer.cos + place, layer.signed_sin + place, layer.turned, head);
  }

  // The last thread sets where the next summands go, because no thread reads the previous sum any more.
  void attend(const Layer& layer, StepThread& thread) {
    const AttentionCall<bf16> attention = call(layer);
    const std::vector<Item>& items = items_.at(layer.window);
    const CacheKernels<bf16> kernels = kernels_for<bf16>(layer.cache_kind);
    const int count = static_cast<int>(items.size());
    const bool lays_out = lays_out_heads(layer);
    const auto lay_out = [&](const Item& item) {
      const int last_head = item.kv_head + item.heads - 1, first = attention.first_head(item.kv_head) * model_.head_size;
      const int size = (attention.first_head(last_head) + attention.heads_of(last_head)) * model_.head_size - first;
      heads_made_.set_parts(layer.output, item.row, item.row + item.last - item.first, first, attended_.data(), size);
    };
    const auto work = [&](int i) {
      kernels.attend_item(attention, items[i], i + 1 < count ? &items[i + 1] : nullptr, thread.attention, partials_.data());
      if (lays_out && items[i].partial < 0) lay_out(items[i]);
    };
    team_.each(thread.phase, count, work, [&] { set_added(); });
    if (partials_.empty()) return;
    team_.each(thread.phase, count, [&](int i) {
      if (items[i].chunks == 0) return;
      merge_item(attention, items[i], thread.attention, partials_.data());
      if (lays_out) lay_out(items[i]);
    });
  }

  // Whether the thread that computed a head may lay out its result alone, which saves a wait.
  bool lays_out_heads(const Layer& layer) const { return model_.head_size % kPanel == 0 && heads_made_.takes_parts(layer.output); }

  // Gate and up rows of the same number are computed together, so that neither is stored.
  void open(const FeedForward& layer, StepThread& thread, const Last& last) {
    const int panels = layer.width() / kPanel;
    shrink(layer.gate_up, thread);
    thread.rows.x.prepare(layer.gate_up, thread.multiplier);
    const Products products = thread.rows.x.products(layer.gate_up, thread.multiplier);
    const auto work = [&](int i) {
      updated_panel(layer.gate_up, products, i, thread).each([&](int t, const float* values) {
        float* gates = thread.gates.data() + t * kPanel;
        if (layer.activation == kGeluTanh) {
#pragma omp simd
          for (int r = 0; r < kPanel; ++r) gates[r] = gelu_tanh(as_rounded(values[r]));
        } else {
#pragma omp simd
          for (int r = 0; r < kPanel; ++r) gates[r] = silu(as_rounded(values[r]));
        }
      });
      updated_panel(layer.gate_up, products, panels + i, thread).each([&](int t, const float* values) {
        const float* gates = thread.gates.data() + t * kPanel;
        bf16* to = row(activated_, t, layer.width()) + i * kPanel;
#pragma omp simd
        for (int r = 0; r < kPanel; ++r) to[r] = rounded(gates[r] * as_rounded(values[r]));
      });
    };
    team_.each(thread.phase, panels, work, std::cref(last));
  }

  // The experts of each token instead of one layer for all, and the part that all tokens use.
  void mix(const Layer& layer, StepThread& thread) {
    const Routing& routing = layer.routing;
    const Mixture::Choice choice{ids_.data(), weights_.data(), step_.tokens, routing.top_k};
    multiply(routing.router, thread.rows.x, logits_.data(), thread, [&] {
      for (int t = 0; t < step_.tokens; ++t)
        choose(routing, row(logits_, t, routing.router.rows), ids_.data() + t * routing.top_k, weights_.data() + t * routing.top_k);
      mixture_.group(layer.experts, choice);
      set_added();
    });
    const bool shares = layer.shared.gate_up.rows > 0, is_gated = layer.shared_gate.rows > 0;
    if (is_gated) multiply_rows(layer.shared_gate, thread.rows.normed, shared_gates_.data(), thread, [] {});
    if (shares) {
      each_row(thread, step_.tokens, [&](int t) {
        const bf16* normed = row(thread.rows.normed, t, model_.hidden);
        thread.rows.x.set(layer.shared.gate_up, t, normed);
        keep(layer.shared.gate_up, t, normed, thread);
      });
      open(layer.shared, thread, [] {});
      multiply_rows(layer.shared.down, activated_, beside_.data(), thread, [] {});
    }
    mixture_.run(
        team_, thread.phase, layer.experts, choice, [&](int t) { return row(thread.rows.normed, t, model_.hidden); },
        [&](int t, int first, const float* sums, int count) {
          bf16* to = row(added_, t, model_.hidden) + first;
          if (!shares) {
#pragma omp simd
            for (int i = 0; i < count; ++i) to[i] = rounded(sums[i]);
            return;
          }
          const bf16* other = row(beside_, t, model_.hidden) + first;
          const float factor = is_gated ? sigmoid(to_float(shared_gates_[t])) : 1.0f;
#pragma omp simd
          for (int i = 0; i < count; ++i) to[i] = rounded(as_rounded(sums[i]) + as_rounded(to_float(other[i]) * factor));
        },
        [&] { post(); });
  }

  // Panel by panel. If only the likeliest tokens are needed, no logits are stored.
  void compute_logits(StepThread& thread) {
    const Linear& head = model_.head;
    each_row(thread, step_.samples, [&](int n) {
      const int t = static_cast<int>(step_.sampled[n]);
      add_to_residual(t, thread);
      thread.rows.sampled.set(head, n, normalised(model_.norm, t, thread));
    });
    const int me = omp_get_thread_num();
    thread.rows.sampled.prepare(head, thread.multiplier);
    const Products products = thread.rows.sampled.products(head, thread.multiplier);
    const auto work = [&](int i) {
      const Tile tile = products.panel(i);
      tile.each([&](int n, const float* values) {
        if (!step_.logits) return likeliest_.meet(me, n, tile.row, values, tile.count);
        float* to = step_.logits + static_cast<size_t>(n) * head.rows + tile.row;
#pragma omp simd
        for (int i = 0; i < tile.count; ++i) to[i] = as_rounded(values[i]);
      });
    };
    team_.each(thread.phase, (head.rows + kPanel - 1) / kPanel, work, [&] {
      if (step_.logits) return;
      for (int n = 0; n < step_.samples; ++n) step_.chosen[n] = likeliest_.token(n);
    });
    if (!step_.draws) return;
    team_.each(thread.phase, step_.samples, [&](int n) {
      float* logits = step_.logits + static_cast<size_t>(n) * head.rows;
      // The position of the token to choose.
      const int64_t position = step_.positions[step_.sampled[n]] + 1;
      step_.chosen[n] = choose_token(logits, head.rows, step_.draws[n], position);
    });
  }

  const Step& step_;
  const Model& model_;
  const int threads_;
  Member* const ranks_;
  const bool is_few_;  // Each thread has all rows itself.
  Team team_;
  const int width_;
  const std::vector<int32_t> seq_lens_;
  const int narrow_size_;
  StepRows shared_;
  Input heads_made_;  // The result of attention, if the thread that made a head lays it out.
  Heads heads_;
  Likeliest likeliest_;
  bf16* added_ = nullptr;  // [T, N], of this rank.
  std::vector<bf16> own_, qkv_, attended_, activated_;
  std::vector<bf16> logits_;    // [T, experts], for layers with experts.
  std::vector<bf16> beside_;    // [T, N], of the part that all tokens use.
  std::vector<bf16> shared_gates_;  // [T]
  std::vector<int64_t> ids_;    // [T, top_k]
  std::vector<float> weights_;  // [T, top_k]
  Mixture& mixture_ = Mixture::of_this_thread();
  std::map<int32_t, std::vector<Item>> items_;
  std::vector<float> partials_;
};

}  // namespace
}  // namespace piecework

// Return whether all ranks have taken part.
extern "C" int piecework_step(const void* step, int threads) {
  const piecework::Step& given = *static_cast<const piecework::Step*>(step);
  piecework::Forward(given, threads).run();
  return !given.model->member || !given.model->member->failed();
}
