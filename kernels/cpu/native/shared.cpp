// How ranks wait for one another (shared.h).
#include "shared.h"

#include <chrono>
#include <thread>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "common.h"

namespace piecework {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kAwake = std::chrono::milliseconds(1);  // After this time, a waiting rank sleeps.
constexpr long kSleepNanoseconds = 50'000'000;          // After this time, it checks whether the others have given up.

static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4, "a word that the kernel knows");

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

}  // namespace

Member::Member(void* memory, int rank, int size, int64_t slot_bytes, double seconds, int spins)
    : rank(rank),
      size(size),
      slot_bytes(slot_bytes),
      header_(static_cast<Header*>(memory)),
      posts_(reinterpret_cast<Post*>(header_ + 1)),
      slots_(static_cast<uint8_t*>(memory) + slots_offset(size)),
      seconds_(seconds),
      spins_(spins) {}

uint8_t* Member::begin() {
  wait();
  ++turn_;
  if (!failed()) return slots_ + ((turn_ & 1) * size + rank) * slot_bytes;
  scrap_.resize(slot_bytes);
  return scrap_.data();
}

void Member::post() {
  if (failed()) return;
  Post& own = posts_[rank];
  own.calls[++round_ & 1] = call_;
  // A sleeper first counts itself and then checks. Either it is seen here, or it sees this.
  own.posted.store(round_, std::memory_order_seq_cst);
#if defined(__linux__)
  if (own.sleepers.load(std::memory_order_seq_cst)) syscall(SYS_futex, &own.posted, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
#endif
}

bool Member::wait() {
  for (int other = 0; other < size; ++other)
    if (other != rank && !wait_for(other)) return false;
  const int quitter = header_->gave_up.load(std::memory_order_acquire);
  return !quitter ? !failed() : fail(kGivenUp, quitter - 1);
}

bool Member::wait_for(int other) {
  for (int spins = 0; spins < spins_ && !has_posted(other); ++spins) pause();
  if (!has_posted(other)) {
    for (const auto began = Clock::now(); !has_posted(other);) {
      if (failed()) return false;
      const int quitter = header_->gave_up.load(std::memory_order_acquire);
      if (quitter) return fail(kGivenUp, quitter - 1);
      if (seconds_since(began) > seconds_) return fail(kLate, other);
      // The rank that is waited for may need this core.
      if (Clock::now() - began < kAwake)
        std::this_thread::yield();
      else
        sleep_until_posted(other);
    }
  }
  const bool is_same = std::memcmp(&posts_[other].calls[round_ & 1], &posts_[rank].calls[round_ & 1], sizeof(Call)) == 0;
  return is_same || fail(kMismatch, other);
}

void Member::sleep_until_posted(int other) {
#if defined(__linux__)
  Post& post = posts_[other];
  post.sleepers.fetch_add(1, std::memory_order_seq_cst);
  const uint32_t seen = post.posted.load(std::memory_order_seq_cst);
  if (!has_posted(other)) {
    const timespec time{0, kSleepNanoseconds};
    syscall(SYS_futex, &post.posted, FUTEX_WAIT, seen, &time, nullptr, 0);
  }
  post.sleepers.fetch_sub(1, std::memory_order_seq_cst);
#else
  std::this_thread::sleep_for(std::chrono::microseconds(100));
#endif
}

bool Member::fail(Fault fault, int other) {
  if (!is_failing_.test_and_set()) {
    Failure failure{fault, other, 0, posts_[rank].calls[round_ & 1], last_call(other)};
    if (fault == kMismatch) failure.theirs = posts_[other].calls[round_ & 1];
    for (int i = 0; i < size; ++i)
      if (i != rank && !has_posted(i)) failure.missing |= uint64_t{1} << i;
    if (fault != kGivenUp) give_up();
    failure_ = failure;
    failed_.store(true, std::memory_order_release);
  }
  return false;
}

}  // namespace piecework
