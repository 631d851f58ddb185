// The convolution before layers with a recurrent state, for prompts: how prompts are split, and what is kept. Only for
// recurrent_prompts.cpp, so that the compiler treats these functions as its own.
#pragma once
#include "recurrent.h"

namespace piecework {
namespace {

constexpr int kPart = 256;      // Tokens of a prompt in a part.
constexpr int kChannels = 256;  // Channels that are computed together.
constexpr int kTokens = 64;     // Tokens that are computed together.

// Tokens of a prompt from its token `first` on, whose results begin at row `at` of the room.
struct Stretch {
  int prompt, first, count, at;
};

// Stretches that are computed together, at most one per prompt. The cuts of a prompt depend only on its own tokens.
std::vector<std::vector<Stretch>> parts_of(const Prompts& prompts) {
  std::vector<std::vector<Stretch>> parts;
  int filled = prompts.capacity;
  for (int prompt = 0; prompt < prompts.count; ++prompt) {
    const int len = static_cast<int>(prompts.lens[prompt]);
    for (int first = 0; first < len; first += kPart) {
      const int count = std::min(kPart, len - first);
      if (first > 0 || filled + count > prompts.capacity) parts.emplace_back(), filled = 0;
      parts.back().push_back({prompt, first, count, filled});
      filled += count;
    }
  }
  return parts;
}

// Compute some channels of some tokens of a stretch, to [count][to_stride].
template <class T, class Out>
void convolve(const Conv& call, const Prompts& prompts, const Stretch& part, int begin, int end, int channel, int width, Out* to, int64_t to_stride) {
  const int columns = call.columns;
  const T* tail = static_cast<const T*>(call.states) + call.slots[part.prompt] * (columns - 1) * call.channels + channel;
  const T* x = static_cast<const T*>(call.x) + prompts.begins[part.prompt] * call.stride + channel;
  alignas(64) float sums[kChannels];
  std::vector<float> weights(static_cast<size_t>(columns) * kChannels);
  for (int k = 0; k < columns; ++k)
    for (int c = 0; c < width; ++c) weights[k * kChannels + c] = call.weight[static_cast<int64_t>(channel + c) * columns + k];
  for (int t = begin; t < end; ++t) {
    for (int c = 0; c < width; ++c) sums[c] = call.bias ? call.bias[channel + c] : 0.0f;
    for (int first = 0; first < columns; first += 4) {
      with_constant<4>(std::min(4, columns - first), [&](auto taps) {
        const T* rows[taps];
        for (int k = 0; k < taps; ++k) {
          const int64_t place = part.first + t - (columns - 1) + first + k;
          rows[k] = place < 0 ? tail + (columns - 1 + place) * call.channels : x + place * call.stride;
        }
        const float* weight = &weights[first * kChannels];
#pragma omp simd
        for (int c = 0; c < width; ++c) {
          float sum = sums[c];
          for (int k = 0; k < taps; ++k) sum += to_float(rows[k][c]) * weight[k * kChannels + c];
          sums[c] = sum;
        }
      });
    }
    Out* row = to + (t - begin) * to_stride;
    if (call.silu) {
#pragma omp simd
      for (int c = 0; c < width; ++c) row[c] = from_float<Out>(sums[c] / (1.0f + exponential(-sums[c])));
    } else {
#pragma omp simd
      for (int c = 0; c < width; ++c) row[c] = from_float<Out>(sums[c]);
    }
  }
}

// Compute all channels of stretches. `place(stretch)` is where the results of its first token go. Every thread of a team calls this.
template <class T, class Out, class Place>
void convolve_all(const Conv& call, const Prompts& prompts, const std::vector<Stretch>& part, Place place, int64_t to_stride) {
  const int blocks = (call.channels + kChannels - 1) / kChannels, turns = kPart / kTokens;
#pragma omp for collapse(3) schedule(dynamic)
  for (size_t s = 0; s < part.size(); ++s)
    for (int turn = 0; turn < turns; ++turn)
      for (int block = 0; block < blocks; ++block) {
        const int begin = turn * kTokens, end = std::min(begin + kTokens, part[s].count), channel = block * kChannels;
        if (begin >= end) continue;
        Out* to = place(part[s]) + begin * to_stride + channel;
        convolve<T>(call, prompts, part[s], begin, end, channel, std::min(kChannels, call.channels - channel), to, to_stride);
      }
}

// The last tokens of each prompt. To be called by every thread of a team, once all of them have convolved.
template <class T>
void keep_tails(const Conv& call, const Prompts& prompts) {
  const int kept = call.columns - 1;
#pragma omp for schedule(static)
  for (int prompt = 0; prompt < prompts.count; ++prompt) {
    const int64_t slot = call.slots[prompt], len = prompts.lens[prompt];
    if (slot == 0) continue;
    T* tail = static_cast<T*>(call.states) + slot * kept * call.channels;
    const T* x = static_cast<const T*>(call.x) + prompts.begins[prompt] * call.stride;
    for (int64_t k = 0; k < kept; ++k) {
      const int64_t place = len - kept + k;
      // Rows of the old tail move down, the first one first.
      const T* from = place < 0 ? tail + (kept + place) * call.channels : x + place * call.stride;
      std::memcpy(tail + k * call.channels, from, call.channels * sizeof(T));
    }
  }
}

}  // namespace
}  // namespace piecework
