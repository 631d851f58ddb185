// Ranks that share memory: what each has posted, and how the others wait for it. shared_memory.py makes the memory.
//
// A collective is a sequence of exchanges. In each exchange, a rank writes to its own slot, posts, waits until all have posted, and reads
// their slots. A rank has two slots, which alternate: a rank that posts an exchange has read the previous one, so nobody reads the slot
// that is written next.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

namespace piecework {

constexpr int kMostRanks = 64;

// The call that a rank is in. Ranks that meet must be in the same call.
struct Call {
  int64_t number, count;
  int32_t op, dtype;
};

enum Op : int32_t { kAllReduce = 0, kAllGather = 1, kReduceScatter = 2, kAllToAll = 3, kGather = 4, kBroadcast = 5, kDecodeStep = 6, kAllReduceNorm = 7 };

enum Fault : int32_t { kNone = 0, kLate = 1, kMismatch = 2, kGivenUp = 3 };

// The first failure. `rank` is the rank of the call `theirs`; `missing` has a bit for each rank that was late.
struct Failure {
  int32_t fault, rank;
  uint64_t missing;
  Call mine, theirs;
};

// The state of one rank. Only this rank writes it, except `sleepers`.
struct alignas(64) Post {
  std::atomic<uint32_t> posted;    // Number of exchanges so far; it may wrap.
  std::atomic<uint32_t> sleepers;  // Number of ranks that the kernel has to wake.
  Call calls[2];                   // The calls of even and of odd exchanges.
};

struct alignas(64) Header {
  char token[64];                  // By this, ranks check that they have the same memory.
  std::atomic<int32_t> gave_up;    // 1 + the rank that has failed.
};

// One rank's view of the memory. After a failure nothing waits, and the data that is read is meaningless.
class Member {
 public:
  static int64_t bytes(int size, int64_t slot_bytes) { return slots_offset(size) + 2 * size * slot_bytes; }

  // `seconds` is the limit of a wait. `spins` is the number of polls before yielding, 0 if ranks share a core.
  Member(void* memory, int rank, int size, int64_t slot_bytes, double seconds, int spins);

  // Begin a call of one or several exchanges.
  void enter(Op op, int32_t dtype, int64_t count) { call_ = {call_.number + 1, count, op, dtype}; }

  // Return the slot to write, after all have posted the previous exchange.
  uint8_t* begin();

  // Publish what was written, including in this slot since the last post.
  void post();

  // Wait until all have posted the same number of exchanges. Several threads may call this. Return false if the call has failed.
  bool wait();

  // The slot of a rank.
  const uint8_t* slot(int of) const { return slots_ + ((turn_ & 1) * size + of) * slot_bytes; }

  bool failed() const { return failed_.load(std::memory_order_acquire); }
  const Failure& failure() const { return failure_; }

  // End all waits of all ranks, now and later.
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
  std::vector<uint8_t> scrap_;  // Used instead of the slot after a failure.
};

// Call work(begin, end) for the numbers below `count`, with up to `threads` threads if that is worth it. `bytes` is the size of a number.
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
