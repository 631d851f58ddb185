// The products of a panel, scaled and with their bias, for each form of x; and rows of x in the form that a linear layer needs.
#include <vector>

#include "linear.h"

namespace piecework {

template <class Number>
Tile Multiplier::panel(const Linear& linear, const RowsOf<Number>& x, int panel, int first, int last) {
  if (linear.format == kMixed) {
    int number = panel;
    const Linear run = run_of(linear, number);
    return of_run(run, number, x, panel * kPanel, first, last);
  }
  return of_run(linear, panel, x, panel * kPanel, first, last);
}

// A panel that begins at row `row` of the layer.
template <class Number>
Tile Multiplier::of_run(const Linear& linear, int panel, const RowsOf<Number>& x, int row, int first, int last) {
  const int tokens = last - first;
  const size_t size = static_cast<size_t>(tokens) * kPanel;
  if (tile_.size() < size) tile_.resize(size);
  const uint8_t* weight = linear.weight + panel * panel_bytes(linear.format, linear.columns);
  const bool is_scaled = row_scales(linear.format, linear.columns) > 0, by_segments = linear.format == kFp8Blocks || x.groups > 1;
  const int step = by_segments ? kScaledColumns : kColumnsAtOnce;
  if (by_segments && part_.size() < size) part_.resize(size);
  for (int begin = 0; begin < linear.columns; begin += step) {
    const Span span{begin, std::min(step, linear.columns - begin), first, tokens};
    multiply(linear, weight, x, span, by_segments ? part_.data() : tile_.data(), begin > 0 && !by_segments);
    if (by_segments) scale(linear, weight, x, span, begin / step, part_.data(), begin > 0);
  }
  if (is_scaled && !by_segments) scale(linear, weight, x, Span{0, linear.columns, first, tokens}, 0, tile_.data(), false);
  const Tile tile{tile_.data(), tokens, row, std::min(kPanel, linear.rows - row)};
  tile.each([&](int t, float* values) {
    if constexpr (std::is_same_v<Number, half>)
      for (int i = 0; i < tile.count; ++i) values[i] *= x.factors[first + t];
    if (linear.bias)
      for (int i = 0; i < tile.count; ++i) values[i] += to_float(linear.bias[row + i]);
  });
  return tile;
}

template <class Number>
void Multiplier::scale(const Linear& linear, const uint8_t* panel, const RowsOf<Number>& x, const Span& span, int segment, const float* numbers,
                       bool adds) {
  const float* by = scales_of_rows(linear, panel) + (linear.format == kFp8Blocks ? segment * kPanel : 0);
  for (int t = 0; t < span.tokens; ++t, numbers += kPanel) {
    const float factor = x.scale(span.first + t, segment);
    float* to = tile_.data() + static_cast<size_t>(t) * kPanel;
#pragma omp simd
    for (int i = 0; i < kPanel; ++i) to[i] = (adds ? to[i] : 0.0f) + numbers[i] * factor * by[i];
  }
}

template Tile Multiplier::panel(const Linear&, const Rows&, int, int, int);
template Tile Multiplier::panel(const Linear&, const RowsOf<bf16>&, int, int, int);
template Tile Multiplier::panel(const Linear&, const RowsOf<half>&, int, int, int);
template Tile Multiplier::panel(const Linear&, const RowsOf<byte>&, int, int, int);
template Tile Multiplier::panel(const Linear&, const RowsOf<GroupedColumns>&, int, int, int);

template <class Work>
void InputRows::as(const Linear& linear, Work&& work) const {
  const auto& [scale, group] = linear.input;
  const float* scales = group == 0 ? nullptr : scale ? scale : scales_;
  const int groups = group == 0 || scale ? 0 : linear.columns / group;
  void* memory = memory_;
  switch (way_of(linear, tokens_)) {
    case kBytes: return work(RowsOf<byte>{static_cast<byte*>(memory), tokens_, nullptr, scales, groups});
    case kIntegers: return work(RowsOf<GroupedColumns>{static_cast<GroupedColumns*>(memory), tokens_, nullptr, nullptr, 0, rounds_pairs(linear)});
    // Not compiled if the CPU lacks the instructions: `way_of` never returns it, and compiling takes long.
    case kHalves:
      if constexpr (kHasHalves) work(RowsOf<half>{static_cast<half*>(memory), tokens_, factors_, scales, groups});
      return;
    case kDots:
      if constexpr (kHasDots) work(RowsOf<bf16>{static_cast<bf16*>(memory), tokens_, nullptr, scales, groups});
      return;
    case kFloats: return work(Rows{memory_, tokens_, nullptr, scales, groups});
  }
}

template <class Number>
const Number* InputRows::quantized(const Linear& linear, int groups, int t, const bf16* values) {
  static thread_local std::vector<Number> numbers;
  numbers.resize(linear.columns);
  quantize(values, linear.columns, linear.input, numbers.data(), scales_ + static_cast<size_t>(t) * groups);
  return numbers.data();
}

void InputRows::set(const Linear& linear, int t, const bf16* values) {
  if (linear.order) {
    static thread_local std::vector<bf16> ordered;
    ordered.resize(linear.columns);
    for (int k = 0; k < linear.columns; ++k) ordered[k] = values[linear.order[k]];
    values = ordered.data();
  }
  as(linear, [&](auto rows) {
    if constexpr (std::is_same_v<decltype(rows), RowsOf<byte>>)
      rows.set(t, quantized<int8_t>(linear, rows.groups, t, values), linear.columns);
    else if (linear.input.group && !std::is_same_v<decltype(rows), RowsOf<GroupedColumns>>)
      rows.set(t, quantized<fp8>(linear, rows.groups, t, values), linear.columns);
    else
      rows.set(t, values, linear.columns);
  });
}

void InputRows::set_parts(const Linear& linear, int first, int last, int column, const bf16* x, int count) {
  as(linear, [&](auto rows) {
    for (int t = first; t < last; ++t) rows.set_part(t, column, x + static_cast<int64_t>(t) * linear.columns + column, count);
  });
}

void InputRows::prepare(const Linear& linear, Multiplier& multiplier) const {
  as(linear, [&](auto rows) { multiplier.prepare(linear, rows); });
}

Products InputRows::products(const Linear& linear, Multiplier& multiplier) const {
  Products made{nullptr, linear, multiplier, nullptr, tokens_, nullptr, nullptr, 0, false};
  as(linear, [&](auto rows) {
    using Number = std::remove_pointer_t<decltype(rows.x)>;
    made.x = rows.x, made.factors = rows.factors, made.scales = rows.scales, made.groups = rows.groups, made.in_pairs = rows.in_pairs;
    made.make = [](const Products& of, int panel) {
      const RowsOf<Number> rows{static_cast<Number*>(of.x), of.tokens, of.factors, of.scales, of.groups, of.in_pairs};
      return of.multiplier.panel(of.linear, rows, panel, 0, of.tokens);
    };
  });
  return made;
}

}  // namespace piecework
