// Causal attention over a paged KV cache, item by item (attention_items.h), one tile of keys at a time (Dao et al., arXiv:2205.14135).
// Products and sums are float32. Scores are in base-2 logarithms.
#pragma once
#include "attention_few.h"
#include "attention_items.h"
#include "rows.h"

namespace piecework {

constexpr float kLog2E = 1.44269504f;
constexpr int kPart = 64;  // Numbers of a result that are rounded before they are quantised.
// The offset of a token's head in pages of C, in numbers from the start of the cache.
template <class C, class T>
int64_t page_start(const AttentionCall<T>& call, int64_t page) {
  const int64_t scales = kIsInt8<C> ? static_cast<int64_t>(sizeof(bf16)) * call.page_size * call.kv_heads : 0;
  return page * (call.page_numbers() + scales);
}

// The scale of the first token of a page's first head.
template <class T>
bf16* page_scales(const AttentionCall<T>& call, void* cache, int64_t page) {
  return reinterpret_cast<bf16*>(static_cast<int8_t*>(cache) + page_start<int8_t>(call, page) + call.page_numbers());
}

using tiles::Scratch;

// Store the key/value heads [first, last) of one token. `from` points to the first of them.
template <class T, class C>
void store_part(const AttentionCall<T>& call, int64_t slot, const T* from, int first, int last, float scale, void* cache) {
  const int64_t width = static_cast<int64_t>(call.kv_heads) * call.head_size, page = slot / call.page_size, offset = slot % call.page_size;
  const int64_t count = static_cast<int64_t>(last - first) * call.head_size;
  C* to = static_cast<C*>(cache) + page_start<C>(call, page) + offset * width + static_cast<int64_t>(first) * call.head_size;
  if constexpr (std::is_same_v<T, C>) {
    std::memcpy(to, from, count * sizeof(T));
  } else if constexpr (kIsInt8<C>) {
    for (int head = first; head < last; ++head, from += call.head_size, to += call.head_size)
      store_int8(from, call.head_size, to, page_scales(call, cache, page) + head * call.page_size + offset);
  } else {
    store_float8(from, count, scale, to);
  }
}

template <class T, class C>
void store_keys(const AttentionCall<T>& call, int row, int first, int last) {
  store_part<T, C>(call, call.slots[row], call.k + row * call.k_stride + first * call.head_size, first, last, call.k_scale, call.k_cache);
}

template <class T, class C>
void store_values(const AttentionCall<T>& call, int row, int first, int last) {
  if (call.v_cache == call.k_cache) return;
  store_part<T, C>(call, call.slots[row], call.v + row * call.v_stride + first * call.head_size, first, last, call.v_scale, call.v_cache);
}

// Write one row of the output. `sums` and `total` were made with weights relative to `peak`.
template <class T>
void write_row(const AttentionCall<T>& call, const Item& item, int row, const float* __restrict sums, float total, float peak) {
  const int group = call.heads_of(item.kv_head), head = call.first_head(item.kv_head) + row % group;
  const int64_t place = (item.row + row / group) * call.out_stride + head * call.value_size;
  if (call.sinks != nullptr) total += __builtin_exp2f(call.sinks[head] * kLog2E - peak);
  const float factor = call.v_scale * unit_of(call.cache_kind) / total;
  if constexpr (std::is_same_v<T, bf16>) {
    if (call.numbers != nullptr) {
      bf16 part[kPart];
      for (int first = 0; first < call.value_size; first += kPart) {
        const int count = std::min(kPart, call.value_size - first);
#pragma omp simd
        for (int i = 0; i < count; ++i) part[i] = from_float<bf16>(sums[first + i] * factor);
        quantize(part, count, *call.out_scale, call.numbers + place + first);
      }
      return;
    }
  }
  T* __restrict out = call.out + place;
#pragma omp simd
  for (int i = 0; i < call.value_size; ++i) out[i] = from_float<T>(sums[i] * factor);
}

// Whether blocks of rows are multiplied as pairs of bfloat16.
template <class T>
bool takes_pairs(const Scratch& scratch) {
  return kHasDots && std::is_same_v<T, bf16> && scratch.prefers_dots;
}

// The factor that turns products into scores in base-2 logarithms.
template <class T>
float score_factor(const AttentionCall<T>& call) {
  return call.scale * kLog2E * call.k_scale * unit_of(call.cache_kind);
}

// Load the queries of the item's `rows`, times `score_factor` except for pairs: as few rows to `few` if that is given, else in blocks to
// the Scratch.
template <class C, class T>
void load_queries(const AttentionCall<T>& call, const Item& item, int rows, float* few, Scratch& scratch) {
  const float factor = score_factor(call);
  const int group = call.heads_of(item.kv_head), first = call.first_head(item.kv_head);
  for (int row = 0; row < rows; row += tiles::kRows) {
    const T* from[tiles::kRows];
    const int count = std::min(tiles::kRows, rows - row);
    for (int i = 0; i < count; ++i)
      from[i] = call.q + (item.row + (row + i) / group) * call.q_stride + (first + (row + i) % group) * call.head_size;
    if (few) {
      tiles::load_few<C>(from, count, call.head_size, factor, few + row * call.head_size);
    } else if (takes_pairs<T>(scratch)) {
      if constexpr (std::is_same_v<T, bf16>)
        tiles::transpose_pairs(count, call.head_size, Scratch::pairs(scratch.queries(row)), kLanes,
                               [&](int i, int begin) { return tiles::load_pairs(from[i] + begin, call.head_size - begin); });
    } else {
      tiles::widen_transposed(from, count, call.head_size, splat(factor), scratch.queries(row), kLanes);
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

// Whether blocks of rows prefetch the next tile while they work on one. No gain was seen on a CPU with AVX-512.
constexpr bool kBlocksAskAhead = kLanes == 8;

// Attend many rows: keys and values are widened once for all of them. Meanwhile, `count` tokens of `next` are prefetched.
template <class C>
void attend_blocks(int rows, const tiles::Sight& sight, const tiles::Tile& tile, const tiles::Places<C>& places, const tiles::Places<C>& next,
                   int count, Scratch& scratch) {
  for (int j = 0; j < tile.count; ++j) {
    float factor = 1.0f;
    if constexpr (kIsInt8<C>) factor = places.value_scales[j];
    tiles::widen_value(places.values[j], factor, scratch.values + j * scratch.padded, scratch.value_size, scratch.padded);
  }
  for (int j = 0; j < tile.count; j += kLanes) {
    floats factors = splat(1.0f);
    if constexpr (kIsInt8<C>) factors = load<floats>(places.key_scales + j);
    tiles::widen_keys(places.keys + j, std::min(kLanes, tile.count - j), scratch.head_size, factors, scratch.keys + j, tiles::kTile);
  }
  tiles::Ahead<C> keys{next.keys, next.keys + count, scratch.head_size}, values{next.values, next.values + count, scratch.value_size};
  const int blocks = (rows + tiles::kRows - 1) / tiles::kRows, lines = tiles::lines_of<C>(scratch.head_size) * count / blocks + 1;
  for (int row = 0; row < rows; row += tiles::kRows) {
    if constexpr (kBlocksAskAhead) keys.ask(lines), values.ask(lines);
    scratch.attend(sight, tile, row, std::min(tiles::kRows, rows - row));
  }
}

// The same with pairs of bfloat16, whose scores are multiplied by `factor`.
template <class C>
void attend_pairs(int rows, const tiles::Sight& sight, const tiles::Tile& tile, const tiles::Places<C>& places, float factor, Scratch& scratch) {
  for (int j = 0; j < tile.count; j += 2)
    tiles::join_rows(scratch.padded, Scratch::pairs(scratch.values) + j / 2 * scratch.padded, [&](int i, int begin) {
      return j + i < tile.count ? tiles::load_pairs(places.values[j + i], begin, scratch.value_size) : words{};
    });
  for (int j = 0; j < tile.count; j += kLanes)
    tiles::transpose_pairs(std::min(kLanes, tile.count - j), scratch.head_size, Scratch::pairs(scratch.keys) + j, tiles::kTile,
                           [&](int i, int begin) { return tiles::load_pairs(places.keys[j + i], begin, scratch.head_size); });
  tiles::Factors factors{factor, nullptr, nullptr};
  if constexpr (kIsInt8<C>) factors.keys = places.key_scales, factors.values = places.value_scales;
  for (int row = 0; row < rows; row += tiles::kRows)
    scratch.attend_pairs(sight, tile, row, std::min(tiles::kRows, rows - row), factors);
}

// Write the finished rows of an item with one head, which begin at row `at` of a Scratch.
template <class T>
void put_rows(const AttentionCall<T>& call, const Item& item, int rows, int at, const Scratch& scratch, float* partials) {
  const int size = call.value_size;
  float* partial = partials + item.partial;
  for (int row = 0; row < rows; ++row) {
    const float* sums = scratch.sums + (at + row) * scratch.padded;
    if (item.partial < 0) {
      write_row(call, item, row, sums, scratch.total(at + row), scratch.peak(at + row));
    } else {
      partial[row] = scratch.peak(at + row);
      partial[rows + row] = scratch.total(at + row);
      std::memcpy(partial + 2 * rows + row * size, sums, size * sizeof(float));
    }
  }
}

// The item of the `h`-th head alone.
template <class T>
Item one_head(const AttentionCall<T>& call, Item item, int h) {
  if (item.partial >= 0 && h > 0) item.partial += partial_floats((item.last - item.first) * call.heads_of(item.kv_head, h), call.value_size);
  item.kv_head += h;
  item.heads = 1;
  return item;
}

// Attend one item. `following` is the item that this thread will most likely get next, or null.
template <class T, class C>
void attend_item(const AttentionCall<T>& call, const Item& item, const Item* following, Scratch& scratch, float* partials) {
  const int group = call.heads_of(item.kv_head), rows = (item.last - item.first) * group, size = call.value_size;
  const int position = item.is_shared ? item.end : call.seq_lens[item.request] - call.query_lens[item.request] + item.first;
  const tiles::Sight sight{position, item.heads > 1 ? kMostRows : group, call.window, call.softcap * kLog2E, call.slopes != nullptr};
  const bool few = tiles::is_few<C>(rows, call.head_size) && tiles::is_few<C>(rows, size);
  // One block of rows per head, or several blocks of one head. Queries of few rows use the memory that other items use for keys.
  tiles::FewRows blocks[kMostRows / tiles::kRows];
  const int parts = item.heads > 1 ? item.heads : few ? (rows + tiles::kRows - 1) / tiles::kRows : 1;
  const auto head_of = [&](int h) { return one_head(call, item, h); };
  scratch.start(item.heads > 1 ? item.heads * tiles::kRows : rows);
  float* queries = scratch.keys;
  if (item.heads == 1) load_queries<C>(call, item, rows, few ? queries : nullptr, scratch);
  for (int p = 0; p < parts; ++p) {
    const int first = p * tiles::kRows, head = item.heads > 1 ? p : 0;
    const int count = item.heads > 1 ? call.heads_of(item.kv_head + p) : few ? std::min(tiles::kRows, rows - first) : rows;
    blocks[p] = {first, count, head * call.head_size, queries};
    for (int r = 0; call.slopes && r < count; ++r)
      scratch.slope(first + r) = kLog2E * call.slopes[call.first_head(item.kv_head + head) + (item.heads > 1 ? r : (first + r) % group)];
    if (item.heads > 1) load_queries<C>(call, head_of(p), count, queries, scratch);
    queries += count * call.head_size;
  }
  tiles::Places<C> both[2];  // This tile and the next.
  const int most = few ? tiles::kFewKeys : tiles::kTile;
  const auto tile_of = [most](const Item& of, int start) { return tiles::Tile{start, std::max(0, std::min(most, of.end - start))}; };
  find_tile(call, item, tile_of(item, item.begin), both[0]);
  for (int start = item.begin, turn = 0; start < item.end; start += most, turn = 1 - turn) {
    const tiles::Tile tile = tile_of(item, start);
    tiles::Tile next = tile_of(item, start + most);
    const Item* of = next.count > 0 ? &item : few || kBlocksAskAhead ? following : nullptr;
    tiles::Places<C>& then = both[1 - turn];
    if (of == following && following) next = tile_of(*following, following->begin);
    if (of) find_tile(call, *of, next, then);
    if (!few) {
      if (takes_pairs<T>(scratch)) {
        if constexpr (std::is_same_v<T, bf16>) attend_pairs(rows, sight, tile, both[turn], score_factor(call), scratch);
      } else {
        attend_blocks(rows, sight, tile, both[turn], then, of ? next.count : 0, scratch);
      }
      continue;
    }
    const int width = of ? of->heads * call.head_size : 0;
    for (int p = 0; p < parts; ++p) {
      const int begin = next.count * p / parts, end = next.count * (p + 1) / parts;
      tiles::attend_few(blocks[p], sight, tile, both[turn], tiles::Ahead<C>{then.keys + begin, then.keys + end, width},
                        tiles::Ahead<C>{then.values + begin, then.values + end, width}, scratch);
    }
  }
  for (int h = 0; h < item.heads; ++h) {
    const int first = blocks[h].first, count = item.heads > 1 ? blocks[h].count : rows;
    if (few) tiles::restore_order<C>(scratch.sums + first * scratch.padded, count * size);
    put_rows(call, head_of(h), count, first, scratch, partials);
  }
}

// The functions that depend on the cache's kind of number: those of bfloat16 are in attention.cpp, others in a library for each kind
// (attention_cache.cpp).
template <class T>
struct CacheKernels {
  // Heads [first, last) of one row.
  void (*store_keys)(const AttentionCall<T>&, int row, int first, int last);
  void (*store_values)(const AttentionCall<T>&, int row, int first, int last);
  void (*attend_item)(const AttentionCall<T>&, const Item&, const Item* following, Scratch&, float* partials);

  void store_row(const AttentionCall<T>& call, int row) const {
    store_keys(call, row, 0, call.kv_heads);
    store_values(call, row, 0, call.kv_heads);
  }
};

template <class T, class C>
constexpr CacheKernels<T> kernels_of() {
  return {store_keys<T, C>, store_values<T, C>, attend_item<T, C>};
}

// Those of the libraries that are loaded.
struct Caches {
  CacheKernels<bf16> narrow[kCacheKinds];  // By the kind of number.
  CacheKernels<float> floats;
};

// The library of this kind must be loaded.
template <class T>
CacheKernels<T> kernels_for(CacheKind kind);

// Merge the chunks of one head, which are `chunk_floats` apart and begin at `item`, with the chunks that it shares, into rows of `out`. A
// chunk in which a row sees no key has no weight.
template <class T>
void merge_head(const AttentionCall<T>& call, const Item& item, int64_t chunk_floats, Scratch& scratch, const float* partials) {
  const int group = call.heads_of(item.kv_head), rows = (item.last - item.first) * group, size = call.value_size;
  // Call work(peak, total, sums) for each chunk of a row.
  const auto each_chunk = [&](int row, auto work) {
    const auto go = [&](int64_t begin, int chunks, int64_t apart, int all, int row) {
      for (const float* chunk = partials + begin; chunks > 0; --chunks, chunk += apart)
        work(chunk[row], chunk[all + row], chunk + 2 * all + static_cast<int64_t>(row) * size);
    };
    go(item.partial, item.chunks, chunk_floats, rows, row);
    const int all = item.shared.tokens * group;
    go(item.shared.partial, item.shared.chunks, partial_floats(all, size), all, item.shared.token * group + row);
  };
  for (int row = 0; row < rows; ++row) {
    float peak = tiles::kNothing, total = 0.0f;
    each_chunk(row, [&](float highest, float, const float*) { peak = std::max(peak, highest); });
    std::fill_n(scratch.sums, size, 0.0f);
    each_chunk(row, [&](float highest, float weights, const float* sums) {
      const float weight = tiles::power_of_two(splat(highest - peak))[0];
      total += weight * weights;
      for (int i = 0; i < size; ++i) scratch.sums[i] += weight * sums[i];
    });
    write_row(call, item, row, scratch.sums, total, peak);
  }
}

template <class T>
void merge_item(const AttentionCall<T>& call, const Item& item, Scratch& scratch, const float* partials) {
  const int64_t chunk_floats = partial_floats((item.last - item.first) * call.heads_of(item.kv_head, item.heads), call.value_size);
  for (int h = 0; h < item.heads; ++h) merge_head(call, one_head(call, item, h), chunk_floats, scratch, partials);
}

// Compiled in attention.cpp.
extern template int64_t make_items(const AttentionCall<bf16>& call, int threads, std::vector<Item>& items);
extern template void merge_item(const AttentionCall<bf16>& call, const Item& item, Scratch& scratch, const float* partials);

}  // namespace piecework
