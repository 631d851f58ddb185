// Ranks that share one memory: what each has posted, and how the others wait for it. shared_memory.py makes the memory.
//
// A collective is a row of exchanges. In each a rank writes to its own slot, posts, waits until all have posted, and reads their slots. A
// rank has two slots, which take turns: whoever posts an exchange has read all of the one before, so what is written next is read by nobody.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

namespace piecework {

constexpr int kMostRanks = 64;

// What a rank is in. Ranks that meet must be in the same.
struct Call {
  int64_t number, count;
  int32_t op, dtype;
};

enum Op : int32_t { kAllReduce = 0, kAllGather = 1, kReduceScatter = 2, kAllToAll = 3, kGather = 4, kBroadcast = 5, kDecodeStep = 6, kAllReduceNorm = 7 };

enum Fault : int32_t { kNone = 0, kLate = 1, kMismatch = 2, kGivenUp = 3 };

// The first that has gone wrong. `rank`: whose call `theirs` is; `missing`: a bit for each rank that was late.
struct Failure {
  int32_t fault, rank;
  uint64_t missing;
  Call mine, theirs;
};

// Of one rank, which alone writes it, `sleepers` aside.
struct alignas(64) Post {
  std::atomic<uint32_t> posted;    // exchanges so far; it may wrap
  std::atomic<uint32_t> sleepers;  // ranks that the kernel has to wake
  Call calls[2];                   // of the exchanges of an even and of an odd number
};

struct alignas(64) Header {
  char token[64];                  // by which ranks know that they have the same memory
  std::atomic<int32_t> gave_up;    // 1 + a rank that has failed
};

// One rank's view of the memory. After a failure nothing waits any more, and what is read means nothing.
class Member {
 public:
  static int64_t bytes(int size, int64_t slot_bytes) { return slots_offset(size) + 2 * size * slot_bytes; }

  // `seconds`: how long to wait for others. `spins`: looks at a post before others get the core, 0 where ranks share one.
  Member(void* memory, int rank, int size, int64_t slot_bytes, double seconds, int spins);

  // Begins a call, of one exchange or several.
  void enter(Op op, int32_t dtype, int64_t count) { call_ = {call_.number + 1, count, op, dtype}; }

  // The slot to write, once all have posted the last exchange.
  uint8_t* begin();

  // What was written, in this slot since the last post too, may be read.
  void post();

  // Until all have posted as often. May be called by several threads. False: it has failed.
  bool wait();

  // What a rank has written.
  const uint8_t* slot(int of) const { return slots_ + ((turn_ & 1) * size + of) * slot_bytes; }

  bool failed() const { return failed_.load(std::memory_order_acquire); }
  const Failure& failure() const { return failure_; }

  // Ends every rank's wait, and all that will come.
  void give_up() { header_->gave_up.store(rank + 1, std::memory_order_release); }

  // The last call that a rank has posted.
  Call last_call(int of) const { return posts_[of].calls[posts_[of].posted.load(std::memory_order_acquire) & 1]; }

  const int rank, size;
  const int64_t slot_bytes;

 private:
  static int64_t slots_offset(int size) { return (sizeof(Header) + size * sizeof(Post) + 4095) / 4096 * 4096; }

  bool has_posted(int other) const {
    return static_cast<int32_t>(posts_[other].posted.load(std::memory_order_acquire) - round_) >= 0;
  }
  bool wait_for(int other);
  void sleep_until_posted(int other);
  bool fail(Fault fault, int other);

  Header* header_;
  Post* posts_;
  uint8_t* slots_;
  const double seconds_;
  const int spins_;
  uint32_t round_ = 0, turn_ = 0;
  Call call_{};
  std::atomic_flag is_failing_ = ATOMIC_FLAG_INIT;
  std::atomic<bool> failed_{false};
  Failure failure_{};
  std::vector<uint8_t> scrap_;  // in place of the slot after a failure
};

// work(begin, end) of the numbers below `count`, by up to `threads` threads where they are worth it. `bytes`: of one.
template <class Work>
void share_out(int threads, int64_t count, int64_t bytes, Work work) {
  constexpr int64_t kWorthAThread = 1 << 15, kTogether = 64;
  const int parts = static_cast<int>(std::min<int64_t>(threads, count * bytes / kWorthAThread));
  if (parts < 2) return work(int64_t{0}, count);
  const int64_t each = (count / parts + kTogether) / kTogether * kTogether;
#pragma omp parallel for num_threads(parts)
  for (int i = 0; i < parts; ++i) {
    const int64_t begin = std::min(i * each, count), end = std::min(begin + each, count);
    if (begin < end) work(begin, end);
  }
}

}  // namespace piecework
