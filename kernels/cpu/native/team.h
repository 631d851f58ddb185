// Threads that go through a sequence of phases together, with less delay between phases than OpenMP's barrier.
#pragma once
#include <thread>

#include "common.h"
#include "places.h"
#include "shares.h"
#include "threads.h"

namespace piecework {

class Team {
 public:
  explicit Team(int threads) : places_(threads), shares_{Shares(threads), Shares(threads)} {}

  // The number of threads. Each thread sets it before its first phase. No thread waits for another that has not woken up; it begins with
  // the work of both.
  void set_size(int size) { size_.store(size, std::memory_order_relaxed); }

  // Every thread calls this with the same count. The calls of `work`, one for each number below it, are shared. The thread that finishes
  // last calls `last` before the others continue.
  template <class Work, class Last>
  void each(int& phase, int count, Work work, Last last) {
    const int me = omp_get_thread_num();
    Shares& shares = shares_[phase++ % 2];
    // The counters of the next phase, which no thread has read since the last reset.
    shares_[phase % 2].reset(me);
    shares.each(me, size_.load(std::memory_order_relaxed), count, work);
    wait(me, last);
  }

  template <class Work>
  void each(int& phase, int count, Work work) {
    each(phase, count, work, [] {});
  }

 private:
  static constexpr int kLook = 1000;  // 30 us: ten times as long as a thread takes that has a CPU.
  static constexpr int kSpins = 16 * kLook;

  // A thread that waits long yields its core, because the thread that it waits for may need it. It does not yield earlier, because another
  // program may keep the core for milliseconds.
  template <class Last>
  void wait(int me, Last last) {
    places_.tell(me);
    const int round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_.load(std::memory_order_relaxed)) {
      last();
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    bool gives_way = false;
    for (int spins = 0; round_.load(std::memory_order_acquire) == round; ++spins) {
      if (spins == kLook) gives_way = places_.part(me, size_.load(std::memory_order_relaxed));
      if (gives_way || spins > kSpins)
        std::this_thread::yield();
      else
        pause();
    }
  }

  Places places_;
  Shares shares_[2];
  std::atomic<int> arrived_{0}, round_{0}, size_{1};
};

}  // namespace piecework
