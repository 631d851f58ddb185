// The sum of every rank's rows, the residual added to it, and its norm, quantised or not, in one pass over shared memory.
//
// Sums are those of collectives.cpp, and the rest is that of quantize.cpp. Every rank computes every row, or rows that were summed before.
#include "rows.h"
#include "shared.h"

namespace piecework {
namespace {

constexpr int64_t kAlone = 1 << 13;  // Numbers that take as long as waking another thread.

enum Result : int32_t { kNormalised = 0, kInt8 = 1, kFp8 = 2 };

struct ReduceNorm {
  const bf16 *x, *residual, *weight;  // x, residual [tokens][columns]
  bf16* total;                        // The sum of x and residual.
  void* out;                          // [tokens][columns]
  float* scales;                      // [tokens][columns / group]
  Quantization how;
  int32_t result, tokens, columns;
  float eps;
};

// Add the row of all ranks in their order, and round it once.
void sum_row(const Member& member, const bf16* own, int64_t place, int columns, float* sums, bf16* out) {
  for (int i = 0; i < member.size; ++i) {
    const bf16* row = i == member.rank ? own : reinterpret_cast<const bf16*>(member.slot(i)) + place;
    if (i == 0) {
#pragma omp simd
      for (int c = 0; c < columns; ++c) sums[c] = to_float(row[c]);
    } else {
#pragma omp simd
      for (int c = 0; c < columns; ++c) sums[c] += to_float(row[c]);
    }
  }
#pragma omp simd
  for (int c = 0; c < columns; ++c) out[c] = rounded(sums[c]);
}

void finish_row(const ReduceNorm& call, int64_t t, const bf16* summed, bf16* made) {
  const int64_t first = t * call.columns, groups = call.how.group ? call.columns / call.how.group : 0;
  bf16* total = call.total + first;
  add(summed, call.residual + first, call.columns, total);
  if (call.result == kNormalised) return rms_norm(total, call.weight, call.columns, call.eps, static_cast<bf16*>(call.out) + first);
  rms_norm(total, call.weight, call.columns, call.eps, made);
  if (call.result == kInt8)
    quantize(made, call.columns, call.how, static_cast<int8_t*>(call.out) + first, call.scales + t * groups);
  else
    quantize(made, call.columns, call.how, static_cast<fp8*>(call.out) + first, call.scales + t * groups);
}

// Finish rows from `first` on, of all ranks, or of x if there is no member.
void finish_rows(const Member* member, const ReduceNorm& call, int64_t first, int64_t rows, int threads) {
  const int64_t columns = call.columns;
  const bf16* x = call.x + first * columns;
#pragma omp parallel num_threads(rows * columns < kAlone ? 1 : threads)
  {
    std::vector<float> sums(columns);
    std::vector<bf16> summed(columns), made(columns);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < rows; ++t) {
      if (member) sum_row(*member, x + t * columns, t * columns, call.columns, sums.data(), summed.data());
      finish_row(call, first + t, member ? summed.data() : x + t * columns, made.data());
    }
  }
}

}  // namespace
}  // namespace piecework

// Return whether every rank has taken part in the same call. Without a member, x is already the sum.
extern "C" int piecework_all_reduce_norm(void* member, const void* arguments, int threads) {
  using namespace piecework;
  const ReduceNorm& call = *static_cast<const ReduceNorm*>(arguments);
  if (!member) return finish_rows(nullptr, call, 0, call.tokens, threads), true;
  Member& own = *static_cast<Member*>(member);
  const int64_t columns = call.columns, bytes = columns * static_cast<int64_t>(sizeof(bf16)), most = own.slot_bytes / bytes;
  own.enter(kAllReduceNorm, call.result, call.tokens * columns);
  for (int64_t first = 0; first < call.tokens; first += most) {
    const int64_t rows = std::min(most, call.tokens - first);
    const bf16* x = call.x + first * columns;
    uint8_t* slot = own.begin();
    share_out(threads, rows * columns, sizeof(bf16), [&](int64_t begin, int64_t end) {
      std::memcpy(slot + begin * sizeof(bf16), x + begin, (end - begin) * sizeof(bf16));
    });
    own.post();
    if (!own.wait()) return false;
    finish_rows(&own, call, first, rows, threads);
  }
  return !own.failed();
}
