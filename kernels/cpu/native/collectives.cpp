// The collectives of kernels/collectives.py through memory that the ranks share, in parts that fit a slot.
//
// Sums are made in the order of ranks. Numbers of 16 bits are added in float32 and rounded once. Every rank therefore gets the same bits,
// in every run.
#include "shared.h"
#include "simd.h"

namespace piecework {
namespace {

constexpr int64_t kBlock = 512;   // Numbers that are summed at once.
constexpr int64_t kTogether = 64; // Numbers of a slice are a multiple of this.
constexpr int64_t kOneShot = 1 << 15;

struct float16 {
  uint16_t bits;
};

template <class T>
using Wide = std::conditional_t<sizeof(T) == 2, float, T>;

// to = or += numbers.
template <bool kAdds, class T>
inline void widen(const T* from, int64_t count, Wide<T>* to) {
  int64_t i = 0;
  if constexpr (std::is_same_v<T, float16>) {
    const uint16_t* bits = &from->bits;
    for (; i + kLanes <= count; i += kLanes) store(to + i, kAdds ? load<floats>(to + i) + load_halves(bits + i) : load_halves(bits + i));
    for (; i < count; ++i) to[i] = (kAdds ? to[i] : 0.0f) + half_to_float(bits[i]);
  } else if constexpr (std::is_same_v<T, bf16>) {
#pragma omp simd
    for (i = 0; i < count; ++i) to[i] = (kAdds ? to[i] : 0.0f) + to_float(from[i]);
  } else {
#pragma omp simd
    for (i = 0; i < count; ++i) to[i] = (kAdds ? to[i] : T{}) + from[i];
  }
}

template <class T>
inline void narrow(const Wide<T>* from, int64_t count, T* to) {
  int64_t i = 0;
  if constexpr (std::is_same_v<T, float16>) {
    for (; i + kLanes <= count; i += kLanes) store_halves(&to->bits + i, load<floats>(from + i));
    for (; i < count; ++i) to[i].bits = float_to_half(from[i]);
  } else if constexpr (std::is_same_v<T, bf16>) {
#pragma omp simd
    for (i = 0; i < count; ++i) to[i] = from_float<bf16>(from[i]);
  } else {
    std::memcpy(to, from, count * sizeof(T));
  }
}

// The numbers of one range, of every rank.
template <class T>
struct Sources {
  const T* of[kMostRanks];
  int count;
};

// out [begin, end) = the sum of the sources; out may be one of them.
template <class T>
void sum(const Sources<T>& sources, int64_t begin, int64_t end, T* out) {
  alignas(64) Wide<T> sums[kBlock];
  for (; begin < end; begin += kBlock) {
    const int64_t count = std::min(kBlock, end - begin);
    widen<false>(sources.of[0] + begin, count, sums);
    for (int i = 1; i < sources.count; ++i) widen<true>(sources.of[i] + begin, count, sums);
    narrow(sums, count, out + begin);
  }
}

class Collective {
 public:
  Collective(Member& member, int threads) : member_(member), threads_(threads) {}

  // out may be x.
  template <class T>
  bool all_reduce(const T* x, T* out, int64_t count) {
    const int64_t most = member_.slot_bytes / static_cast<int64_t>(sizeof(T));
    for (int64_t first = 0; first < count; first += most) {
      const int64_t number = std::min(most, count - first);
      const bool one_shot = member_.size == 2 || number * static_cast<int64_t>(sizeof(T)) <= kOneShot;
      if (!(one_shot ? all_reduce_at_once(x + first, out + first, number) : all_reduce_in_slices(x + first, out + first, number))) return false;
    }
    return true;
  }

  template <class T>
  bool reduce_scatter(const T* x, T* out, int64_t count) {
    return through_parts(reinterpret_cast<const uint8_t*>(x), count, sizeof(T), [&](int64_t first, int64_t number) {
      Sources<T> sources{{}, member_.size};
      for (int i = 0; i < member_.size; ++i)
        sources.of[i] = i == member_.rank ? x + i * count + first : reinterpret_cast<const T*>(member_.slot(i)) + member_.rank * number;
      share_out(threads_, number, sizeof(T), [&](int64_t begin, int64_t end) { sum(sources, begin, end, out + first); });
    });
  }

  bool all_to_all(const uint8_t* x, uint8_t* out, int64_t count) {
    return through_parts(x, count, 1, [&](int64_t first, int64_t number) {
      for (int i = 0; i < member_.size; ++i)
        copy(i == member_.rank ? x + i * count + first : member_.slot(i) + member_.rank * number, number, out + i * count + first);
    });
  }

  // out is null on ranks that do not need the result.
  bool all_gather(const uint8_t* x, uint8_t* out, int64_t count) {
    for (int64_t first = 0; first < count; first += member_.slot_bytes) {
      const int64_t number = std::min(member_.slot_bytes, count - first);
      copy(x + first, number, member_.begin());
      member_.post();
      if (!out) continue;
      if (!member_.wait()) return false;
      for (int i = 0; i < member_.size; ++i) copy(i == member_.rank ? x + first : member_.slot(i), number, out + i * count + first);
    }
    return !member_.failed();
  }

  bool broadcast(uint8_t* x, int64_t count) {
    for (int64_t first = 0; first < count; first += member_.slot_bytes) {
      const int64_t number = std::min(member_.slot_bytes, count - first);
      uint8_t* slot = member_.begin();
      if (member_.rank == 0) copy(x + first, number, slot);
      member_.post();
      if (member_.rank == 0) continue;
      if (!member_.wait()) return false;
      copy(member_.slot(0), number, x + first);
    }
    return !member_.failed();
  }

 private:
  // Each rank sums everything.
  template <class T>
  bool all_reduce_at_once(const T* x, T* out, int64_t count) {
    copy(x, count, reinterpret_cast<T*>(member_.begin()));
    member_.post();
    if (!member_.wait()) return false;
    const Sources<T> sources = sources_of(x);
    share_out(threads_, count, sizeof(T), [&](int64_t begin, int64_t end) { sum(sources, begin, end, out); });
    return true;
  }

  // Each rank sums a slice, and stores the sum in place of its own numbers.
  template <class T>
  bool all_reduce_in_slices(const T* x, T* out, int64_t count) {
    const int64_t slice = (count / member_.size + kTogether) / kTogether * kTogether;
    const auto begin_of = [&](int rank) { return std::min(rank * slice, count); };
    const int64_t begin = begin_of(member_.rank), end = begin_of(member_.rank + 1);
    T* slot = reinterpret_cast<T*>(member_.begin());
    copy(x, begin, slot);
    copy(x + end, count - end, slot + end);
    member_.post();
    if (!member_.wait()) return false;
    const Sources<T> sources = sources_of(x);
    share_out(threads_, end - begin, sizeof(T), [&](int64_t from, int64_t to) {
      sum(sources, begin + from, begin + to, slot);
      std::memcpy(out + begin + from, slot + begin + from, (to - from) * sizeof(T));
    });
    member_.post();
    if (!member_.wait()) return false;
    for (int i = 0; i < member_.size; ++i)
      if (i != member_.rank) copy(reinterpret_cast<const T*>(member_.slot(i)) + begin_of(i), begin_of(i + 1) - begin_of(i), out + begin_of(i));
    return true;
  }

  template <class T>
  Sources<T> sources_of(const T* own) const {
    Sources<T> sources{{}, member_.size};
    for (int i = 0; i < member_.size; ++i) sources.of[i] = i == member_.rank ? own : reinterpret_cast<const T*>(member_.slot(i));
    return sources;
  }

  // x has a part of `count` numbers for each rank. read(first, number) is called when numbers [first, first + number) of every part are in
  // the slots.
  template <class Read>
  bool through_parts(const uint8_t* x, int64_t count, int64_t bytes, Read read) {
    const int64_t most = member_.slot_bytes / member_.size / bytes;
    for (int64_t first = 0; first < count; first += most) {
      const int64_t number = std::min(most, count - first);
      uint8_t* slot = member_.begin();
      for (int i = 0; i < member_.size; ++i)
        if (i != member_.rank) copy(x + (i * count + first) * bytes, number * bytes, slot + i * number * bytes);
      member_.post();
      if (!member_.wait()) return false;
      read(first, number);
    }
    return !member_.failed();
  }

  template <class T>
  void copy(const T* from, int64_t count, T* to) {
    share_out(threads_, count, sizeof(T), [&](int64_t begin, int64_t end) { std::memcpy(to + begin, from + begin, (end - begin) * sizeof(T)); });
  }

  Member& member_;
  const int threads_;
};

// Call work(a number of the type) for a dtype, numbered as in shared_memory.py.
template <class Work>
bool with_type(int32_t dtype, Work work) {
  switch (dtype) {
    case 0: return work(bf16{});
    case 1: return work(float16{});
    case 2: return work(float{});
    case 3: return work(double{});
    case 4: return work(int32_t{});
    default: return work(int64_t{});
  }
}

}  // namespace
}  // namespace piecework

extern "C" {

int64_t piecework_shared_bytes(int size, int64_t slot_bytes) { return piecework::Member::bytes(size, slot_bytes); }

void* piecework_join(void* memory, int rank, int size, int64_t slot_bytes, double seconds, int spins) {
  return new piecework::Member(memory, rank, size, slot_bytes, seconds, spins);
}

void piecework_leave(void* member) { delete static_cast<piecework::Member*>(member); }

void piecework_give_up(void* member) { static_cast<piecework::Member*>(member)->give_up(); }

void piecework_failure(void* member, piecework::Failure* failure) { *failure = static_cast<piecework::Member*>(member)->failure(); }

void piecework_last_call(void* member, int of, piecework::Call* call) { *call = static_cast<piecework::Member*>(member)->last_call(of); }

// Return whether every rank has taken part in the same call. count: numbers of x, or bytes if it is only moved; numbers of one part if x
// has a part per rank.
int piecework_collective(void* member, int op, const void* x, void* out, int64_t count, int dtype, int threads) {
  using namespace piecework;
  Member& own = *static_cast<Member*>(member);
  Collective collective(own, threads);
  own.enter(static_cast<Op>(op), dtype, count);
  const auto* from = static_cast<const uint8_t*>(x);
  auto* to = static_cast<uint8_t*>(out);
  switch (op) {
    case kAllReduce:
    case kReduceScatter:
      return with_type(dtype, [&](auto number) {
        using T = decltype(number);
        const T* numbers = static_cast<const T*>(x);
        T* result = static_cast<T*>(out);
        return op == kAllReduce ? collective.all_reduce(numbers, result, count) : collective.reduce_scatter(numbers, result, count);
      });
    case kAllToAll: return collective.all_to_all(from, to, count);
    case kBroadcast: return collective.broadcast(to, count);
    default: return collective.all_gather(from, to, count);
  }
}
}
