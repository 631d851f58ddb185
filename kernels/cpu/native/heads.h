// Finds out when all panels of a head of queries, keys or values are done. Threads make panels of 32 rows, which are no whole heads.
#pragma once
#include <atomic>
#include <vector>

#include "linear.h"

namespace piecework {

class Heads {
 public:
  Heads(int count, int size) : size_(size), heads_(count) {
    for (int h = 0; h < count; ++h) heads_[h].left = panels_of(h);
  }

  // Call this after a panel is done. It calls finish(h) for each head whose last panel this was.
  template <class Finish>
  void meet(int panel, Finish finish) {
    const int begin = panel * kPanel, end = std::min(begin + kPanel, size_ * static_cast<int>(heads_.size()));
    for (int h = begin / size_; h * size_ < end; ++h) {
      if (heads_[h].left.fetch_sub(1, std::memory_order_acq_rel) > 1) continue;
      heads_[h].left.store(panels_of(h), std::memory_order_relaxed);  // For the next layer.
      finish(h);
    }
  }

 private:
  // One cache line each, because one thread makes all panels of most heads.
  struct alignas(64) Head {
    std::atomic<int> left{0};
  };

  int panels_of(int h) const {
    const int first = h * size_, last = first + size_ - 1;
    return last / kPanel - first / kPanel + 1;
  }

  int size_;
  std::vector<Head> heads_;
};

}  // namespace piecework
