// The arguments and states of layers with a recurrent state, for decodes (recurrent.cpp) and prompts (recurrent_prompts.cpp).
#pragma once
#include <cmath>
#include <vector>

#include "common.h"

namespace piecework {

constexpr int64_t kAlone = 1 << 13;  // Numbers that take as long as waking another thread.

struct Conv {
  const void* x;        // [tokens], `stride` apart, of `channels` each.
  void* states;         // [slots][columns - 1][channels], of the type of x.
  const float* weight;  // [channels][columns]
  const float* bias;    // [channels] or null
  const int64_t* slots;  // Decodes: [tokens]; prompts: one each.
  void* out;             // Decodes: float32 [tokens][channels]; convolutions of prompts: the type of x.
  int64_t stride;
  int32_t tokens, channels, columns, silu;
};

struct Heads {
  float* states;                     // [slots][heads][..][..]
  const void *first, *second;        // [tokens], `stride` apart: dt, one number per head; b, and a with `decays` numbers per head.
  const float *a, *d, *dt_bias;      // [heads]; dt_bias of a gated delta rule is [heads][decays].
  void* out;                         // [tokens][heads][size]: float32 for decodes, the type of x for prompts.
  int64_t first_stride, second_stride;
  int32_t heads, groups, size, numbers;
  int32_t decays;  // For a gated delta rule, 1 or `numbers`.
  float least_dt, most_dt, most_written;
};

// Prompts of a step: their first tokens, their lengths, and room for the results of the convolution: [capacity][channels].
struct Prompts {
  const int64_t *begins, *lens;
  float* room;
  int32_t count, capacity;
};

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

template <class T>
float number(const void* rows, int64_t stride, int64_t token, int head) {
  return to_float(static_cast<const T*>(rows)[token * stride + head]);
}

// dt of a head of Mamba 2.
template <class T>
float step_length(const Heads& call, int64_t token, int head) {
  const float raw = softplus(number<T>(call.first, call.first_stride, token, head) + call.dt_bias[head]);
  return std::min(std::max(raw, call.least_dt), call.most_dt);
}

// How much a token of the gated delta rule writes, and the logarithm of what remains of the state.
template <class T>
float written_share(const Heads& call, int64_t token, int head) {
  return call.most_written / (1.0f + std::exp(-number<T>(call.first, call.first_stride, token, head)));
}

template <class T>
float log_decay(const Heads& call, int64_t token, int head, int row = 0) {
  const int place = head * call.decays + row;
  return call.a[head] * softplus(number<T>(call.second, call.second_stride, token, place) + call.dt_bias[place]);
}

inline float length(const float* x, int size) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int i = 0; i < size; ++i) sum += x[i] * x[i];
  return std::sqrt(sum + 1e-6f);
}

}  // namespace piecework
