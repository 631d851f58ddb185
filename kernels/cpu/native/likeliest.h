// The most likely token of each row of logits, of which each thread sees a part.
#pragma once
#include <vector>

#include "rows.h"

namespace piecework {

class Likeliest {
 public:
  Likeliest(int threads, int tokens) : tokens_(tokens), bests_(static_cast<size_t>(threads) * tokens) {}

  // Process logits [first, first + count) of row t. They are rounded to bfloat16, as in plain torch.
  void meet(int thread, int t, int first, const float* logits, int count) {
    Best& best = bests_[static_cast<size_t>(thread) * tokens_ + t];
    int32_t most = INT32_MIN;
#pragma omp simd reduction(max : most)
    for (int i = 0; i < count; ++i) most = std::max(most, ordered(as_rounded(logits[i])));
    if (most < best.value || (most == best.value && first > best.id)) return;
    int i = 0;
    while (ordered(as_rounded(logits[i])) != most) ++i;
    best = {most, first + i};
  }

  // The first of equal tokens, or -1 if its logit is not finite. Call this after all logits have been processed.
  int64_t token(int t) const {
    Best best = bests_[t];
    for (size_t place = t; place < bests_.size(); place += tokens_) {
      const Best& other = bests_[place];
      if (other.value > best.value || (other.value == best.value && other.id < best.id)) best = other;
    }
    return is_finite(best.value) ? best.id : -1;
  }

 private:
  struct Best {
    int32_t value = INT32_MIN, id = INT32_MAX;
  };

  int tokens_;
  std::vector<Best> bests_;  // [threads, T]
};

}  // namespace piecework
