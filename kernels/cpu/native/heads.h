// Which heads of queries, keys and values are made, of which threads make panels of 32 rows: no whole heads.
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

  // To be called once a panel is made: calls finish(h) for each head of which it was the last one.
  template <class Finish>
  void meet(int panel, Finish finish) {
    const int begin = panel * kPanel, end = std::min(begin + kPanel, size_ * static_cast<int>(heads_.size()));
    for (int h = begin / size_; h * size_ < end; ++h) {
      if (heads_[h].left.fetch_sub(1, std::memory_order_acq_rel) > 1) continue;
      heads_[h].left.store(panels_of(h), std::memory_order_relaxed);  // for the next layer
      finish(h);
    }
  }

 private:
  // A line of the cache each: of most heads one thread makes all panels.
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
