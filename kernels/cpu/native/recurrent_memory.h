// What a thread works with while prompts go through layers with a recurrent state, and its products of matrices.
// For recurrent_prompts.cpp alone, whose own functions these are to the compiler.
#pragma once
#include "attention_tiles.h"
#include "common.h"

namespace piecework {
namespace {

using tiles::power_of_two;
using tiles::round_up;

constexpr int kChunk = 32;         // tokens
constexpr int kWide = 2 * kLanes;  // numbers of a state's rows that are computed together
constexpr int kTogether = 4;       // heads of one group that share what is made of its keys
constexpr float kLog2E = 1.44269504f;
static_assert(kChunk % kWide == 0);

// out [Rows][kWide] = keep * out + a b, where a [Rows][count] lies column after column, `step` apart, and b [count][kWide] `b_stride` apart.
template <int Rows>
void multiply_rows(const float* a, int64_t step, const float* b, int64_t b_stride, int count, float keep, float* out, int64_t stride) {
  floats sums[Rows][2];
  unrolled<Rows>([&](auto r) {
    if (keep == 0.0f) {
      sums[r][0] = sums[r][1] = floats{};
    } else {
      sums[r][0] = load<floats>(out + r * stride) * keep;
      sums[r][1] = load<floats>(out + r * stride + kLanes) * keep;
    }
  });
  for (int k = 0; k < count; ++k, a += step, b += b_stride) {
    const floats first = load<floats>(b), second = load<floats>(b + kLanes);
    unrolled<Rows>([&](auto r) {
      const floats x = splat(a[r]);
      sums[r][0] += x * first;
      sums[r][1] += x * second;
    });
  }
  unrolled<Rows>([&](auto r) {
    store(out + r * stride, sums[r][0]);
    store(out + r * stride + kLanes, sums[r][1]);
  });
}

void multiply(int rows, const float* a, int64_t step, const float* b, int64_t b_stride, int count, float keep, float* out, int64_t stride) {
  with_constant<kBlockRows>(rows, [&](auto number) { multiply_rows<number>(a, step, b, b_stride, count, keep, out, stride); });
}

// One thread's working memory.
struct Memory {
  Memory(int numbers, int size, bool is_delta, bool by_rows)
      : panels((size + kWide - 1) / kWide),
        of_state(static_cast<int64_t>(panels) * numbers * kWide),
        states(kTogether * of_state),
        keys(kChunk * numbers),
        key_columns(kChunk * numbers),
        query_columns(kChunk * numbers),
        attends(kChunk * kChunk),
        among_keys(is_delta ? kChunk * kChunk : 0),
        weights(kChunk * kChunk),
        system(is_delta ? kChunk * kChunk : 0),
        written(kChunk * kWide),
        read(kChunk * kWide),
        sums(kChunk),
        rates(kChunk),
        grown(kChunk),
        left(kChunk),
        row_sums(by_rows ? kChunk * numbers : 0),
        near_keys(by_rows ? kLanes * numbers : 0),
        far_keys(by_rows ? kChunk * numbers : 0),
        far_queries(by_rows ? kChunk * numbers : 0),
        lasting(by_rows ? numbers : 0) {}

  int panels;
  int64_t of_state;
  Aligned<float> states;                      // [kTogether][panels][numbers][kWide]
  Aligned<float> keys;                        // [kChunk][numbers]
  Aligned<float> key_columns, query_columns;  // [numbers][kChunk]
  Aligned<float> attends, among_keys;         // [kChunk][kChunk]: of each key, the products with queries, and keys
  Aligned<float> weights, system;             // the same with decays, of one head
  Aligned<float> written, read;               // [kChunk][kWide]
  Aligned<float> sums, rates, grown, left;    // [kChunk]: logarithms (base 2) of what is left of the chunk's first; beta or dt
  // Where each row of a state decays on its own: `sums` of each, [numbers][kChunk]; keys [numbers][kLanes] of a block of tokens as they are at
  // its last one, keys and queries [numbers][kChunk] of later ones decayed since then; what is left of a state [numbers].
  Aligned<float> row_sums, near_keys, far_keys, far_queries, lasting;
};

}  // namespace
}  // namespace piecework
