// Causal attention over a paged KV cache, cut into items that threads take one by one.
//
// T tokens of a step, B requests, H query heads, K key/value heads, D numbers of a key, E of a value, S tokens in a page. An item's
// rows are the query heads of its key/value head, token after token; its keys come a tile at a time (Dao et al., arXiv:2205.14135).
// Products and sums are float32, scores count in powers of two.
#pragma once
#include <utility>
#include <vector>

#include "attention_few.h"

namespace piecework {

constexpr float kLog2E = 1.44269504f;
constexpr int kMostRows = 192;    // query rows of an item: tokens times the query heads of one key/value head
constexpr int kLeastRows = 48;    // that are worth loading keys for, where many threads share few rows
constexpr int kLeastChunk = 512;  // keys that are worth an item of their own

template <class T>
struct AttentionCall {
  const T *q, *k, *v;  // [T, H, D], [T, K, D], [T, K, E]; rows are `*_stride` numbers apart
  T* out;              // [T, H, E]
  // [pages, S, K, D] and [pages, S, K, E] of `cache_kind`; int8 has the scales of a page, [K, S] bfloat16, behind its numbers. E is D,
  // or both caches are one and values the first E numbers of keys.
  void *k_cache, *v_cache;
  const int64_t* slots;  // [tokens]: page * S + offset
  const int64_t* table;  // [B, table_stride]
  const int32_t *query_lens, *seq_lens;  // [B]
  const float* sinks;                    // [H]: scores without values; null: none
  int64_t q_stride, k_stride, v_stride, out_stride, table_stride;
  int32_t requests, tokens, heads, kv_heads, head_size, value_size, page_size, window;  // D, E; window 0: all
  int32_t group, skipped;  // query heads of a key/value head; of the first's so many are missing
  CacheKind cache_kind;
  float scale, k_scale, v_scale;  // k_scale, v_scale: 1 but for numbers in float8
  float softcap;                  // that scores are held below; 0: none

  // Numbers of a page, without the scales behind them.
  int64_t page_numbers() const { return static_cast<int64_t>(page_size) * kv_heads * head_size; }

  // The query heads of a key/value head; the last has all that are left.
  int first_head(int kv_head) const { return std::max(0, kv_head * group - skipped); }
  int heads_of(int kv_head) const { return (kv_head + 1 == kv_heads ? heads : first_head(kv_head + 1)) - first_head(kv_head); }
  int most_heads() const { return std::max(std::min(group, heads), heads_of(kv_heads - 1)); }
};

// Where something lies in pages of C, in numbers from the first page's first.
template <class C, class T>
int64_t page_start(const AttentionCall<T>& call, int64_t page) {
  const int64_t scales = kIsInt8<C> ? static_cast<int64_t>(sizeof(bf16)) * call.page_size * call.kv_heads : 0;
  return page * (call.page_numbers() + scales);
}

// The scale of the first head's first token of a page.
template <class T>
bf16* page_scales(const AttentionCall<T>& call, void* cache, int64_t page) {
  return reinterpret_cast<bf16*>(static_cast<int8_t*>(cache) + page_start<int8_t>(call, page) + call.page_numbers());
}

// Keys [begin, end) for the query tokens [first, last) of a request: `row` is the step's token that belongs to `first`.
struct Item {
  int32_t request, kv_head, first, last, row, begin, end;
  int64_t partial;  // where its unmerged result lies, -1: it is the only chunk
  int32_t chunks;   // of the item that merges them, the first; 0 for the others
};

using tiles::Scratch;

// Where the results of chunks wait: for each row its peak, its total, and E sums.
inline int64_t partial_floats(int rows, int value_size) { return static_cast<int64_t>(rows) * (value_size + 2); }

// Query tokens of an item: as many as fill its rows, fewer where threads would have nothing to do.
template <class T>
int tokens_in_item(const AttentionCall<T>& call, int threads) {
  const int64_t group = call.most_heads(), all = static_cast<int64_t>(call.heads) * call.tokens;
  int64_t rows = kMostRows;
  while (rows / 2 >= kLeastRows && all / rows < 4 * threads) rows /= 2;
  return static_cast<int>(std::max<int64_t>(1, rows / group));
}

// The longest first, so that at the end no thread waits long for another.
template <class T>
int64_t make_items(const AttentionCall<T>& call, int threads, std::vector<Item>& items) {
  const int block = tokens_in_item(call, threads);
  const auto first_key = [&](int b, int first) {
    return call.window > 0 ? std::max(0, call.seq_lens[b] - call.query_lens[b] + first + 1 - call.window) : 0;
  };
  int64_t keys = 0;
  for (int b = 0; b < call.requests; ++b)
    for (int first = 0; first < call.query_lens[b]; first += block)
      keys += call.seq_lens[b] - call.query_lens[b] + std::min(first + block, call.query_lens[b]) - first_key(b, first);
  // Several items a thread, so that none waits long for the last.
  const int64_t fair = std::max<int64_t>(kLeastChunk, keys * call.kv_heads / (4 * std::max(1, threads)));
  int64_t floats = 0;
  items.clear();
  for (int b = 0, row = 0; b < call.requests; row += call.query_lens[b], ++b) {
    for (int first = 0; first < call.query_lens[b]; first += block) {
      const int last = std::min(first + block, call.query_lens[b]), end = call.seq_lens[b] - call.query_lens[b] + last;
      const int begin = first_key(b, first);
      const int chunks = static_cast<int>(std::max<int64_t>(1, (end - begin) / fair));
      const int size = tiles::round_up((end - begin + chunks - 1) / chunks, tiles::kTile);
      const int made = (end - begin + size - 1) / size;
      for (int head = 0; head < call.kv_heads; ++head) {
        for (int chunk = 0; chunk < made; ++chunk) {
          const int from = begin + chunk * size, to = std::min(end, from + size);
          items.push_back({b, head, first, last, row + first, from, to, made > 1 ? floats : -1, made > 1 && chunk == 0 ? made : 0});
          if (made > 1) floats += partial_floats((last - first) * call.heads_of(head), call.value_size);
        }
      }
    }
  }
  const auto work = [&](const Item& item) {
    return static_cast<int64_t>(item.last - item.first) * call.heads_of(item.kv_head) * (item.end - item.begin);
  };
  std::stable_sort(items.begin(), items.end(), [&](const Item& a, const Item& b) { return work(a) > work(b); });
  return floats;
}

template <class T, class C>
void store_part(const AttentionCall<T>& call, int64_t slot, const T* from, float scale, void* cache) {
  const int64_t width = static_cast<int64_t>(call.kv_heads) * call.head_size, page = slot / call.page_size, offset = slot % call.page_size;
  C* to = static_cast<C*>(cache) + page_start<C>(call, page) + offset * width;
  if constexpr (std::is_same_v<T, C>) {
    std::memcpy(to, from, width * sizeof(T));
  } else if constexpr (kIsInt8<C>) {
    for (int head = 0; head < call.kv_heads; ++head, from += call.head_size, to += call.head_size)
      store_int8(from, call.head_size, to, page_scales(call, cache, page) + head * call.page_size + offset);
  } else {
    store_float8(from, width, scale, to);
  }
}

template <class T, class C>
void store_row(const AttentionCall<T>& call, int row) {
  store_part<T, C>(call, call.slots[row], call.k + row * call.k_stride, call.k_scale, call.k_cache);
  if (call.v_cache != call.k_cache) store_part<T, C>(call, call.slots[row], call.v + row * call.v_stride, call.v_scale, call.v_cache);
}

// `sums` and `total` are of weights under `peak`.
template <class T>
void write_row(const AttentionCall<T>& call, const Item& item, int row, const float* __restrict sums, float total, float peak) {
  const int group = call.heads_of(item.kv_head), head = call.first_head(item.kv_head) + row % group;
  T* __restrict out = call.out + (item.row + row / group) * call.out_stride + head * call.value_size;
  if (call.sinks != nullptr) total += __builtin_exp2f(call.sinks[head] * kLog2E - peak);
  const float factor = call.v_scale * unit_of(call.cache_kind) / total;
#pragma omp simd
  for (int i = 0; i < call.value_size; ++i) out[i] = from_float<T>(sums[i] * factor);
}

// The queries of the item's `rows`, so scaled that scores count in powers of two.
template <class C, class T>
void load_queries(const AttentionCall<T>& call, const Item& item, int rows, bool few, Scratch& scratch) {
  const float factor = call.scale * kLog2E * call.k_scale * unit_of(call.cache_kind);
  const int group = call.heads_of(item.kv_head), first = call.first_head(item.kv_head);
  for (int row = 0; row < rows; row += tiles::kRows) {
    const T* from[tiles::kRows];
    const int count = std::min(tiles::kRows, rows - row);
    for (int i = 0; i < count; ++i)
      from[i] = call.q + (item.row + (row + i) / group) * call.q_stride + (first + (row + i) % group) * call.head_size;
    if (few) {
      tiles::load_few<C>(from, count, factor, scratch);
    } else {
      tiles::widen_transposed(from, count, call.head_size, tiles::splat(factor), scratch.queries(row), kLanes);
    }
  }
}

template <class C, class T>
void find_tile(const AttentionCall<T>& call, const Item& item, const tiles::Tile& tile, tiles::Places<C>& places) {
  const int64_t* pages = call.table + item.request * call.table_stride;
  const int64_t width = static_cast<int64_t>(call.kv_heads) * call.head_size;
  const C *k_cache = static_cast<const C*>(call.k_cache), *v_cache = static_cast<const C*>(call.v_cache);
  for (int j = 0, page = tile.start / call.page_size, offset = tile.start % call.page_size; j < tile.count; ++page, offset = 0) {
    int64_t place = page_start<C>(call, pages[page]) + offset * width + item.kv_head * call.head_size;
    const int count = std::min(call.page_size - offset, tile.count - j);
    if constexpr (kIsInt8<C>) {
      const int64_t first = static_cast<int64_t>(item.kv_head) * call.page_size + offset;
      const bf16 *keys = page_scales(call, call.k_cache, pages[page]) + first, *values = page_scales(call, call.v_cache, pages[page]) + first;
#pragma omp simd
      for (int i = 0; i < count; ++i) places.key_scales[j + i] = to_float(keys[i]), places.value_scales[j + i] = to_float(values[i]);
    }
    for (const int end = j + count; j < end; ++j, place += width) {
      places.keys[j] = k_cache + place;
      places.values[j] = v_cache + place;
    }
  }
  std::fill(places.keys + tile.count, places.keys + tiles::kTile, places.keys[0]);
  if constexpr (kIsInt8<C>) {
    std::fill(places.key_scales + tile.count, places.key_scales + tiles::kTile, 1.0f);
    std::fill(places.value_scales + tile.count, places.value_scales + tiles::kTile, 1.0f);
  }
}

// Many rows: keys and values are widened once for all of them.
template <class C>
void attend_blocks(int rows, const tiles::Sight& sight, const tiles::Tile& tile, const tiles::Places<C>& places, Scratch& scratch) {
  for (int j = 0; j < tile.count; ++j) {
    float factor = 1.0f;
    if constexpr (kIsInt8<C>) factor = places.value_scales[j];
    tiles::widen_value(places.values[j], factor, scratch.values + j * scratch.padded, scratch.value_size, scratch.padded);
  }
  for (int j = 0; j < tile.count; j += kLanes) {
    floats factors = tiles::splat(1.0f);
    if constexpr (kIsInt8<C>) factors = load<floats>(places.key_scales + j);
    tiles::widen_keys(places.keys + j, std::min(kLanes, tile.count - j), scratch.head_size, factors, scratch.keys + j, tiles::kTile);
  }
  for (int row = 0; row < rows; row += tiles::kRows) scratch.attend(sight, tile, row, std::min(tiles::kRows, rows - row));
}

template <class T, class C>
void attend_item(const AttentionCall<T>& call, const Item& item, Scratch& scratch, float* partials) {
  const int group = call.heads_of(item.kv_head), rows = (item.last - item.first) * group, size = call.value_size;
  const tiles::Sight sight{call.seq_lens[item.request] - call.query_lens[item.request] + item.first, group, call.window,
                           call.softcap * kLog2E};
  const bool few = tiles::is_few<C>(rows, call.head_size) && tiles::is_few<C>(rows, size);
  tiles::Places<C> both[2];  // of a tile and of the next
  const auto places = [&](int start) -> tiles::Places<C>& { return both[start / tiles::kTile % 2]; };
  const auto tile_at = [&](int start) { return tiles::Tile{start, std::max(0, std::min(tiles::kTile, item.end - start))}; };
  const auto find = [&](const tiles::Tile& tile) {
    if (tile.count > 0) find_tile(call, item, tile, places(tile.start));
  };
  find(tile_at(item.begin));
  if (few) tiles::prefetch_rows(places(item.begin).keys, tile_at(item.begin).count, call.head_size);
  scratch.start(rows);
  load_queries<C>(call, item, rows, few, scratch);
  for (int start = item.begin; start < item.end; start += tiles::kTile) {
    const tiles::Tile tile = tile_at(start), next = tile_at(start + tiles::kTile);
    find(next);
    if (few) {
      tiles::attend_few(rows, sight, tile, places(start), places(next.start).keys, next.count, scratch);
    } else {
      attend_blocks(rows, sight, tile, places(start), scratch);
    }
  }
  if (few) tiles::restore_order<C>(rows, scratch);
  float* partial = partials + item.partial;
  for (int row = 0; row < rows; ++row) {
    const float* sums = scratch.sums + row * scratch.padded;
    if (item.partial < 0) {
      write_row(call, item, row, sums, scratch.total(row), scratch.peak(row));
    } else {
      partial[row] = scratch.peak(row);
      partial[rows + row] = scratch.total(row);
      std::memcpy(partial + 2 * rows + row * size, sums, size * sizeof(float));
    }
  }
}

// What depends on the numbers of the cache, compiled once for each kind: in attention.cpp and attention_bytes.cpp.
template <class T>
struct CacheKernels {
  void (*store_row)(const AttentionCall<T>&, int row);
  void (*attend_item)(const AttentionCall<T>&, const Item&, Scratch&, float* partials);
};

template <class T>
CacheKernels<T> kernels_for(CacheKind kind);

CacheKernels<bf16> byte_kernels_for(CacheKind kind);

// The chunks of `item`, the first of them, become the rows of `out`; a chunk in which a row sees nothing counts nothing.
template <class T>
void merge_item(const AttentionCall<T>& call, const Item& item, Scratch& scratch, const float* partials) {
  const int group = call.heads_of(item.kv_head), rows = (item.last - item.first) * group, size = call.value_size;
  const int64_t step = partial_floats(rows, size);
  const float* chunks = partials + item.partial;
  for (int row = 0; row < rows; ++row) {
    float peak = tiles::kNothing, total = 0.0f;
    for (int c = 0; c < item.chunks; ++c) peak = std::max(peak, chunks[c * step + row]);
    std::fill_n(scratch.sums, size, 0.0f);
    for (int c = 0; c < item.chunks; ++c) {
      const float* chunk = chunks + c * step;
      const float weight = tiles::power_of_two(tiles::splat(chunk[row] - peak))[0];
      const float* sums = chunk + 2 * rows + row * size;
      total += weight * chunk[rows + row];
      for (int i = 0; i < size; ++i) scratch.sums[i] += weight * sums[i];
    }
    write_row(call, item, row, scratch.sums, total, peak);
  }
}

}  // namespace piecework
