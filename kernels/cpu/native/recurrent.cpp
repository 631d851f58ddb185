// One token of each of several requests through layers with a recurrent state: the steps of kernels/recurrent_steps.py. States are read and
// written once, or twice while they are in a core's cache. Slot 0 is padding's; its state is read but not written.
#include <algorithm>

#include "recurrent.h"
#include "threads.h"

namespace piecework {
namespace {

constexpr int kBlock = 256;  // Channels of a convolution per work item.

template <class T>
void convolve(const Conv& call, int64_t token, int begin, int end) {
  const int64_t slot = call.slots[token], kept = call.columns - 1, channels = call.channels;
  T* tail = static_cast<T*>(call.states) + slot * kept * channels;
  const T* x = static_cast<const T*>(call.x) + token * call.stride;
  float* out = static_cast<float*>(call.out) + token * channels;
  for (int c = begin; c < end; ++c) out[c] = call.bias ? call.bias[c] : 0.0f;
  for (int k = 0; k < kept; ++k) {
    const T* row = tail + k * channels;
#pragma omp simd
    for (int c = begin; c < end; ++c) out[c] += to_float(row[c]) * call.weight[c * call.columns + k];
  }
#pragma omp simd
  for (int c = begin; c < end; ++c) out[c] += to_float(x[c]) * call.weight[c * call.columns + kept];
  if (slot != 0 && kept > 0) {
    for (int k = 0; k + 1 < kept; ++k) std::memcpy(tail + k * channels + begin, tail + (k + 1) * channels + begin, (end - begin) * sizeof(T));
    std::memcpy(tail + (kept - 1) * channels + begin, x + begin, (end - begin) * sizeof(T));
  }
  if (!call.silu) return;
#pragma omp simd
  for (int c = begin; c < end; ++c) out[c] = out[c] / (1.0f + exponential(-out[c]));
}

// Every thread of a team calls this.
template <class T>
void convolve_all(const Conv& call) {
  const int blocks = (call.channels + kBlock - 1) / kBlock;
#pragma omp for collapse(2) schedule(static)
  for (int64_t t = 0; t < call.tokens; ++t)
    for (int block = 0; block < blocks; ++block) convolve<T>(call, t, block * kBlock, std::min((block + 1) * kBlock, call.channels));
}

// state [size][numbers] = decay * state + (dt * x) b^T. Return its product with c.
template <class T>
void ssd(const Conv& conv, const Heads& call, int64_t token, int head) {
  const int64_t inner = static_cast<int64_t>(call.heads) * call.size, slot = conv.slots[token];
  const int n = call.numbers, group = head / (call.heads / call.groups);
  const float* rows = static_cast<const float*>(conv.out) + token * conv.channels;
  const float *x = rows + static_cast<int64_t>(head) * call.size, *b = rows + inner + static_cast<int64_t>(group) * n;
  const float* c = b + static_cast<int64_t>(call.groups) * n;
  const float dt = step_length<T>(call, token, head), decay = std::exp(dt * call.a[head]);
  float* state = call.states + (slot * call.heads + head) * call.size * n;
  float* out = static_cast<float*>(call.out) + token * inner + static_cast<int64_t>(head) * call.size;
  for (int p = 0; p < call.size; ++p, state += n) {
    const float written = dt * x[p];
    float sum = 0.0f;
    if (slot != 0) {
#pragma omp simd reduction(+ : sum)
      for (int i = 0; i < n; ++i) {
        state[i] = decay * state[i] + written * b[i];
        sum += state[i] * c[i];
      }
    } else {
#pragma omp simd reduction(+ : sum)
      for (int i = 0; i < n; ++i) sum += (decay * state[i] + written * b[i]) * c[i];
    }
    out[p] = sum + call.d[head] * x[p];
  }
}

// state [numbers][size] = decay * state + k (beta * (v - k^T state))^T. Return q^T state. `sums` is [2 * size + numbers].
template <class T>
void delta(const Conv& conv, const Heads& call, int64_t token, int head, float* sums) {
  const int64_t slot = conv.slots[token], keys = static_cast<int64_t>(call.groups) * call.numbers;
  const int size = call.size, group = head / (call.heads / call.groups);
  const float* rows = static_cast<const float*>(conv.out) + token * conv.channels;
  const float *q = rows + static_cast<int64_t>(group) * call.numbers, *k = q + keys;
  const float* v = rows + 2 * keys + static_cast<int64_t>(head) * size;
  const float to_q = 1.0f / (length(q, call.numbers) * std::sqrt(static_cast<float>(call.numbers)));
  const float to_k = 1.0f / length(k, call.numbers);
  const float beta = written_share<T>(call, token, head);
  float* state = call.states + (slot * call.heads + head) * call.numbers * size;
  float* out = static_cast<float*>(call.out) + (token * call.heads + head) * size;
  float *change = sums, *read = sums + size, *decays = read + size;
  for (int i = 0; i < call.decays; ++i) decays[i] = std::exp(log_decay<T>(call, token, head, i));
  std::fill(decays + call.decays, decays + call.numbers, decays[0]);
  for (int p = 0; p < size; ++p) change[p] = read[p] = 0.0f;
  for (int i = 0; i < call.numbers; ++i) {
    const float key = k[i] * to_k * decays[i];
    const float* row = state + static_cast<int64_t>(i) * size;
#pragma omp simd
    for (int p = 0; p < size; ++p) change[p] += key * row[p];
  }
  for (int p = 0; p < size; ++p) change[p] = beta * (v[p] - change[p]);
  for (int i = 0; i < call.numbers; ++i) {
    const float key = k[i] * to_k, query = q[i] * to_q, decay = decays[i];
    float* row = state + static_cast<int64_t>(i) * size;
    if (slot != 0) {
#pragma omp simd
      for (int p = 0; p < size; ++p) {
        row[p] = decay * row[p] + key * change[p];
        read[p] += query * row[p];
      }
    } else {
#pragma omp simd
      for (int p = 0; p < size; ++p) read[p] += query * (decay * row[p] + key * change[p]);
    }
  }
  std::memcpy(out, read, size * sizeof(float));
}

template <class T, bool kIsDelta>
void step(const Conv& conv, const Heads& call, int threads) {
  const int64_t numbers = static_cast<int64_t>(conv.tokens) * call.heads * call.size * call.numbers;
#pragma omp parallel num_threads(numbers < kAlone ? 1 : threads)
  {
    convolve_all<T>(conv);
    std::vector<float> sums(kIsDelta ? 2 * call.size + call.numbers : 0);
#pragma omp for collapse(2) schedule(static)
    for (int64_t t = 0; t < conv.tokens; ++t)
      for (int head = 0; head < call.heads; ++head) {
        if constexpr (kIsDelta)
          delta<T>(conv, call, t, head, sums.data());
        else
          ssd<T>(conv, call, t, head);
      }
  }
}

}  // namespace
}  // namespace piecework

extern "C" void piecework_conv_step(const void* conv, int is_bf16, int threads) {
  using namespace piecework;
  const Conv& call = *static_cast<const Conv*>(conv);
#pragma omp parallel num_threads(static_cast<int64_t>(call.tokens) * call.channels < kAlone ? 1 : threads)
  {
    if (is_bf16)
      convolve_all<bf16>(call);
    else
      convolve_all<float>(call);
  }
}

extern "C" void piecework_mamba2_step(const void* conv, const void* heads, int is_bf16, int threads) {
  using namespace piecework;
  (is_bf16 ? step<bf16, false> : step<float, false>)(*static_cast<const Conv*>(conv), *static_cast<const Heads*>(heads), threads);
}

extern "C" void piecework_gated_delta_step(const void* conv, const void* heads, int is_bf16, int threads) {
  using namespace piecework;
  (is_bf16 ? step<bf16, true> : step<float, true>)(*static_cast<const Conv*>(conv), *static_cast<const Heads*>(heads), threads);
}
