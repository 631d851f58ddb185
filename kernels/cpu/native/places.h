// On which CPU each thread of a team runs.
//
// The system may put two of them on one CPU, and leaves them there: a thread that wakes up while somebody else uses its own goes where another
// one computes, and two that take turns look too busy to be moved. Each phase then lasts until the one that waits gives way.
#pragma once
#include <atomic>
#include <vector>
#if defined(__linux__)
#include <sched.h>
#endif

namespace piecework {

class Places {
 public:
  explicit Places(int threads) : cpus_(threads) {}

#if defined(__linux__)
  // Thread `me` says where it is.
  void tell(int me) { cpus_[me].number.store(sched_getcpu(), std::memory_order_relaxed); }

  // Where another thread of `size` is on the CPU of thread `me`, it goes to one that none is on. Returns whether they share it still.
  bool part(int me, int size) {
    tell(me);
    bool shared = false;
    for (int other = 0; other < size; ++other) shared |= other != me && cpu(other) == cpu(me);
    if (!shared) return false;
    cpu_set_t allowed, free;
    if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return true;
    free = allowed;
    for (int other = 0; other < size; ++other)
      if (cpu(other) >= 0) CPU_CLR(cpu(other), &free);
    if (CPU_COUNT(&free) == 0 || sched_setaffinity(0, sizeof(free), &free) != 0) return true;
    tell(me);
    sched_setaffinity(0, sizeof(allowed), &allowed);
    return false;
  }
#else
  void tell(int) {}
  bool part(int, int) { return false; }
#endif

 private:
  // A line of the cache each, which others seldom read.
  struct alignas(64) Place {
    std::atomic<int> number{-1};
  };

  int cpu(int of) const { return cpus_[of].number.load(std::memory_order_relaxed); }

  std::vector<Place> cpus_;
};

}  // namespace piecework
