// Linear layers as C functions: weights laid out in panels, and products with any number of rows.
#include "format.h"
#include "linear.h"

#include <unistd.h>

#include <limits>

#include "shares.h"
#include "threads.h"
#include "weights.h"

namespace piecework {
namespace {

constexpr int kAllBytes = 64 << 20;  // of x that are laid out before the first product
constexpr int64_t kAlone = 1 << 18;  // products that take no longer than waking another thread

// 0: not known.
long second_cache() {
#if defined(_SC_LEVEL2_CACHE_SIZE)
  static const long bytes = std::max(0L, sysconf(_SC_LEVEL2_CACHE_SIZE));
  return bytes;
#else
  return 0;
#endif
}

// Bytes of a block of columns of x, which stay in a core's second cache while panels go by.
template <class Number>
int chunk_bytes(int blocks) {
  const long cache = second_cache(), usual = std::clamp(cache, 1L << 20, 2L << 20) / 8 * 5;
  // Where that cache is small, all blocks of a wide x come from further away for each panel.
  const bool is_small = kLanes == 8 && std::is_same_v<Number, GroupedColumns> && cache > 0 && cache < 1L << 20;
  return static_cast<int>(is_small ? std::min(usual, 4 * cache / blocks) : usual);
}

// work(r, k) for each number of a panel, some lines of each row after another, so that what is written stays in the cache meanwhile.
template <class Work>
void each_number(int count, int columns, Work work) {
  constexpr int kAtOnce = 256;
  for (int begin = 0; begin < columns; begin += kAtOnce)
    for (int r = 0; r < count; ++r)
      for (int k = begin; k < std::min(columns, begin + kAtOnce); ++k) work(r, k);
}

void pack_bf16(const bf16* const* rows, int count, int columns, uint8_t* out) {
  uint16_t* to = reinterpret_cast<uint16_t*>(out);
  each_number(count, columns, [&](int r, int k) { to[(k / 2 * kPanel + r) * 2 + k % 2] = rows[r][k].bits; });
}

// Numbers and 128.
void pack_int8(const int8_t* const* rows, int count, int columns, uint8_t* out) {
  each_number(count, columns, [&](int r, int k) { out[(k / 4 * kPanel + r) * 4 + k % 4] = static_cast<uint8_t>(rows[r][k] + 128); });
}

// Numbers as they are.
void pack_fp8(const uint8_t* const* rows, int count, int columns, uint8_t* out) {
  each_number(count, columns, [&](int r, int k) { out[k * kPanel + r] = rows[r][k]; });
}

// The scales of rows [count][columns], of fp8 those of numbers that are a 256th of what they stand for: a NaN where the row holds one.
void pack_scales(const float* scales, int columns, const uint8_t* const* rows, int count, int row_bytes, bool is_fp8, float* out) {
  for (int r = 0; r < count; ++r) {
    bool has_nan = false;
    if (is_fp8)
      for (int k = 0; k < row_bytes; ++k) has_nan |= (rows[r][k] & 0x7f) == 0x7f;
    for (int g = 0; g < columns; ++g)
      out[g * kPanel + r] = has_nan ? std::numeric_limits<float>::quiet_NaN() : scales[r * columns + g] * (is_fp8 ? 256.0f : 1.0f);
  }
}

// What `row_powers` gives, kept where it and its inverse are normal numbers.
void write_row_powers(const Largest& largest, uint8_t* to) {
  for (int r = 0; r < kPanel; ++r, to += sizeof(float)) {
    const uint32_t exponent = std::min(std::max(largest.bits[r] >> 23, 2u), 252u) << 23;
    std::memcpy(to, &exponent, sizeof exponent);
  }
}

void write_bf16(const float* values, int count, bf16* to) {
  if (count == kPanel) {
    for (int i = 0; i < kPanel; i += kWide) store_bf16(to + i, load<floats>(values + i), load<floats>(values + i + kLanes));
    return;
  }
  for (int i = 0; i < count; ++i) to[i] = from_float<bf16>(values[i]);
}

// Memory that a thread keeps between calls.
template <class Number>
Number* kept(Aligned<Number>& memory, size_t count) {
  if (memory.size() < count) memory.resize(count);
  return memory.data();
}

// Rows of x that lie `stride` numbers apart, and their scales as in RowsOf.
template <class Number>
struct Source {
  const Number* x;
  int64_t stride;
  const float* scales = nullptr;
  int groups = 0;
};

template <class Number, class Given, class Write>
void multiply(const Linear& linear, const Source<Given>& x, int tokens, int most_threads, Write write) {
  static thread_local Aligned<Number> memory;
  static thread_local Aligned<float> factors;
  constexpr int row_bytes = sizeof(Number) * kStrideOf<Number>;
  const int panels = (linear.rows + kPanel - 1) / kPanel;
  const int at_once = std::max(kRowsAtOnce<Number>, kAllBytes / (row_bytes * RowsOf<Number>::blocks(linear.columns)));
  const int threads = static_cast<int64_t>(tokens) * linear.rows * linear.columns < kAlone ? 1 : most_threads;
  for (int start = 0; start < tokens; start += at_once) {
    const int count = std::min(at_once, tokens - start);
    const RowsOf<Number> rows{kept(memory, RowsOf<Number>::size(count, linear.columns)), count, kept(factors, count),
                                x.scales + static_cast<int64_t>(start) * x.groups, x.groups,
                                std::is_same_v<Number, GroupedColumns> && rounds_pairs(linear)};
    // Chunks of whole blocks of rows, and so many that every thread gets a share.
    const int blocks = (count + kRowsAtOnce<Number> - 1) / kRowsAtOnce<Number>, column_blocks = RowsOf<Number>::blocks(linear.columns);
    const int most = std::max(1, chunk_bytes<Number>(column_blocks) / (row_bytes * kRowsAtOnce<Number>));
    const int chunks = std::max((blocks + most - 1) / most, std::min(blocks, (2 * threads + panels - 1) / panels));
    const int size = (blocks + chunks - 1) / chunks * kRowsAtOnce<Number>;
    Shares shares(threads);
#pragma omp parallel num_threads(threads)
    {
      static thread_local Multiplier multiplier;
#pragma omp for schedule(static)
      for (int t = 0; t < count; ++t) rows.set(t, x.x + (start + t) * x.stride, linear.columns);
      multiplier.prepare(linear, rows);
      shares.each(omp_get_thread_num(), omp_get_num_threads(), chunks * panels, [&](int item) {
        const int first = item / panels * size, last = std::min(first + size, count);
        if (first >= last) return;
        const Tile tile = multiplier.panel(linear, rows, item % panels, first, last);
        tile.each([&](int t, const float* values) { write(start + first + t, tile.row, values, tile.count); });
      });
    }
  }
}

}  // namespace
}  // namespace piecework

// Bytes of a panel.
extern "C" int piecework_panel_bytes(int format, int columns) { return static_cast<int>(piecework::panel_bytes(format, columns)); }

// rows: `count` pointers to rows of W, and in formats that have them their scales [count][row_scales].
extern "C" void piecework_pack(int format, const void* const* rows, int count, int columns, const float* scales, void* out, int threads) {
  using namespace piecework;
  const int64_t bytes = panel_bytes(format, columns);
  const int row_size = row_scales(format, columns);
#pragma omp parallel for num_threads(threads)
  for (int first = 0; first < count; first += kPanel) {
    uint8_t* to = static_cast<uint8_t*>(out) + first / kPanel * bytes;
    const int size = std::min(kPanel, count - first);
    const auto* bytes_of = reinterpret_cast<const uint8_t* const*>(rows + first);
    auto* powers = reinterpret_cast<float*>(to + group_bytes(format, columns));
    if (size < kPanel || columns % 2 == 1 || format >= kInt8) std::memset(to, 0, bytes);
    if (format == kBf16) pack_bf16(reinterpret_cast<const bf16* const*>(rows + first), size, columns, to);
    pack_blocks(format, bytes_of, size, columns, to);
    if (format == kInt8) pack_int8(reinterpret_cast<const int8_t* const*>(rows + first), size, columns, to);
    if (format == kFp8 || format == kFp8Blocks) pack_fp8(bytes_of, size, columns, to);
    if (row_size > 0)
      pack_scales(scales + static_cast<int64_t>(first) * row_size, row_size, bytes_of, size, columns, format >= kFp8, powers + kPanel);
    if (format == kInt8) continue;
    Largest largest;
    kernels_of(format).find_largest(to, columns, largest);
    write_row_powers(largest, reinterpret_cast<uint8_t*>(powers));
  }
}

// out [tokens, rows] = x [tokens, columns], whose rows are `stride` numbers apart, times W^T. x is bfloat16, or quantised as W is: then
// with `groups` scales a row, or, for 0, one for all.
extern "C" void piecework_linear(const void* linear, const void* x, int64_t stride, const float* scales, int groups, void* out, int tokens,
                                 int threads) {
  using namespace piecework;
  const Linear& layer = *static_cast<const Linear*>(linear);
  const auto write = [&](int t, int n, const float* values, int count) {
    write_bf16(values, count, static_cast<bf16*>(out) + static_cast<int64_t>(t) * layer.rows + n);
  };
  const Way way = way_of(layer, tokens);
  if (way == kIntegers) return multiply<GroupedColumns>(layer, Source<bf16>{static_cast<const bf16*>(x), stride}, tokens, threads, write);
  const auto multiplied = [&](auto source) {
    if (way == kHalves) return multiply<half>(layer, source, tokens, threads, write);
    if (way == kDots) return multiply<bf16>(layer, source, tokens, threads, write);
    multiply<float>(layer, source, tokens, threads, write);
  };
  if (way == kBytes) return multiply<byte>(layer, Source<int8_t>{static_cast<const int8_t*>(x), stride, scales, groups}, tokens, threads, write);
  if (scales) return multiplied(Source<fp8>{static_cast<const fp8*>(x), stride, scales, groups});
  multiplied(Source<bf16>{static_cast<const bf16*>(x), stride});
}
