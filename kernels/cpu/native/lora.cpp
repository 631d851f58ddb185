// The updates of a row depend on that row only, and steps and prompts compute them by the same code: a text does not change with its batch.
#include "lora.h"

#include <algorithm>
#include <numeric>

#include "rows.h"
#include "simd.h"
#include "threads.h"

namespace piecework {
namespace {

constexpr int kPanelRows = 32;              // As in linear.h.
// Numbers of a row that are computed together, as many as there are registers for. Ranks are padded to multiples of the first.
constexpr int kShrinkWide = 16, kExpandWide = kLanes == 16 ? 32 : 16;
// Sums that do not wait for one another.
constexpr int kShrinkChains = 4, kExpandChains = kLanes == 16 ? 1 : 2;

template <int kWide>
using Wide = floats[kWide / kLanes];

floats widen(const bf16* from) {
#if defined(__AVX512F__)
  // Compilers convert the halves of a vector apart.
  return (floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(load<__m256i>(from)), 16);
#else
  using shorts = uint16_t __attribute__((vector_size(2 * kLanes)));
  return bits_as<floats>(__builtin_convertvector(load<shorts>(from), words) << 16);
#endif
}

// Rounded to bfloat16, as in `as_rounded`.
floats round_lanes(floats v) {
  const words bits = bits_as<words>(v), rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u;
  const words is_number = (words)(v == v);
  return bits_as<floats>((rounded & is_number) | (~is_number & 0x7fc00000u));
}

// sums [T][kWide] = x [T][depth] times a matrix [depth][kWide] whose rows are `stride` apart. Each of the chains adds up a range of the depth.
// Few tokens compute several chains at once, so that the order of additions does not depend on the number of tokens. All loops over sums
// are unrolled, because compilers keep an array in memory if any of its indices is not a constant.
template <int T, int kWide, int kChains>
void products(const bf16* matrix, int stride, int depth, const float* const* x, Wide<kWide>* sums) {
  constexpr int kVectors = kWide / kLanes;
  constexpr int kSums = T * kVectors, kAtOnce = kSums >= 8 ? 1 : kSums >= 4 ? std::min(2, kChains) : kChains;
  const int size = depth / kChains;
  floats totals[T][kVectors] = {};
  for (int chain = 0; chain < kChains; chain += kAtOnce) {
    floats parts[kAtOnce][T][kVectors] = {};
    const bf16* from = matrix + static_cast<int64_t>(chain) * size * stride;
    for (int i = 0; i < size; ++i, from += stride)
#pragma GCC unroll 4
      for (int c = 0; c < kAtOnce; ++c)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          const floats numbers = widen(from + static_cast<int64_t>(c) * size * stride + v * kLanes);
#pragma GCC unroll 8
          for (int t = 0; t < T; ++t) parts[c][t][v] = multiply_add(parts[c][t][v], splat(x[t][(chain + c) * size + i]), numbers);
        }
#pragma GCC unroll 4
    for (int c = 0; c < kAtOnce; ++c)
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) totals[t][v] += parts[c][t][v];
  }
  for (int i = kChains * size; i < depth; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const floats numbers = widen(matrix + static_cast<int64_t>(i) * stride + v * kLanes);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) totals[t][v] = multiply_add(totals[t][v], splat(x[t][i]), numbers);
    }
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sums[t][v] = totals[t][v];
}

// narrow [tokens][rank] of one part.
void shrink_part(const Adapters& adapters, int slot, int part, int tokens, const float* const* x, float* const* narrow) {
  const int place = slot * adapters.parts + part;
  const floats scale = splat(adapters.scales[place]);
  const bf16* a = adapters.a + static_cast<int64_t>(place) * adapters.columns * adapters.rank;
  for (int k = 0; k < adapters.ranks[place]; k += kShrinkWide)
    with_constant<AdapterGroup::kMost>(tokens, [&](auto count) {
      Wide<kShrinkWide> sums[count];
      products<count, kShrinkWide, kShrinkChains>(a + k, adapters.rank, adapters.columns, x, sums);
      for (int t = 0; t < count; ++t)
        for (int v = 0; v < kShrinkWide / kLanes; ++v) store(narrow[t] + part * adapters.rank + k + v * kLanes, sums[t][v] * scale);
    });
}

// Round some numbers to bfloat16, and add updates.
void add_to(float* values, const floats* updates) {
#pragma GCC unroll 4
  for (int v = 0; v < kExpandWide / kLanes; ++v) store(values + v * kLanes, round_lanes(load<floats>(values + v * kLanes)) + updates[v]);
}

void add_to(bf16* values, const floats* updates) {
#pragma GCC unroll 4
  for (int v = 0; v < kExpandWide / kLanes; ++v) store_rounded(values + v * kLanes, widen(values + v * kLanes) + updates[v]);
}

void add_to(float& value, float update) { value = as_rounded(value) + update; }
void add_to(bf16& value, float update) { value = rounded(to_float(value) + update); }

const bf16* expand_matrix(const Adapters& adapters, int slot, int row) {
  const int panels = (adapters.rows + kPanelRows - 1) / kPanelRows;
  return adapters.b + (static_cast<int64_t>(slot) * panels + row / kPanelRows) * adapters.rank * kPanelRows;
}

// Add the updates of a panel to the values of a group's tokens, of which each has the panel's rows.
template <class Number>
void expand_panel(const Adapters& adapters, int slot, int row, int tokens, const float* const* narrow, Number* const* values) {
  const bf16* b = expand_matrix(adapters, slot, row);
  const float* x[AdapterGroup::kMost];
  for (int part = 0, begin = 0; part < adapters.parts; begin = adapters.ends[part++]) {
    const int first = std::max(begin - row, 0), last = std::min(adapters.ends[part] - row, kPanelRows);
    const int rank = adapters.ranks[slot * adapters.parts + part];
    if (rank == 0) continue;
    for (int t = 0; t < tokens; ++t) x[t] = narrow[t] + part * adapters.rank;
    for (int r = first / kExpandWide * kExpandWide; r < last; r += kExpandWide)
      with_constant<AdapterGroup::kMost>(tokens, [&](auto count) {
        Wide<kExpandWide> sums[count];
        products<count, kExpandWide, kExpandChains>(b + r, kPanelRows, rank, x, sums);
        if (first <= r && r + kExpandWide <= last) {
          for (int t = 0; t < count; ++t) add_to(values[t] + r, sums[t]);
        } else {
          // Other parts have the other rows, or there are none.
          for (int t = 0; t < count; ++t)
            for (int i = std::max(first, r); i < std::min(last, r + kExpandWide); ++i) add_to(values[t][i], sums[t][(i - r) / kLanes][(i - r) % kLanes]);
        }
      });
  }
}

struct Call {
  Adapters adapters;
  const bf16 *y, *x;
  const int32_t* slots;  // [tokens]; negative: no adapter.
  bf16* out;             // [tokens][rows]
  int64_t y_stride, x_stride;
  int32_t tokens;

  // Copy a row of y to its place in `out`, which is returned.
  bf16* begin_row(int t) const {
    bf16* row = out + static_cast<int64_t>(t) * adapters.rows;
    std::memcpy(row, y + t * y_stride, adapters.rows * sizeof(bf16));
    return row;
  }
};

// The memory of a thread for one group of tokens.
struct GroupMemory {
  explicit GroupMemory(const Adapters& adapters)
      : x(static_cast<size_t>(AdapterGroup::kMost) * adapters.columns), narrow(static_cast<size_t>(AdapterGroup::kMost) * adapters.narrow_size()) {}

  Aligned<float> x, narrow;
};

void widen_row(const bf16* x, int columns, float* to) {
#pragma omp simd
  for (int i = 0; i < columns; ++i) to[i] = to_float(x[i]);
}

void update_group(const Call& call, const AdapterGroup& group, GroupMemory& memory) {
  constexpr int kMost = AdapterGroup::kMost;
  const Adapters& adapters = call.adapters;
  const float *x[kMost], *made[kMost];
  float* narrow[kMost];
  bf16* values[kMost];
  for (int i = 0; i < group.count; ++i) {
    const int t = group.tokens[i];
    float* wide = memory.x.data() + static_cast<int64_t>(i) * adapters.columns;
    widen_row(call.x + t * call.x_stride, adapters.columns, wide);
    x[i] = wide;
    made[i] = narrow[i] = memory.narrow.data() + static_cast<int64_t>(i) * adapters.narrow_size();
    values[i] = call.begin_row(t);
  }
  for (int part = 0; part < adapters.parts; ++part) shrink_part(adapters, group.slot, part, group.count, x, narrow);
  for (int row = 0; row < adapters.rows; row += kPanelRows) {
    expand_panel(adapters, group.slot, row, group.count, made, values);
    for (int i = 0; i < group.count; ++i) values[i] += kPanelRows;
  }
}

}  // namespace

std::vector<AdapterGroup> group_by_adapter(const int32_t* slots, int tokens) {
  std::vector<int> order(tokens);
  std::iota(order.begin(), order.end(), 0);
  order.erase(std::remove_if(order.begin(), order.end(), [&](int t) { return slots[t] < 0; }), order.end());
  std::stable_sort(order.begin(), order.end(), [&](int s, int t) { return slots[s] < slots[t]; });
  std::vector<AdapterGroup> groups;
  for (size_t begin = 0, end; begin < order.size(); begin = end) {
    end = begin + 1;
    while (end < order.size() && slots[order[end]] == slots[order[begin]]) ++end;
    // Groups of about the same size.
    const size_t most = AdapterGroup::kMost, count = (end - begin + most - 1) / most, size = (end - begin + count - 1) / count;
    for (size_t first = begin; first < end; first += size) {
      AdapterGroup group{slots[order[first]], static_cast<int>(std::min(size, end - first)), {}};
      std::copy_n(order.begin() + first, group.count, group.tokens);
      groups.push_back(group);
    }
  }
  return groups;
}

AdapterUpdates::AdapterUpdates(const int32_t* slots, int tokens, int narrow_size, int columns)
    : groups_(group_by_adapter(slots, tokens)), x_(static_cast<size_t>(tokens) * columns), narrow_(static_cast<size_t>(tokens) * narrow_size) {}

void AdapterUpdates::set(const Adapters& adapters, int t, const bf16* x) {
  widen_row(x, adapters.columns, x_.data() + static_cast<int64_t>(t) * adapters.columns);
}

void AdapterUpdates::shrink(const Adapters& adapters, int i) {
  const AdapterGroup& group = groups_[i / adapters.parts];
  const float* x[AdapterGroup::kMost];
  float* narrow[AdapterGroup::kMost];
  rows_of<const float>(group, x_.data(), adapters.columns, x);
  rows_of(group, narrow_.data(), adapters.narrow_size(), narrow);
  shrink_part(adapters, group.slot, i % adapters.parts, group.count, x, narrow);
}

void AdapterUpdates::fetch(const Adapters& adapters, int row) const {
  constexpr int kLine = 64 / sizeof(bf16);
  for (size_t i = 0; i < groups_.size(); ++i) {
    // Neighbours may have the same adapter.
    if (i > 0 && groups_[i].slot == groups_[i - 1].slot) continue;
    const bf16* b = expand_matrix(adapters, groups_[i].slot, row);
    for (int place = 0; place < adapters.rank * kPanelRows; place += kLine) __builtin_prefetch(b + place);
  }
}

void AdapterUpdates::expand(const Adapters& adapters, int row, float* values) const {
  for (const AdapterGroup& group : groups_) {
    const float* narrow[AdapterGroup::kMost];
    float* to[AdapterGroup::kMost];
    rows_of(group, narrow_.data(), adapters.narrow_size(), narrow);
    rows_of(group, values, kPanelRows, to);
    expand_panel(adapters, group.slot, row, group.count, narrow, to);
  }
}

}  // namespace piecework

extern "C" void piecework_lora(const void* arguments, int threads) {
  using namespace piecework;
  const Call& call = *static_cast<const Call*>(arguments);
  const std::vector<AdapterGroup> groups = group_by_adapter(call.slots, call.tokens);
  const int count = static_cast<int>(groups.size());
#pragma omp parallel num_threads(std::max(1, std::min(threads, count)))
  {
    GroupMemory memory(call.adapters);
#pragma omp for schedule(static) nowait
    for (int t = 0; t < call.tokens; ++t)
      if (call.slots[t] < 0) call.begin_row(t);
#pragma omp for schedule(dynamic)
    for (int i = 0; i < count; ++i) update_group(call, groups[i], memory);
  }
}
