// Keeps the threads of a team on different CPUs.
//
// The system may put two threads on one CPU and leave them there: a thread that wakes up while its CPU is busy is moved to one where
// another thread computes, and two alternating threads look too busy to be moved. Each phase then lasts until the waiting thread yields.
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
  // Thread `me` records its CPU.
  void tell(int me) { cpus_[me].number.store(sched_getcpu(), std::memory_order_relaxed); }

  // If another thread of `size` is on the CPU of thread `me`, `me` moves to a free CPU. Return whether they still share one.
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
  // One cache line each.
  struct alignas(64) Place {
    std::atomic<int> number{-1};
  };

  int cpu(int of) const { return cpus_[of].number.load(std::memory_order_relaxed); }

  std::vector<Place> cpus_;
};

}  // namespace piecework
