// Threads that go through a row of phases together, faster from one to the next than OpenMP's own barrier.
#pragma once
#include <thread>

#include "common.h"
#include "shares.h"
#include "threads.h"

namespace piecework {

class Team {
 public:
  explicit Team(int threads) : shares_{Shares(threads), Shares(threads)} {}

  void set_size(int size) { size_ = size; }

  // Every thread calls this with the same count; the calls of `work`, one for each number below it, are shared. Whoever is done last calls
  // `last` before the others go on.
  template <class Work, class Last>
  void each(int& phase, int count, Work work, Last last) {
    const int me = omp_get_thread_num();
    Shares& shares = shares_[phase++ % 2];
    // The next phase's, which nobody has looked at since the last one.
    shares_[phase % 2].reset(me);
    shares.each(me, size_, count, work);
    wait(last);
  }

  template <class Work>
  void each(int& phase, int count, Work work) {
    each(phase, count, work, [] {});
  }

 private:
  static constexpr int kSpins = 4000;

  // Whoever waits long lets others have the core: they may be what it waits for.
  template <class Last>
  void wait(Last last) {
    const int round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      last();
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; round_.load(std::memory_order_acquire) == round; ++spins) {
      if (spins < kSpins)
        pause();
      else
        std::this_thread::yield();
    }
  }

  Shares shares_[2];
  std::atomic<int> arrived_{0}, round_{0};
  int size_ = 1;
};

}  // namespace piecework
