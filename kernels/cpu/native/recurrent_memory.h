// The working memory of a thread for prompts of layers with a recurrent state, and its matrix products. Only for recurrent_prompts.cpp, so
// that the compiler treats these functions as its own.
#pragma once
#include "attention_tiles.h"
#include "common.h"

namespace piecework {
namespace {

using tiles::power_of_two;
using tiles::round_up;

constexpr int kChunk = 32;         // Tokens.
constexpr int kWide = 2 * kLanes;  // Numbers of a state's rows that are computed together.
constexpr int kTogether = 4;       // Heads of one group that share what is computed from its keys.
constexpr float kLog2E = 1.44269504f;
static_assert(kChunk % kWide == 0);

// out [Rows][kWide] = keep * out + a b. a [Rows][count] is stored by columns, `step` apart, and b [count][kWide] has the stride `b_stride`.
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

// The working memory of one thread.
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
  Aligned<float> attends, among_keys;         // [kChunk][kChunk]: products of each key with queries, and with keys.
  Aligned<float> weights, system;             // The same with the decays of one head.
  Aligned<float> written, read;               // [kChunk][kWide]
  Aligned<float> sums, rates, grown, left;    // [kChunk]: base-2 logarithms of what remains of the chunk's first state; beta or dt.
  // If each row of a state decays separately: `sums` of each row, [numbers][kChunk]; keys [numbers][kLanes] of a block of tokens, as they
  // are at its last one; keys and queries [numbers][kChunk] of later tokens, decayed since then; what remains of a state [numbers].
  Aligned<float> row_sums, near_keys, far_keys, far_queries, lasting;
};

}  // namespace
}  // namespace piecework
