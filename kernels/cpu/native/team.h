// Threads that go through a row of phases together, faster from one to the next than OpenMP's own barrier.
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

  // How many there are. Each thread says so itself, before its first phase: so none waits for another that has not woken up yet, but begins
  // with the work of both.
  void set_size(int size) { size_.store(size, std::memory_order_relaxed); }

  // Every thread calls this with the same count; the calls of `work`, one for each number below it, are shared. Whoever is done last calls
  // `last` before the others go on.
  template <class Work, class Last>
  void each(int& phase, int count, Work work, Last last) {
    const int me = omp_get_thread_num();
    Shares& shares = shares_[phase++ % 2];
    // The next phase's, which nobody has looked at since the last one.
    shares_[phase % 2].reset(me);
    shares.each(me, size_.load(std::memory_order_relaxed), count, work);
    wait(me, last);
  }

  template <class Work>
  void each(int& phase, int count, Work work) {
    each(phase, count, work, [] {});
  }

 private:
  static constexpr int kLook = 1000;  // 30 us, ten times as long as others take who have a CPU
  static constexpr int kSpins = 16 * kLook;

  // Whoever waits long lets others have the core: they may be what it waits for. Not sooner, for who gets it may keep it for milliseconds.
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
