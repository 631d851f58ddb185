// Causal attention over a paged KV cache, cut into items that threads take one by one.
//
// T tokens of a step, B requests, H query heads, K key/value heads, D head size, S tokens in a page. An item's rows are the
// query heads of its key/value head, token after token; its keys come a tile at a time (Dao et al., arXiv:2205.14135). Products
// and sums are float32, scores count in powers of two.
#pragma once
#include <utility>
#include <vector>

#include "attention_few.h"

namespace piecework {

constexpr int kMostRows = 192;    // query rows of an item: tokens times the query heads of one key/value head
constexpr int kLeastRows = 48;    // that are worth loading keys for, where many threads share few rows
constexpr int kLeastChunk = 512;  // keys that are worth an item of their own

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

using tiles::Scratch;

// Where the results of chunks wait: for each row its peak, its total, and D sums.
inline int64_t partial_floats(int rows, int head_size) { return static_cast<int64_t>(rows) * (head_size + 2); }

// Query tokens of an item: as many as fill its rows, fewer where threads would have nothing to do.
template <class T>
int tokens_in_item(const AttentionCall<T>& call, int threads) {
  const int64_t group = call.heads / call.kv_heads, all = group * call.kv_heads * call.tokens;
  int64_t rows = kMostRows;
  while (rows / 2 >= kLeastRows && all / rows < 4 * threads) rows /= 2;
  return static_cast<int>(std::max<int64_t>(1, rows / group));
}

// The longest first, so that at the end no thread waits long for another.
template <class T>
int64_t make_items(const AttentionCall<T>& call, int threads, std::vector<Item>& items) {
  const int group = call.heads / call.kv_heads, block = tokens_in_item(call, threads);
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
          if (made > 1) floats += partial_floats((last - first) * group, call.head_size);
        }
      }
    }
  }
  const auto work = [](const Item& item) { return static_cast<int64_t>(item.last - item.first) * (item.end - item.begin); };
  std::stable_sort(items.begin(), items.end(), [&](const Item& a, const Item& b) { return work(a) > work(b); });
  return floats;
}

template <class T>
void store_row(const AttentionCall<T>& call, int row) {
  const size_t width = static_cast<size_t>(call.kv_heads) * call.head_size;
  std::memcpy(call.k_cache + call.slots[row] * width, call.k + row * call.k_stride, width * sizeof(T));
  std::memcpy(call.v_cache + call.slots[row] * width, call.v + row * call.v_stride, width * sizeof(T));
}

template <class T>
void write_row(const AttentionCall<T>& call, const Item& item, int row, const float* __restrict sums, float total) {
  const int group = call.heads / call.kv_heads;
  T* __restrict out = call.out + (item.row + row / group) * call.out_stride + (item.kv_head * group + row % group) * call.head_size;
  const float factor = 1.0f / total;
#pragma omp simd
  for (int i = 0; i < call.head_size; ++i) out[i] = from_float<T>(sums[i] * factor);
}

// The queries of the item's `rows`, so scaled that scores count in powers of two.
template <class T>
void load_queries(const AttentionCall<T>& call, const Item& item, int rows, bool few, Scratch& scratch) {
  constexpr float kLog2E = 1.44269504f;
  const int group = call.heads / call.kv_heads;
  for (int row = 0; row < rows; row += tiles::kRows) {
    const T* from[tiles::kRows];
    const int count = std::min(tiles::kRows, rows - row);
    for (int i = 0; i < count; ++i)
      from[i] = call.q + (item.row + (row + i) / group) * call.q_stride + (item.kv_head * group + (row + i) % group) * call.head_size;
    if (few) {
      tiles::load_few(from, count, call.scale * kLog2E, scratch);
    } else {
      tiles::widen_transposed(from, count, call.head_size, call.scale * kLog2E, scratch.queries(row), kLanes);
    }
  }
}

// keys, values [kTile]: where they lie; behind the tile's last token there are others of its own.
template <class T>
void find_tile(const AttentionCall<T>& call, const Item& item, const tiles::Tile& tile, const T** keys, const T** values) {
  const int64_t* pages = call.table + item.request * call.table_stride;
  const int64_t width = static_cast<int64_t>(call.kv_heads) * call.head_size;
  for (int j = 0, page = tile.start / call.page_size, offset = tile.start % call.page_size; j < tile.count; ++page, offset = 0) {
    int64_t place = (pages[page] * call.page_size + offset) * width + item.kv_head * call.head_size;
    for (; offset < call.page_size && j < tile.count; ++offset, ++j, place += width) {
      keys[j] = call.k_cache + place;
      values[j] = call.v_cache + place;
    }
  }
  std::fill(keys + tile.count, keys + tiles::kTile, keys[0]);
}

// Many rows: keys and values are widened once for all of them.
template <class T>
void attend_blocks(int rows, const tiles::Sight& sight, const tiles::Tile& tile, const T* const* keys, const T* const* values, Scratch& scratch) {
  for (int j = 0; j < tile.count; ++j) tiles::widen_row(values[j], scratch.values + j * scratch.padded, scratch.head_size, scratch.padded);
  for (int j = 0; j < tile.count; j += kLanes)
    tiles::widen_transposed(keys + j, std::min(kLanes, tile.count - j), scratch.head_size, 1.0f, scratch.keys + j, tiles::kTile);
  for (int row = 0; row < rows; row += tiles::kRows) scratch.attend(sight, tile, row, std::min(tiles::kRows, rows - row));
}

template <class T>
void attend_item(const AttentionCall<T>& call, const Item& item, Scratch& scratch, float* partials) {
  const int group = call.heads / call.kv_heads, rows = (item.last - item.first) * group, size = call.head_size;
  const tiles::Sight sight{call.seq_lens[item.request] - call.query_lens[item.request] + item.first, group, call.window};
  const bool few = tiles::is_few<T>(rows, size);
  const T *places[2][2][tiles::kTile];  // keys and values of a tile and of the next
  const auto tile_at = [&](int start) { return tiles::Tile{start, std::max(0, std::min(tiles::kTile, item.end - start))}; };
  const auto find = [&](const tiles::Tile& tile) {
    auto& [keys, values] = places[tile.start / tiles::kTile % 2];
    if (tile.count > 0) find_tile(call, item, tile, keys, values);
  };
  find(tile_at(item.begin));
  if (few) tiles::prefetch_rows(places[item.begin / tiles::kTile % 2][0], tile_at(item.begin).count, size);
  scratch.start(rows);
  load_queries(call, item, rows, few, scratch);
  for (int start = item.begin; start < item.end; start += tiles::kTile) {
    const tiles::Tile tile = tile_at(start), next = tile_at(start + tiles::kTile);
    find(next);
    const auto& [keys, values] = places[start / tiles::kTile % 2];
    if (few) {
      tiles::attend_few(rows, sight, tile, keys, values, places[next.start / tiles::kTile % 2][0], next.count, scratch);
    } else {
      attend_blocks(rows, sight, tile, keys, values, scratch);
    }
  }
  if (few) tiles::restore_order<T>(rows, scratch);
  float* partial = partials + item.partial;
  for (int row = 0; row < rows; ++row) {
    const float* sums = scratch.sums + row * scratch.padded;
    if (item.partial < 0) {
      write_row(call, item, row, sums, scratch.total(row));
    } else {
      partial[row] = scratch.peak(row);
      partial[rows + row] = scratch.total(row);
      std::memcpy(partial + 2 * rows + row * size, sums, size * sizeof(float));
    }
  }
}

// Compiled once, in attention.cpp.
extern template void attend_item(const AttentionCall<bf16>&, const Item&, Scratch&, float*);
extern template void attend_item(const AttentionCall<float>&, const Item&, Scratch&, float*);

template <class T>
using AttendItem = void (*)(const AttentionCall<T>&, const Item&, Scratch&, float*);

template <class T>
AttendItem<T> attend_for(int) {
  return attend_item<T>;
}

// The chunks of `item`, the first of them, become the rows of `out`; a chunk in which a row sees nothing counts nothing.
template <class T>
void merge_item(const AttentionCall<T>& call, const Item& item, Scratch& scratch, const float* partials) {
  const int group = call.heads / call.kv_heads, rows = (item.last - item.first) * group, size = call.head_size;
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
    write_row(call, item, row, scratch.sums, total);
  }
}

}  // namespace piecework
