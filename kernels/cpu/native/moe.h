// Experts, of which each token uses a few. Rows of x are grouped by expert, and each group is multiplied by its expert's panels, which are
// read once. Experts that no token chose are not read.
//
// T tokens, N hidden size, I columns between gate and down, k experts per token, P pairs of a token and one of its experts.
#pragma once
#include "linear.h"
#include "team.h"

namespace piecework {

struct Experts {
  // The rows of one expert after those of another: [count][gates, ups], [count][N]. Without gates there are only ups.
  Linear gate_up, down;
  int32_t count, weighs_input;
  float limit;  // Limit of gates and ups. 0: silu(gate) * up. Below 0: gelu(gate) * up. Above: GPT-OSS's (up + 1) * gate * sigmoid(1.702 * gate).
};

// How experts are chosen by a router's scores [count of all ranks].
struct Routing {
  Linear router;
  const float* correction;  // [count], added to scores for the choice only, or null.
  int32_t top_k, is_sigmoid, is_renormalized, first;  // first: the first expert of this rank.
  float scale;
};

// Choose ids and weights [top_k] by the logits of one token.
void choose(const Routing& routing, const bf16* logits, int64_t* ids, float* weights);

// The layer of one expert: `rows` panels from its first one on.
inline Linear of_expert(const Linear& all, int expert, int count) {
  Linear one = all;
  one.rows = all.rows / count;
  one.weight += static_cast<int64_t>(expert) * (one.rows / kPanel) * panel_bytes(all.format, all.columns);
  if (one.bias) one.bias += static_cast<int64_t>(expert) * one.rows;
  return one;
}

class Mixture {
 public:
  // The memory is kept for the next layer.
  static Mixture& of_this_thread() {
    static thread_local Mixture mixture;
    return mixture;
  }

  // The experts of tokens: ids [T][k], of which ids outside [0, count) belong to other ranks, and weights [T][k].
  struct Choice {
    const int64_t* ids;
    const float* weights;
    int tokens, each;
  };

  // Group pairs by expert and allocate memory. Called by one thread.
  void group(const Experts& experts, const Choice& choice);

  // The phases of one layer, which all threads of the team call. read(t) returns a row of x, write(t, first, sums, count) gets the float32
  // sums of columns from `first` on, and the thread that finishes last calls `last`.
  template <class Read, class Write, class Last>
  void run(Team& team, int& phase, const Experts& experts, const Choice& choice, Read read, Write write, Last last) {
    const int width = experts.down.columns, hidden = experts.down.rows / experts.count, panels = width / kPanel;
    const bool has_gates = experts.gate_up.rows / experts.count > width;
    const auto opened = [&](int pair) {
      const bf16* row = read(pairs_[pair] / choice.each);
      return experts.weighs_input ? weighed(row, choice.weights[pairs_[pair]], experts.gate_up.columns) : row;
    };
    const auto closed = [&](int pair) { return activated_.data() + static_cast<int64_t>(pair) * width; };
    products(team, phase, experts.gate_up, experts.count, panels, opened, [&](const Linear& linear, Own& own, const Group& group, int i) {
      const Products products = own.rows(group.size, linear.columns).products(linear, own.multiplier);
      const auto to = [&](int t) { return activated_.data() + static_cast<int64_t>(group.first + t) * width + i * kPanel; };
      const Tile first = products.panel(i);
      if (!has_gates) return first.each([&](int t, const float* values) { square(values, to(t)); });
      own.gates.assign(first.values, first.values + static_cast<size_t>(first.tokens) * kPanel);
      products.panel(panels + i).each([&](int t, const float* values) {
        activate(own.gates.data() + t * kPanel, values, experts.limit, to(t));
      });
    });
    const auto weight_of = [&](int pair) { return experts.weighs_input ? 1.0f : choice.weights[pair]; };
    products(team, phase, experts.down, experts.count, hidden / kPanel, closed, [&](const Linear& linear, Own& own, const Group& group, int i) {
      const Tile tile = own.rows(group.size, linear.columns).products(linear, own.multiplier).panel(i);
      tile.each([&](int t, const float* values) {
        std::memcpy(results_.data() + static_cast<int64_t>(group.first + t) * hidden + tile.row, values, kPanel * sizeof(float));
      });
    });
    team.each(phase, choice.tokens, [&](int t) {
      static thread_local std::vector<float> sums;
      sums.assign(hidden, 0.0f);
      for (int j = t * choice.each; j < (t + 1) * choice.each; ++j) {
        if (places_[j] < 0) continue;
        const float* from = results_.data() + static_cast<int64_t>(places_[j]) * hidden;
        const float weight = weight_of(j);
#pragma omp simd
        for (int i = 0; i < hidden; ++i) sums[i] += weight * from[i];
      }
      write(t, 0, sums.data(), hidden);
    }, last);
  }

 private:
  static constexpr int kMostRows = 240;  // Rows of a group that stay in a core's cache while panels are read.

  // Pairs [first, first + size) of one expert.
  struct Group {
    int expert, first, size;
  };

  // The memory of one thread: a group's rows in the form of the products.
  struct Own {
    Multiplier multiplier;
    Aligned<float> memory, factors, scales;
    std::vector<float> gates;

    InputRows rows(int count, int columns) {
      grow(memory, InputRows::size(count, columns));
      grow(factors, count);
      grow(scales, count * InputRows::row_input_scales(columns));
      return {count, memory.data(), factors.data(), scales.data()};
    }

    template <class Read>
    void take(const Linear& linear, const Group& group, Read read) {
      InputRows own = rows(group.size, linear.columns);
      for (int t = 0; t < group.size; ++t) own.set(linear, t, read(group.first + t));
      own.prepare(linear, multiplier);
    }
  };

  template <class Vector>
  static void grow(Vector& memory, size_t size) {
    if (memory.size() < size) memory.resize(size);
  }

  static Own& of_thread() {
    static thread_local Own own;
    return own;
  }

  // Call work(linear, own, group, i) for each of `panels` panels of every group's expert. read(pair) returns a row of x. Each thread lays
  // out the rows of the groups whose panels it takes.
  template <class Read, class Work>
  void products(Team& team, int& phase, const Linear& all, int count, int panels, Read read, Work work) {
    Own& mine = of_thread();
    int prepared = -1;
    team.each(phase, static_cast<int>(groups_.size()) * panels, [&](int item) {
      const int number = item / panels;
      const Group& group = groups_[number];
      const Linear linear = of_expert(all, group.expert, count);
      if (prepared != number) mine.take(linear, group, read);
      prepared = number;
      work(linear, mine, group, item % panels);
    });
  }

  static const bf16* weighed(const bf16* row, float weight, int size);
  static void square(const float* ups, bf16* to);
  static void activate(const float* gates, const float* ups, float limit, bf16* to);

  std::vector<int> pairs_, group_of_, places_, counts_;  // pairs_: t * k + j of each pair, by expert; places_: the position of each pair.
  std::vector<Group> groups_;
  Aligned<float> results_;       // [P][N]
  std::vector<bf16> activated_;  // [P][I]
};

}  // namespace piecework
