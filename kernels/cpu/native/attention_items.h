// Splits the attention of a step into items, which threads take one by one.
//
// T tokens of a step, B requests, H query heads, K key/value heads, D numbers of a key, E of a value, S tokens in a page. The rows of an
// item are the query heads of its key/value head, for one token after another.
//
// Neighbouring decodes that begin with the same pages share items over these pages. Their queries are rows of one block, which reads each
// key once (cascade attention, Ye et al., flashinfer, arXiv:2501.01005).
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "attention_cache.h"

namespace piecework {

constexpr int kMostRows = 192;    // Query rows of an item: tokens times the query heads of one key/value head.
constexpr int kLeastRows = 48;    // Rows for which loading keys is worth it, if many threads share few rows.
constexpr int kLeastChunk = 512;  // Keys for which a separate item is worth it.
constexpr int kLeastShared = 64;  // Keys for which sharing is worth it.
constexpr bool kCutsRows = kLanes == 8;  // Whether chunks of a decode have all heads. Not tried with AVX-512.

template <class T>
struct AttentionCall {
  const T *q, *k, *v;  // [T, H, D], [T, K, D], [T, K, E]; rows are `*_stride` numbers apart.
  T* out;              // [T, H, E]
  // [pages, S, K, D] and [pages, S, K, E] of `cache_kind`. In int8, the numbers of a page are followed by its scales, [K, S] bfloat16. E is
  // D, or both caches are the same and values are the first E numbers of keys.
  void *k_cache, *v_cache;
  const int64_t* slots;  // [tokens]: page * S + offset
  const int64_t* table;  // [B, table_stride]
  const int32_t *query_lens, *seq_lens;  // [B]
  const float *sinks, *slopes;           // [H]: scores without values; decrease of scores per key of distance; or null.
  fp8* numbers;                          // [T, H, E] instead of `out`: the result in T divided by out_scale [1]; or null.
  const float* out_scale;
  int64_t q_stride, k_stride, v_stride, out_stride, table_stride;
  int32_t requests, tokens, heads, kv_heads, head_size, value_size, page_size, window;  // D, E; window 0 means all keys.
  int32_t group, skipped;  // Query heads per key/value head; number of them that the first one lacks.
  CacheKind cache_kind;
  float scale, k_scale, v_scale;  // k_scale, v_scale are 1 except for float8.
  float softcap;                  // Limit of scores; 0 means none.

  // Numbers of a page, without the scales after them.
  int64_t page_numbers() const { return static_cast<int64_t>(page_size) * kv_heads * head_size; }

  // The first query head of a key/value head. The last key/value head has the rest of the query heads.
  int first_head(int kv_head) const { return std::max(0, kv_head * group - skipped); }
  int heads_of(int kv_head) const { return (kv_head + 1 == kv_heads ? heads : first_head(kv_head + 1)) - first_head(kv_head); }
  int heads_of(int kv_head, int count) const { return first_head(kv_head + count - 1) + heads_of(kv_head + count - 1) - first_head(kv_head); }
  int most_heads() const { return std::max(std::min(group, heads), heads_of(kv_heads - 1)); }
};

// What decodes with the same first pages share.
struct Shared {
  int64_t partial = -1;       // Offset of the unmerged results of its chunks.
  int32_t chunks = 0;
  int32_t token = 0, tokens = 0;  // Number of this decode among those that share.
};

// Keys [begin, end) of `heads` key/value heads for the query tokens [first, last) of a request. `row` is the step's token of `first`. With
// several heads there is one token, whose keys are contiguous.
struct Item {
  int32_t request, kv_head, heads, first, last, row, begin, end;
  int64_t partial;  // Offset of its unmerged result; -1 if it is the only chunk.
  int32_t chunks;   // Number of chunks, in the first item, which merges them; 0 in the others.
  bool is_shared;   // Whether each token is the only one of its request, and all see these keys.
  Shared shared;    // Set in the item that merges.
};

// Size of the results of chunks, head after head: the peak, the total and E sums of each row.
inline int64_t partial_floats(int rows, int value_size) { return static_cast<int64_t>(rows) * (value_size + 2); }

// Query tokens of an item: enough to fill its rows, or fewer if threads would be idle.
template <class T>
int tokens_in_item(const AttentionCall<T>& call, int threads) {
  const int64_t group = call.most_heads(), all = static_cast<int64_t>(call.heads) * call.tokens;
  int64_t rows = kMostRows;
  while (rows / 2 >= kLeastRows && all / rows < 4 * threads) rows /= 2;
  return static_cast<int>(std::max<int64_t>(1, rows / group));
}

// Decodes [first, last), whose first `keys` keys are the same.
struct Run {
  int32_t first, last, keys;
};

// The requests from `first` on that share keys. If the next one does not, the run has one request and 0 keys.
template <class T>
Run find_run(const AttentionCall<T>& call, int first) {
  const auto whole = [&](int b) { return call.query_lens[b] == 1 ? (call.seq_lens[b] - 1) / call.page_size : 0; };
  const int least = (kLeastShared + call.page_size - 1) / call.page_size;
  const int most = std::max(1, kMostRows / call.most_heads());
  const int64_t* pages = call.table + first * call.table_stride;
  // Shared items do not know the position of each row's query, so windows and slopes exclude sharing.
  int shared = call.window > 0 || call.slopes || is_batch_invariant() ? 0 : whole(first), last = first + 1;
  for (; shared >= least && last < call.requests && last - first < most; ++last) {
    const int64_t* others = call.table + last * call.table_stride;
    const int same = static_cast<int>(std::mismatch(pages, pages + std::min(shared, whole(last)), others).first - pages);
    // A request that shares little would reduce what the others share.
    if (same < least || 2 * same < shared) break;
    shared = last == first + 1 ? same : std::min(shared, same);
  }
  return {first, last, last > first + 1 ? shared * call.page_size : 0};
}

// Whether all heads of a decode may be one item with few rows each (attention_few.h), which reads contiguous memory. Not for int8, whose
// scales are separate.
template <class T>
bool takes_all_heads(const AttentionCall<T>& call) {
  const auto is_whole = [](int size) { return size % (2 * kLanes) == 0; };
  return call.most_heads() <= std::min(tiles::kFewRows, tiles::kRows) && call.kv_heads * tiles::kRows <= kMostRows &&
         call.heads <= tiles::kTile && is_whole(call.head_size) && is_whole(call.value_size) && call.cache_kind != CacheKind::kInt8;
}

// Make the items, the longest first, so that no thread waits long at the end.
template <class T>
int64_t make_items(const AttentionCall<T>& call, int threads, std::vector<Item>& items) {
  const int block = tokens_in_item(call, threads);
  const auto first_key = [&](int b, int first) {
    return call.window > 0 ? std::max(0, call.seq_lens[b] - call.query_lens[b] + first + 1 - call.window) : 0;
  };
  static thread_local std::vector<Run> runs;
  runs.clear();
  for (int b = 0; b < call.requests; b = runs.back().last) runs.push_back(find_run(call, b));
  // Several items per thread, so that no thread waits long for the last one.
  int64_t keys = 0, shared_work = 0;
  for (const Run& run : runs) {
    shared_work += static_cast<int64_t>(run.keys) * (run.last - run.first);
    for (int b = run.first; b < run.last; ++b)
      for (int first = 0; first < call.query_lens[b]; first += block)
        keys += call.seq_lens[b] - call.query_lens[b] + std::min(first + block, call.query_lens[b]) - first_key(b, first) - run.keys;
  }
  const int64_t parts = 4 * std::max(1, threads);
  const int64_t fair = is_batch_invariant() ? kLeastChunk : std::max<int64_t>(kLeastChunk, keys * call.kv_heads / parts);
  const int64_t fair_work = std::max<int64_t>(kLeastChunk, (keys + shared_work) * call.kv_heads / parts);
  const bool all_heads = takes_all_heads(call), many = all_heads && call.requests >= 2 * threads;
  // Split long decodes too, if there are enough chunks for all threads.
  const bool cuts_rows = kCutsRows && all_heads && keys >= 2 * threads * kLeastChunk;
  int64_t floats = 0;
  items.clear();
  // Add the chunks of one key/value head. Chunks that wait to be merged are stored one after another.
  const auto cut = [&](Item item, int64_t chunks, bool waits) {
    const int from = item.begin, end = item.end;
    const int size = tiles::round_up(static_cast<int>((end - from + chunks - 1) / chunks), tiles::kTile);
    const int made = (end - from + size - 1) / size;
    for (int chunk = 0; chunk < made; ++chunk) {
      item.begin = from + chunk * size, item.end = std::min(end, item.begin + size);
      item.partial = made > 1 || waits ? floats : -1;
      item.chunks = item.partial >= 0 && chunk == 0 && !item.is_shared ? made : 0;
      items.push_back(item);
      if (item.partial >= 0) floats += partial_floats((item.last - item.first) * call.heads_of(item.kv_head, item.heads), call.value_size);
    }
    return made;
  };
  for (int n = 0, row = 0; n < static_cast<int>(runs.size()); ++n) {
    const Run& run = runs[n];
    const int tokens = run.last - run.first;
    const bool is_alone = run.keys == 0 && call.query_lens[run.first] == 1;
    const bool is_one = is_alone && (cuts_rows || (many && (call.seq_lens[run.first] - first_key(run.first, 0)) / fair <= 1));
    const int step = is_one ? call.kv_heads : 1;
    const int64_t chunk = is_one && cuts_rows ? std::max<int64_t>(kLeastChunk, is_batch_invariant() ? 0 : keys / parts) : fair;
    for (int head = 0; head < call.kv_heads; head += step) {
      Shared shared;
      if (run.keys > 0) {
        shared.partial = floats, shared.tokens = tokens;
        const int64_t chunks = std::max<int64_t>(1, std::min<int64_t>(run.keys / kLeastShared, static_cast<int64_t>(run.keys) * tokens / fair_work));
        shared.chunks = cut({run.first, head, 1, 0, tokens, row, 0, run.keys, -1, 0, true, {}}, chunks, true);
      }
      for (int b = run.first, at = row; b < run.last; at += call.query_lens[b], ++b, ++shared.token) {
        for (int first = 0; first < call.query_lens[b]; first += block) {
          const int last = std::min(first + block, call.query_lens[b]), end = call.seq_lens[b] - call.query_lens[b] + last;
          const int begin = std::max(run.keys, first_key(b, first));
          cut({b, head, step, first, last, at + first, begin, end, -1, 0, false, shared}, std::max<int64_t>(1, (end - begin) / chunk), run.keys > 0);
        }
      }
    }
    for (int b = run.first; b < run.last; ++b) row += call.query_lens[b];
  }
  const auto work = [&](const Item& item) {
    return static_cast<int64_t>(item.last - item.first) * item.heads * call.heads_of(item.kv_head) * (item.end - item.begin);
  };
  std::stable_sort(items.begin(), items.end(), [&](const Item& a, const Item& b) { return work(a) > work(b); });
  return floats;
}

}  // namespace piecework
