// The updates of a row depend on that row only, and steps and prompts compute them by the same code: a text does not change with its batch.
#include "lora.h"

#include <vector>

#include "rows.h"
#include "simd.h"
#include "threads.h"

namespace piecework {
namespace {

constexpr int kAtOnce = 4;     // Rows of `a` for which the row of x is read once.
constexpr int kPanelRows = 32; // Rows whose updates are computed together, as in linear.h.

floats widen(const bf16* from) {
  using shorts = uint16_t __attribute__((vector_size(2 * kLanes)));
  return bits_as<floats>(__builtin_convertvector(load<shorts>(from), words) << 16);
}

// In pairs, because a sum of one lane after another would wait for each addition.
float sum_of(floats v) {
  float parts[kLanes];
  store(parts, v);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) parts[i] += parts[i + width];
  return parts[0];
}

// Rounded to bfloat16, as in `as_rounded`.
floats round_lanes(floats v) {
  const words bits = bits_as<words>(v), rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u;
  const words is_number = (words)(v == v);
  return bits_as<floats>((rounded & is_number) | (~is_number & 0x7fc00000u));
}

// The products of x with `Count` rows of `a`.
template <int Count>
void dots(const bf16* a, const bf16* x, int columns, float scale, float* narrow) {
  floats sums[Count] = {};
  int i = 0;
#if defined(__AVX512BF16__)
  for (; i + 2 * kLanes <= columns; i += 2 * kLanes) {
    const __m512bh values = (__m512bh)load<floats>(x + i);
    for (int k = 0; k < Count; ++k)
      sums[k] = (floats)_mm512_dpbf16_ps((__m512)sums[k], (__m512bh)load<floats>(a + static_cast<int64_t>(k) * columns + i), values);
  }
#endif
  for (; i + kLanes <= columns; i += kLanes) {
    const floats values = widen(x + i);
    for (int k = 0; k < Count; ++k) sums[k] = multiply_add(sums[k], values, widen(a + static_cast<int64_t>(k) * columns + i));
  }
  for (int k = 0; k < Count; ++k) {
    float sum = sum_of(sums[k]);
    for (int rest = i; rest < columns; ++rest) sum += to_float(x[rest]) * to_float(a[static_cast<int64_t>(k) * columns + rest]);
    narrow[k] = sum * scale;
  }
}

// The updates of `Vectors` vectors of rows. Even and odd numbers have sums of their own, which do not wait for one another.
template <int Vectors>
void add_vectors(const bf16* b, int64_t stride, const float* narrow, int rank, const float* values, float* out) {
  floats even[Vectors] = {}, odd[Vectors] = {};
  int k = 0;
  for (; k + 2 <= rank; k += 2, b += 2 * stride) {
    const floats first = splat(narrow[k]), second = splat(narrow[k + 1]);
    for (int v = 0; v < Vectors; ++v) {
      even[v] = multiply_add(even[v], first, widen(b + v * kLanes));
      odd[v] = multiply_add(odd[v], second, widen(b + stride + v * kLanes));
    }
  }
  for (int v = 0; v < Vectors; ++v) {
    if (k < rank) even[v] = multiply_add(even[v], splat(narrow[k]), widen(b + v * kLanes));
    store(out + v * kLanes, round_lanes(load<floats>(values + v * kLanes)) + (even[v] + odd[v]));
  }
}

// The updates of whole vectors of rows, and then those of single rows.
void add_rows(const bf16* b, int64_t stride, const float* narrow, int rank, int count, const float* values, float* out) {
  constexpr int kVectors = kPanelRows / kLanes;
  int r = 0;
  for (; r + kPanelRows <= count; r += kPanelRows) add_vectors<kVectors>(b + r, stride, narrow, rank, values + r, out + r);
  for (; r + kLanes <= count; r += kLanes) add_vectors<1>(b + r, stride, narrow, rank, values + r, out + r);
  for (; r < count; ++r) {
    float sum = 0.0f;
    for (int k = 0; k < rank; ++k) sum += narrow[k] * to_float(b[k * stride + r]);
    out[r] = as_rounded(values[r]) + sum;
  }
}

struct Call {
  Adapters adapters;
  const bf16 *y, *x;
  const int32_t* slots;  // [tokens]; negative: no adapter.
  bf16* out;             // [tokens][rows]
  int64_t y_stride, x_stride;
  int32_t tokens;
};

// Tokens after one another use each panel of `b` while it is in the cache.
void update_block(const Call& call, int first, int last, std::vector<float>& narrow) {
  const Adapters& adapters = call.adapters;
  narrow.resize(static_cast<size_t>(last - first) * adapters.narrow_size());
  for (int t = first; t < last; ++t)
    if (call.slots[t] >= 0) shrink(adapters, call.slots[t], call.x + t * call.x_stride, narrow.data() + (t - first) * adapters.narrow_size());
  float values[kPanelRows], sums[kPanelRows];
  for (int row = 0; row < adapters.rows; row += kPanelRows) {
    const int count = std::min(kPanelRows, adapters.rows - row);
    for (int t = first; t < last; ++t) {
      const bf16* from = call.y + t * call.y_stride + row;
      bf16* to = call.out + static_cast<int64_t>(t) * adapters.rows + row;
      if (call.slots[t] < 0) {
        std::memcpy(to, from, count * sizeof(bf16));
        continue;
      }
      for (int r = 0; r < count; ++r) values[r] = to_float(from[r]);
      expand(adapters, call.slots[t], narrow.data() + (t - first) * adapters.narrow_size(), row, count, values, sums);
      for (int r = 0; r < count; ++r) to[r] = rounded(sums[r]);
    }
  }
}

}  // namespace

void shrink(const Adapters& adapters, int slot, const bf16* x, float* narrow) {
  for (int part = 0; part < adapters.parts; ++part) {
    const int place = slot * adapters.parts + part, rank = adapters.ranks[place];
    const float scale = adapters.scales[place];
    const bf16* a = adapters.a + static_cast<int64_t>(place) * adapters.rank * adapters.columns;
    float* to = narrow + part * adapters.rank;
    int k = 0;
    for (; k + kAtOnce <= rank; k += kAtOnce) dots<kAtOnce>(a + static_cast<int64_t>(k) * adapters.columns, x, adapters.columns, scale, to + k);
    for (; k < rank; ++k) dots<1>(a + static_cast<int64_t>(k) * adapters.columns, x, adapters.columns, scale, to + k);
  }
}

void expand(const Adapters& adapters, int slot, const float* narrow, int row, int count, const float* values, float* out) {
  const bf16* b = adapters.b + static_cast<int64_t>(slot) * adapters.rank * adapters.rows;
  for (int part = 0, begin = 0; part < adapters.parts; begin = adapters.ends[part++]) {
    const int first = std::max(row, begin), last = std::min(row + count, adapters.ends[part]), rank = adapters.ranks[slot * adapters.parts + part];
    if (first >= last) continue;
    const int place = first - row;
    add_rows(b + first, adapters.rows, narrow + part * adapters.rank, rank, last - first, values + place, out + place);
  }
}

}  // namespace piecework

extern "C" void piecework_lora(const void* arguments, int threads) {
  using namespace piecework;
  const Call& call = *static_cast<const Call*>(arguments);
  constexpr int kBlock = 16;  // Tokens of a block.
  const int block = std::max(1, std::min(kBlock, call.tokens / threads)), blocks = (call.tokens + block - 1) / block;
#pragma omp parallel num_threads(std::min(threads, blocks))
  {
    std::vector<float> narrow;
#pragma omp for schedule(dynamic)
    for (int i = 0; i < blocks; ++i) update_block(call, i * block, std::min(call.tokens, (i + 1) * block), narrow);
  }
}
