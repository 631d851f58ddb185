// Shares work so that each thread reads memory in order, which hardware prefetching follows.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace piecework {

class Shares {
 public:
  // `threads` is the maximum number of threads.
  explicit Shares(int threads) : taken_(threads) {}

  // Thread `me` of `size` calls this with the same count as all others. The calls of `work`, one for each number below it, are shared. A
  // thread works through its own range from the front, and then takes the last numbers of slower threads.
  template <class Work>
  void each(int me, int size, int count, Work&& work) {
    for (int turn = 0; turn < std::min(size, kVictims + 1); ++turn) {
      const int owner = (me + turn) % size;
      const int begin = static_cast<int>(static_cast<int64_t>(count) * owner / size);
      const int end = static_cast<int>(static_cast<int64_t>(count) * (owner + 1) / size);
      std::atomic<uint64_t>& taken = taken_[owner].count;
      while (left(taken.load(std::memory_order_relaxed), begin, end) > 0) {
        const uint64_t before = taken.fetch_add(turn == 0 ? 1 : kBack, std::memory_order_relaxed);
        if (left(before, begin, end) <= 0) break;
        work(turn == 0 ? begin + static_cast<int>(before % kBack) : end - 1 - static_cast<int>(before / kBack));
      }
    }
  }

  // Each thread calls this when no thread is in `each`, and before the next `each`.
  void reset(int me) { taken_[me].count.store(0, std::memory_order_relaxed); }

 private:
  static constexpr int kVictims = 7;  // With many threads, checking each would take longer than the work.
  static constexpr uint64_t kBack = uint64_t{1} << 32;

  // How many numbers were taken from the front of a range and, times kBack, from its end. One cache line each, which is mostly used by its
  // owner.
  struct alignas(64) Taken {
    std::atomic<uint64_t> count{0};
  };

  static int left(uint64_t taken, int begin, int end) { return end - begin - static_cast<int>(taken % kBack) - static_cast<int>(taken / kBack); }

  std::vector<Taken> taken_;
};

}  // namespace piecework
