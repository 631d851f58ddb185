// Device memory: a caching allocator over host memory with private pools for graphs, poisoned so that stale reads show.
#pragma once
#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <list>
#include <map>
#include <mutex>
#include <set>
#include <utility>

namespace simnpu {

constexpr c10::DeviceType kNpu = c10::DeviceType::PrivateUse1;
constexpr int kPoison = 0xFF;  // NaN in every floating type, -1 in every signed one
constexpr size_t kAlignment = 512;
constexpr size_t kSegmentBytes = size_t(2) << 20;

using Address = uintptr_t;
using PoolId = std::pair<uint64_t, uint64_t>;
const PoolId kDefaultPool{0, 0};

inline size_t round_up(size_t bytes, size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

// A segment is what was taken from the device; it is cut into blocks, and free neighbours are merged. A private pool
// takes the smallest block that fits, so that graphs of several sizes share addresses as they do on hardware. Everyone
// else takes the next block that fits after the last one taken, so that the address of a freed tensor is not soon taken
// again and a stale use of it shows. Segments are never returned to the host: a segment given back by empty_cache()
// stays mapped and poisoned, and is taken again by a later request of its size.
class Memory {
 public:
  size_t total_bytes = size_t(1) << 30;

  void* allocate(size_t bytes, PoolId pool) {
    if (bytes == 0) return nullptr;
    std::lock_guard<std::mutex> lock(mutex_);
    const size_t size = round_up(bytes, kAlignment);
    Address address = take_free_block(size, pool);
    if (!address) address = add_segment(size, pool, bytes);
    Block& block = blocks_.at(address);
    block.live = true;
    split(address, size);
    allocated_ += block.size;
    peak_ = std::max(peak_, allocated_);
    poison(address, block.size);
    return reinterpret_cast<void*>(address);
  }

  void free(void* pointer) {
    if (!pointer) return;
    std::lock_guard<std::mutex> lock(mutex_);
    const Address address = reinterpret_cast<Address>(pointer);
    Block& block = blocks_.at(address);
    block.live = false;
    allocated_ -= block.size;
    // The memory of a private pool keeps its contents: its graph may still be read through weak references.
    if (segments_.at(block.segment).pool == kDefaultPool) poison(address, block.size);
    add_free(merge(address));
  }

  bool contains(const void* pointer) {
    std::lock_guard<std::mutex> lock(mutex_);
    return find(pointer) != blocks_.end();
  }

  // Whether a graph may touch this address: a tensor lives there, or a graph keeps the pool.
  bool is_live(const void* pointer) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto block = find(pointer);
    if (block == blocks_.end()) return false;
    return block->second.live || pool_users_.count(segments_.at(block->second.segment).pool);
  }

  // A capture begins: its pool records until end_recording, which a capture that was invalidated never reaches.
  void begin_recording(PoolId pool, const void* graph) {
    std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(
        !finished_pools_.count(pool), "it->second->use_count > 0 INTERNAL ASSERT FAILED: all graphs of memory pool (",
        pool.first, ", ", pool.second, ") are gone, and the pool with them");
    ++pool_users_[pool];
    TORCH_CHECK(!recording_.count(pool), "beginAllocateToPool: already recording to mempool_id");
    recording_[pool] = graph;
  }

  void end_recording(PoolId pool) {
    std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(recording_.erase(pool), "endAllocatePool: not currently recording to mempool_id");
  }

  // The allocator asks the graph of every pool that records whether an allocation of a capturing stream belongs to it.
  void graph_is_gone(const void* graph) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [pool, owner] : recording_)
      if (owner == graph) owner = nullptr;
  }
  void ask_recording_graphs() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [pool, owner] : recording_)
      TORCH_CHECK(owner, "simnpu: an allocation asks a graph that is gone while its pool still records (hardware: undefined)");
  }

  void forget_recordings() {
    std::lock_guard<std::mutex> lock(mutex_);
    recording_.clear();
  }

  // The last graph of a pool hands the pool's memory to everyone, and nothing can be captured into the pool again. (torch
  // forgets a finished pool once empty_cache() has freed all of it; nobody should count on that.)
  void release_pool(PoolId pool) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto users = pool_users_.find(pool);
    TORCH_CHECK(users != pool_users_.end(), "it != graph_pools.end() INTERNAL ASSERT FAILED: an unknown memory pool");
    if (--users->second > 0) return;
    pool_users_.erase(users);
    finished_pools_.insert(pool);
    for (auto& [address, segment] : segments_)
      if (segment.pool == pool) segment.pool = kDefaultPool;
    for (auto& [address, size] : free_[pool]) poison(address, size);
    free_[kDefaultPool].merge(free_[pool]);
    free_.erase(pool);
  }

  void empty_cache() {
    std::lock_guard<std::mutex> lock(mutex_);
    retire_free_segments();
  }

  size_t allocated() const { return allocated_; }
  size_t reserved() const { return reserved_; }
  size_t peak() const { return peak_; }
  void reset_peak() { peak_ = allocated_; }

 private:
  struct Block {
    size_t size;
    bool live;
    Address segment;
  };
  struct Segment {
    size_t size;
    PoolId pool;
  };

  std::mutex mutex_;
  std::map<Address, Block> blocks_;
  std::map<Address, Segment> segments_;
  using FreeBlocks = std::map<Address, size_t>;
  std::map<PoolId, FreeBlocks> free_;
  std::list<Address> retired_;  // segments given back, oldest first
  std::map<PoolId, int> pool_users_;
  std::set<PoolId> finished_pools_;
  std::map<PoolId, const void*> recording_;  // by pool, the graph that is being captured
  Address next_ = 0;
  size_t allocated_ = 0, reserved_ = 0, peak_ = 0;

  static void poison(Address address, size_t size) { std::memset(reinterpret_cast<void*>(address), kPoison, size); }

  std::map<Address, Block>::iterator find(const void* pointer) {
    const Address address = reinterpret_cast<Address>(pointer);
    auto next = blocks_.upper_bound(address);
    if (next == blocks_.begin()) return blocks_.end();
    auto block = std::prev(next);
    return address < block->first + block->second.size ? block : blocks_.end();
  }

  Address take_free_block(size_t size, PoolId pool) {
    FreeBlocks& blocks = free_[pool];
    auto block = pool == kDefaultPool ? next_fit(blocks, size) : best_fit(blocks, size);
    if (block == blocks.end()) return 0;
    const Address address = block->first;
    blocks.erase(block);
    if (pool == kDefaultPool) next_ = address + size;
    return address;
  }

  static FreeBlocks::iterator best_fit(FreeBlocks& blocks, size_t size) {
    auto best = blocks.end();
    for (auto block = blocks.begin(); block != blocks.end(); ++block)
      if (block->second >= size && (best == blocks.end() || block->second < best->second)) best = block;
    return best;
  }

  FreeBlocks::iterator next_fit(FreeBlocks& blocks, size_t size) {
    auto fits = [size](const auto& block) { return block.second >= size; };
    auto found = std::find_if(blocks.lower_bound(next_), blocks.end(), fits);
    return found != blocks.end() ? found : std::find_if(blocks.begin(), blocks.end(), fits);
  }

  Address add_segment(size_t wanted, PoolId pool, size_t asked) {
    const size_t size = round_up(wanted, kSegmentBytes);
    if (reserved_ + size > total_bytes) retire_free_segments();
    TORCH_CHECK_WITH(
        OutOfMemoryError, reserved_ + size <= total_bytes, "NPU out of memory. Tried to allocate ", asked, " bytes; ",
        total_bytes - std::min(reserved_, total_bytes), " of ", total_bytes, " are free.");
    Address address;
    auto old = std::find_if(retired_.begin(), retired_.end(), [&](Address a) { return segments_.at(a).size == size; });
    if (old != retired_.end()) {
      address = *old;
      retired_.erase(old);
      segments_.at(address).pool = pool;
    } else {
      void* memory = nullptr;
      TORCH_CHECK(posix_memalign(&memory, kAlignment, size) == 0, "simnpu: the host is out of memory");
      address = reinterpret_cast<Address>(memory);
      segments_[address] = Segment{size, pool};
      blocks_[address] = Block{size, false, address};
      poison(address, size);
    }
    reserved_ += size;
    return address;
  }

  void add_free(Address address) {
    const Block& block = blocks_.at(address);
    free_[segments_.at(block.segment).pool].emplace(address, block.size);
  }

  void split(Address address, size_t size) {
    Block& block = blocks_.at(address);
    if (block.size == size) return;
    blocks_[address + size] = Block{block.size - size, false, block.segment};
    block.size = size;
    add_free(address + size);
  }

  Address merge(Address address) {
    auto block = blocks_.find(address);
    auto absorb = [this](auto left, auto right) {
      left->second.size += right->second.size;
      blocks_.erase(right);
      return left;
    };
    auto& free_blocks = free_[segments_.at(block->second.segment).pool];
    auto is_free_neighbour = [&](auto other) {
      return other->second.segment == block->second.segment && !other->second.live;
    };
    if (auto next = std::next(block); next != blocks_.end() && is_free_neighbour(next)) {
      free_blocks.erase(next->first);
      block = absorb(block, next);
    }
    if (block != blocks_.begin() && is_free_neighbour(std::prev(block))) {
      auto previous = std::prev(block);
      free_blocks.erase(previous->first);
      block = absorb(previous, block);
    }
    return block->first;
  }

  void retire_free_segments() {
    FreeBlocks& blocks = free_[kDefaultPool];
    for (auto block = blocks.begin(); block != blocks.end();) {
      const auto [address, size] = *block;
      auto segment = segments_.find(address);
      const bool whole = segment != segments_.end() && segment->second.size == size;
      if (whole) {
        reserved_ -= size;
        retired_.push_back(address);
      }
      block = whole ? blocks.erase(block) : std::next(block);
    }
  }
};

inline Memory& memory = *new Memory;  // outlives every tensor, also those that die while the process ends

}  // namespace simnpu
