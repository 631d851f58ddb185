// The selective scan of kernels/recurrent.py, token by token. Channels and their numbers are vectors, and the states of a block stay in a
// core's cache. Slot 0 is padding's; its state is read but not written.
#include "recurrent.h"
#include "threads.h"

namespace piecework {
namespace {

constexpr int kBlock = 64;  // Channels per work item.

struct Scan {
  float* states;                     // [slots][channels][numbers]
  const void *x, *dt, *b, *c;        // [tokens], with strides: `channels` numbers each, and groups times numbers.
  const float *a, *d, *dt_bias;      // [channels][numbers] and [channels]
  void* out;                         // [tokens][channels]: float32 for decodes, the type of x for prompts.
  const int64_t *slots, *begins, *lens;  // Per request. begins and lens are null for decodes, which have one token per request.
  int64_t x_stride, dt_stride, b_stride, c_stride;
  int32_t count, channels, groups, numbers;
};

template <class T>
const T* row(const void* rows, int64_t stride, int64_t token) {
  return static_cast<const T*>(rows) + token * stride;
}

// Channels [begin, end) of a request, all of one group. `memory` holds their states, and b and c.
template <class T, class Out>
void scan(const Scan& call, int request, int begin, int end, std::vector<float>& memory) {
  const int n = call.numbers, group = begin / (call.channels / call.groups);
  float* kept = call.states + (call.slots[request] * call.channels + begin) * n;
  memory.resize(static_cast<size_t>(kBlock + 2) * n);
  float *states = memory.data(), *b = states + static_cast<int64_t>(kBlock) * n, *c = b + n;
  std::memcpy(states, kept, static_cast<size_t>(end - begin) * n * sizeof(float));
  const int64_t first = call.begins ? call.begins[request] : request, tokens = call.lens ? call.lens[request] : 1;
  for (int64_t token = first; token < first + tokens; ++token) {
    const T *x = row<T>(call.x, call.x_stride, token), *dt = row<T>(call.dt, call.dt_stride, token);
    const T *from_b = row<T>(call.b, call.b_stride, token) + group * n, *from_c = row<T>(call.c, call.c_stride, token) + group * n;
    for (int i = 0; i < n; ++i) {
      b[i] = to_float(from_b[i]);
      c[i] = to_float(from_c[i]);
    }
    Out* out = static_cast<Out*>(call.out) + token * call.channels;
    for (int channel = begin; channel < end; ++channel) {
      const float step = softplus(to_float(dt[channel]) + call.dt_bias[channel]), value = to_float(x[channel]), written = step * value;
      const float* a = call.a + static_cast<int64_t>(channel) * n;
      float *state = states + static_cast<int64_t>(channel - begin) * n, sum = 0.0f;
#pragma omp simd reduction(+ : sum)
      for (int i = 0; i < n; ++i) {
        state[i] = exponential(step * a[i]) * state[i] + written * b[i];
        sum += state[i] * c[i];
      }
      out[channel] = from_float<Out>(sum + call.d[channel] * value);
    }
  }
  if (call.slots[request] != 0) std::memcpy(kept, states, static_cast<size_t>(end - begin) * n * sizeof(float));
}

template <class T, class Out>
void scan_all(const Scan& call, int threads) {
  const int each = call.channels / call.groups, blocks = (each + kBlock - 1) / kBlock;
  int64_t tokens = call.lens ? 0 : call.count;
  for (int i = 0; call.lens && i < call.count; ++i) tokens += call.lens[i];
#pragma omp parallel num_threads(tokens * call.channels * call.numbers < kAlone ? 1 : threads)
  {
    std::vector<float> memory;
#pragma omp for collapse(3) schedule(static)
    for (int request = 0; request < call.count; ++request)
      for (int group = 0; group < call.groups; ++group)
        for (int block = 0; block < blocks; ++block) {
          const int begin = group * each + block * kBlock;
          scan<T, Out>(call, request, begin, std::min(begin + kBlock, (group + 1) * each), memory);
        }
  }
}

}  // namespace
}  // namespace piecework

extern "C" void piecework_selective_scan(const void* scan, int is_bf16, int threads) {
  using namespace piecework;
  const Scan& call = *static_cast<const Scan*>(scan);
  if (!is_bf16 || !call.lens)
    (is_bf16 ? scan_all<bf16, float> : scan_all<float, float>)(call, threads);
  else
    scan_all<bf16, bf16>(call, threads);
}
