// Causal attention over a paged KV cache, cut into items that threads take one by one.
//
// T tokens of a step, B requests, H query heads, K key/value heads, D head size, S tokens in a page.
#pragma once
#include <cmath>
#include <utility>
#include <vector>

#include "common.h"

namespace piecework {

constexpr int kTile = 32;        // keys that are looked at together
constexpr int kMostRows = 32;    // query rows of an item: tokens times the query heads of one key/value head
constexpr int kLeastChunk = 512; // keys that are worth an item of their own

template <class T>
struct AttentionCall {
  const T *q, *k, *v;  // [T, H, D], [T, K, D]; rows are `*_stride` numbers apart
  T* out;              // [T, H, D]
  T *k_cache, *v_cache;  // [pages, S, K, D]
  const int64_t* slots;  // [tokens]: page * S + offset
  const int64_t* table;  // [B, table_stride]
  const int32_t *query_lens, *seq_lens;  // [B]
  int64_t q_stride, k_stride, v_stride, out_stride, table_stride;
  int32_t requests, tokens, heads, kv_heads, head_size, page_size, window;  // window 0: all
  float scale;
};

// Keys [begin, end) for the query tokens [first, last) of a request: `row` is the step's token that belongs to `first`.
struct Item {
  int32_t request, kv_head, first, last, row, begin, end;
  int64_t partial;  // where its unmerged result lies, -1: it is the only chunk
  int32_t chunks;   // of the item that merges them, the first; 0 for the others
};

struct Scratch {
  std::vector<float> memory;
  float *q, *keys, *values, *sums, *scores, *peak, *total;

  Scratch(int head_size, int rows) : memory(static_cast<size_t>(2 * rows + 2 * kTile) * head_size + rows * (kTile + 2)) {
    float* next = memory.data();
    auto take = [&next](size_t count) { return std::exchange(next, next + count); };
    q = take(static_cast<size_t>(rows) * head_size);
    sums = take(static_cast<size_t>(rows) * head_size);
    keys = take(static_cast<size_t>(kTile) * head_size);
    values = take(static_cast<size_t>(kTile) * head_size);
    scores = take(static_cast<size_t>(rows) * kTile);
    peak = take(rows);
    total = take(rows);
  }
};

// Where the results of chunks wait: for each row its peak, its total, and D sums.
inline int64_t partial_floats(int rows, int head_size) { return static_cast<int64_t>(rows) * (head_size + 2); }

template <class T>
int64_t make_items(const AttentionCall<T>& call, int threads, std::vector<Item>& items) {
  const int group = call.heads / call.kv_heads, block = std::max(1, kMostRows / group);
  int64_t keys = 0;
  for (int b = 0; b < call.requests; ++b) keys += call.query_lens[b] > 0 ? call.seq_lens[b] : 0;
  // Several items a thread, so that none waits long for the last.
  const int64_t fair = std::max<int64_t>(kLeastChunk, keys * call.kv_heads / (4 * std::max(1, threads)));
  int64_t floats = 0;
  items.clear();
  for (int b = 0, row = 0; b < call.requests; row += call.query_lens[b], ++b) {
    const int past = call.seq_lens[b] - call.query_lens[b];
    for (int first = 0; first < call.query_lens[b]; first += block) {
      const int last = std::min(first + block, call.query_lens[b]), end = past + last;
      const int begin = call.window > 0 ? std::max(0, past + first + 1 - call.window) : 0;
      const int chunks = static_cast<int>(std::max<int64_t>(1, (end - begin) / fair));
      const int size = ((end - begin + chunks - 1) / chunks + kTile - 1) / kTile * kTile;
      const int made = (end - begin + size - 1) / size;
      for (int head = 0; head < call.kv_heads; ++head) {
        for (int chunk = 0; chunk < made; ++chunk) {
          const int from = begin + chunk * size, to = std::min(end, from + size);
          items.push_back({b, head, first, last, row + first, from, to, made > 1 ? floats : -1, made > 1 && chunk == 0 ? made : 0});
          if (made > 1) floats += partial_floats((last - first) * group, call.head_size);
        }
      }
    }
  }
  return floats;
}

template <class T>
void store_row(const AttentionCall<T>& call, int row) {
  const size_t width = static_cast<size_t>(call.kv_heads) * call.head_size;
  std::memcpy(call.k_cache + call.slots[row] * width, call.k + row * call.k_stride, width * sizeof(T));
  std::memcpy(call.v_cache + call.slots[row] * width, call.v + row * call.v_stride, width * sizeof(T));
}

template <class T>
inline void widen(const T* __restrict from, float* __restrict to, int count, float factor) {
#pragma omp simd
  for (int i = 0; i < count; ++i) to[i] = to_float(from[i]) * factor;
}

// The products of a with four rows of b that lie one after another.
template <int D>
inline void dot4(const float* __restrict a, const float* __restrict b, int size, float* __restrict sums) {
  const int count = D > 0 ? D : size;
  float s0 = 0.0f, s1 = 0.0f, s2 = 0.0f, s3 = 0.0f;
#pragma omp simd reduction(+ : s0, s1, s2, s3)
  for (int i = 0; i < count; ++i) {
    s0 += a[i] * b[i];
    s1 += a[i] * b[i + count];
    s2 += a[i] * b[i + 2 * count];
    s3 += a[i] * b[i + 3 * count];
  }
  sums[0] = s0, sums[1] = s1, sums[2] = s2, sums[3] = s3;
}

template <int D, class T>
inline void load_tile(const AttentionCall<T>& call, const Item& item, int start, int count, Scratch& scratch) {
  const int64_t* pages = call.table + item.request * call.table_stride;
  const int size = D > 0 ? D : call.head_size;
  for (int j = 0; j < count; ++j) {
    const int position = start + j;
    const int64_t slot = pages[position / call.page_size] * call.page_size + position % call.page_size;
    const int64_t place = (slot * call.kv_heads + item.kv_head) * size;
    widen(call.k_cache + place, scratch.keys + j * size, size, 1.0f);
    widen(call.v_cache + place, scratch.values + j * size, size, 1.0f);
  }
  if (count % 4 != 0) std::fill_n(scratch.keys + count * size, (4 - count % 4) * size, 0.0f);
}

// One row over one tile whose keys [low, high) it sees. D: the head size where it is known to the compiler, else 0.
template <int D>
inline void attend_row(Scratch& scratch, int row, int low, int high, int size) {
  const int head_size = D > 0 ? D : size;
  const float* q = scratch.q + row * head_size;
  float* scores = scratch.scores + row * kTile;
  float* sums = scratch.sums + row * head_size;
  float peak = scratch.peak[row];
  // The tile is whole in memory, what lies behind its keys are zeros.
  for (int j = low & ~3; j < high; j += 4) dot4<D>(q, scratch.keys + j * head_size, head_size, scores + j);
  for (int j = low; j < high; ++j) peak = std::max(peak, scores[j]);
  const float kept = scratch.total[row] == 0.0f ? 0.0f : exponential(scratch.peak[row] - peak);
  float total = 0.0f;
#pragma omp simd reduction(+ : total)
  for (int j = low; j < high; ++j) {
    scores[j] = exponential(scores[j] - peak);
    total += scores[j];
  }
  scratch.total[row] = scratch.total[row] * kept + total;
  scratch.peak[row] = peak;
  if (kept != 1.0f) {
#pragma omp simd
    for (int i = 0; i < head_size; ++i) sums[i] *= kept;
  }
  int j = low;
  for (; j + 4 <= high; j += 4) {
    const float* value = scratch.values + j * head_size;
    const float a = scores[j], b = scores[j + 1], c = scores[j + 2], d = scores[j + 3];
#pragma omp simd
    for (int i = 0; i < head_size; ++i)
      sums[i] += a * value[i] + b * value[i + head_size] + c * value[i + 2 * head_size] + d * value[i + 3 * head_size];
  }
  for (; j < high; ++j) {
    const float* value = scratch.values + j * head_size;
    const float weight = scores[j];
#pragma omp simd
    for (int i = 0; i < head_size; ++i) sums[i] += weight * value[i];
  }
}

template <class T>
void write_row(const AttentionCall<T>& call, const Item& item, int row, const float* sums, float total) {
  const int group = call.heads / call.kv_heads;
  T* out = call.out + (item.row + row / group) * call.out_stride + (item.kv_head * group + row % group) * call.head_size;
  const float factor = 1.0f / total;
  for (int i = 0; i < call.head_size; ++i) out[i] = from_float<T>(sums[i] * factor);
}

template <int D, class T>
void attend_item(const AttentionCall<T>& call, const Item& item, Scratch& scratch, float* partials) {
  const int group = call.heads / call.kv_heads, rows = (item.last - item.first) * group, size = D > 0 ? D : call.head_size;
  const int past = call.seq_lens[item.request] - call.query_lens[item.request];
  for (int row = 0; row < rows; ++row) {
    const T* q = call.q + (item.row + row / group) * call.q_stride + (item.kv_head * group + row % group) * size;
    widen(q, scratch.q + row * size, size, call.scale);
    scratch.peak[row] = -INFINITY;
    scratch.total[row] = 0.0f;
  }
  std::fill_n(scratch.sums, rows * size, 0.0f);
  for (int start = item.begin; start < item.end; start += kTile) {
    const int count = std::min(kTile, item.end - start);
    load_tile<D>(call, item, start, count, scratch);
    for (int row = 0; row < rows; ++row) {
      const int position = past + item.first + row / group;
      const int high = std::min(count, position + 1 - start);
      const int low = call.window > 0 ? std::max(0, position + 1 - call.window - start) : 0;
      if (low < high) attend_row<D>(scratch, row, low, high, size);
    }
  }
  if (item.partial < 0) {
    for (int row = 0; row < rows; ++row) write_row(call, item, row, scratch.sums + row * size, scratch.total[row]);
    return;
  }
  float* partial = partials + item.partial;
  std::memcpy(partial, scratch.peak, rows * sizeof(float));
  std::memcpy(partial + rows, scratch.total, rows * sizeof(float));
  std::memcpy(partial + 2 * rows, scratch.sums, static_cast<size_t>(rows) * size * sizeof(float));
}

template <class T>
using AttendItem = void (*)(const AttentionCall<T>&, const Item&, Scratch&, float*);

// The version for a head size: the usual ones are compiled for themselves.
template <class T>
AttendItem<T> attend_for(int head_size) {
  switch (head_size) {
    case 64: return attend_item<64, T>;
    case 96: return attend_item<96, T>;
    case 128: return attend_item<128, T>;
    default: return attend_item<0, T>;
  }
}

// The chunks of `item`, the first of them, become the rows of `out`; a chunk in which a row sees nothing counts nothing.
template <class T>
void merge_item(const AttentionCall<T>& call, const Item& item, Scratch& scratch, const float* partials) {
  const int group = call.heads / call.kv_heads, rows = (item.last - item.first) * group, size = call.head_size;
  const int64_t step = partial_floats(rows, size);
  const float* chunks = partials + item.partial;
  for (int row = 0; row < rows; ++row) {
    float peak = -INFINITY, total = 0.0f;
    for (int c = 0; c < item.chunks; ++c) peak = std::max(peak, chunks[c * step + row]);
    std::fill_n(scratch.sums, size, 0.0f);
    for (int c = 0; c < item.chunks; ++c) {
      const float* chunk = chunks + c * step;
      if (chunk[rows + row] == 0.0f) continue;
      const float weight = exponential(chunk[row] - peak);
      const float* sums = chunk + 2 * rows + row * size;
      total += weight * chunk[rows + row];
      for (int i = 0; i < size; ++i) scratch.sums[i] += weight * sums[i];
    }
    write_row(call, item, row, scratch.sums, total);
  }
}

}  // namespace piecework
