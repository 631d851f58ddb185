// y = x W^T + b for rows of x and panels of W in the formats of weights.h.
//
// Few rows by float32 FMAs on numbers that are widened. Many rows in the fastest of the ways that the CPU has: these, dot products of
// bfloat16, or FMAs of float16. On Emerald Rapids they make 176, 86 and 352 GFLOP/s a core (lab/performance-cpu.md); others have twice as
// many dot products as FMAs, or no float16. Weights of 8 bits with a scale a row are multiplied by x of 8 bits: int8 by products of whole
// numbers (bytes.cpp), e4m3 in the same ways as bfloat16, which holds each of its numbers.
#pragma once
#include <algorithm>

#include "inputs.h"
#include "lora.h"
#include "rows.h"
#include "simd.h"

namespace piecework {

struct Linear {
  const uint8_t* weight;  // panels
  const bf16* bias;       // [rows], or null
  int32_t rows, columns, format;
  Quantization input;    // of x, where it is quantised here; a group of 0: it is not
  const int64_t* order;  // [columns], where the columns of x are first brought into another order: which goes where each is
  const Adapters* adapters;  // Of decode steps alone, or null.
};

constexpr int kPanel = 32;  // rows of W that lie side by side

// Formats of panels. Blocks of GGUF files have their numbers there (gguf/formats.h), which lie between kBf16 and kMixed.
enum Format : int32_t {
  kBf16 = 0,
  kNvfp4 = 40,  // GGUF's number, the one block format with scales of rows
  kMixed = 58,
  kInt8 = 59,
  kFp8 = 60,
  kFp8Blocks = 61,
  kRows = 62  // no panels: rows of bfloat16 one after another, of an embedding alone
};

// Panels one after another that have one format. A weight of kMixed begins with its runs, in the order of its rows.
struct PanelRun {
  int32_t panels, format;
  int64_t offset;  // of the first panel, in bytes from where the runs begin
};

constexpr int kMostRuns = 8;  // those that are not there have no panels

constexpr int kScaledColumns = 128;  // that have one scale, of kFp8Blocks, and of x where it has several

// Scales of a row of W: those of the other formats are parts of their groups.
inline int row_scales(int32_t format, int columns) {
  return format == kFp8Blocks ? (columns + kScaledColumns - 1) / kScaledColumns : format >= kInt8 || format == kNvfp4 ? 1 : 0;
}

// Bytes of the groups of a panel, and of a panel.
int64_t group_bytes(int32_t format, int columns);
inline int64_t panel_bytes(int32_t format, int columns) {
  return group_bytes(format, columns) + (1 + row_scales(format, columns)) * kPanel * sizeof(float);
}

// After the groups, [32]: for each row the largest power of two that is at most its largest number, with whose inverse it fits float16.
inline const float* row_powers(const Linear& linear, const uint8_t* panel) {
  return reinterpret_cast<const float*>(panel + group_bytes(linear.format, linear.columns));
}

// The last of a panel, [row_scales][32].
inline const float* scales_of_rows(const Linear& linear, const uint8_t* panel) { return row_powers(linear, panel) + kPanel; }

// Columns of a panel's groups, from the first of which on they lie at `groups`, as float32 [columns][32]; an odd one brings the next
// (products.cpp).
void widen(int32_t format, const uint8_t* groups, int columns, float* out);

// Row `row` of a table in one of the formats but kMixed and those of kInt8 and above, rounded to bfloat16 (embedding.cpp).
void embed(const Linear& table, int64_t row, bf16* to);

// What has one panel of a linear, and the panel's number there.
inline Linear run_of(const Linear& linear, int& panel) {
  const PanelRun* run = reinterpret_cast<const PanelRun*>(linear.weight);
  Linear one = linear;
  for (; panel >= run->panels; ++run) panel -= run->panels;
  one.format = run->format;
  one.weight += run->offset;
  return one;
}

// work(format) with those of its panels.
template <class Work>
inline void each_format(const Linear& linear, Work&& work) {
  if (linear.format != kMixed) return work(linear.format);
  for (int i = 0; i < kMostRuns; ++i)
    if (const PanelRun& run = reinterpret_cast<const PanelRun*>(linear.weight)[i]; run.panels > 0) work(run.format);
}

enum Way : int32_t { kFloats = 0, kDots = 1, kHalves = 2, kBytes = 3, kIntegers = 4 };

// Rows of x whose sums fit the registers: two vectors of float32 each, or one of float16.
template <class Number>
constexpr int kRowsAtOnce = std::is_same_v<Number, half> ? 24 : kBlockRows;

// Results of a panel: values [tokens][32], of which `count` count, for the rows of W from `row` on. They last until the multiplier's next ones.
struct Tile {
  float* values;
  int tokens, row, count;

  // work(token, values) for each token.
  template <class Work>
  void each(Work&& work) const {
    for (int t = 0; t < tokens; ++t) work(t, values + static_cast<size_t>(t) * kPanel);
  }
};

// What one thread needs beside the numbers themselves.
class Multiplier {
 public:
  // To be called before the panels of a linear.
  void prepare(const Linear& linear, const Rows& x);
  void prepare(const Linear&, const RowsOf<bf16>&) {}
  void prepare(const Linear&, const RowsOf<half>&) {}
  void prepare(const Linear&, const RowsOf<byte>&) {}
  void prepare(const Linear&, const RowsOf<GroupedColumns>&) {}

  // The products of one panel of W with the rows [first, last) of x (multiplier.cpp).
  template <class Number>
  Tile panel(const Linear& linear, const RowsOf<Number>& x, int panel, int first, int last);

 private:
  // Columns of a panel that lie in one block, and rows of x.
  struct Span {
    int begin, columns, first, tokens;
  };

  template <class Number>
  Tile of_run(const Linear& linear, int panel, const RowsOf<Number>& x, int row, int first, int last);

  // to [tokens][32] = or += the products of a panel with rows of x.
  void multiply(const Linear& linear, const uint8_t* panel, const Rows& x, const Span& span, float* to, bool adds);

  // The same by dot products of bfloat16 (dots.cpp), to which weights of other formats are rounded.
  void multiply(const Linear& linear, const uint8_t* panel, const RowsOf<bf16>& x, const Span& span, float* to, bool adds);

  // The same by FMAs of float16 (halves.cpp), to which weights of 4 and 8 bits are rounded, and sums of a few products.
  void multiply(const Linear& linear, const uint8_t* panel, const RowsOf<half>& x, const Span& span, float* to, bool adds);

  // The same of int8 (bytes.cpp): sums of whole numbers are exact.
  void multiply(const Linear& linear, const uint8_t* panel, const RowsOf<byte>& x, const Span& span, float* to, bool adds);

  // The same of x in groups of 8 bits (integers.cpp).
  void multiply(const Linear& linear, const uint8_t* panel, const RowsOf<GroupedColumns>& x, const Span& span, float* to, bool adds);

  // The tile = or += numbers [tokens][32] times the scales that a segment of columns has in W and in x.
  template <class Number>
  void scale(const Linear& linear, const uint8_t* panel, const RowsOf<Number>& x, const Span& span, int segment, const float* numbers,
             bool adds);

  Aligned<float> tile_, part_, widened_;
  Aligned<float> x_sums_[2];  // of each 16 and of each 32 columns
  Aligned<uint32_t> pairs_;
  Aligned<half> halves_;
};

// The way in which products with so many rows of x are made: int8 by products of bytes, others by FMAs of float32 where there are few, else as this CPU does it fastest,
// which is found out once, by trying all that it has.
Way way_of(const Linear& linear, int tokens);

// Whether x in groups of 8 bits is rounded so that sums of pairs fit 16 bits, which those of any of the linear's panels may need (integers.cpp).
bool rounds_pairs(const Linear& linear);

// The panels of a linear, each multiplied by the same rows of x. What is the same for all panels is found out once.
struct Products {
  Tile panel(int number) const { return make(*this, number); }

  Tile (*make)(const Products&, int panel);
  const Linear& linear;
  Multiplier& multiplier;
  void* x;  // The members of RowsOf.
  int tokens;
  float* factors;
  const float* scales;
  int groups;
  bool in_pairs;
};

// Rows of x in the form that the products with a linear take them in, each form in the same memory, which is others'.
class InputRows {
 public:
  // Floats of `memory` for so many rows; `factors` has one a row, `scales` as many a row as `row_input_scales`.
  static size_t size(int tokens, int columns) { return Rows::size(tokens, columns); }
  static size_t row_input_scales(int columns) { return columns / kScaledColumns + 1; }

  InputRows(int tokens, float* memory, float* factors, float* scales) : tokens_(tokens), memory_(memory), factors_(factors), scales_(scales) {}

  // Reorders and quantises the row where the linear wants that.
  void set(const Linear& linear, int t, const bf16* values);

  // Whether parts of a row may be set apart from one another, each of whole groups of 32 columns.
  bool takes_parts(const Linear& linear) const {
    const Way way = way_of(linear, tokens_);
    return !linear.order && (way == kIntegers || (linear.input.group == 0 && (way == kDots || way == kFloats)));
  }

  // Columns [column, column + count) of the rows [first, last) of x, which begins with row 0.
  void set_parts(const Linear& linear, int first, int last, int column, const bf16* x, int count);

  // To be called by each thread before its products with a linear.
  void prepare(const Linear& linear, Multiplier& multiplier) const;

  // The products of panels with all rows, as the linear's way makes them. The multiplier must be prepared.
  Products products(const Linear& linear, Multiplier& multiplier) const;

 private:
  // work(rows) with the rows as the linear's way takes them.
  template <class Work>
  void as(const Linear& linear, Work&& work) const;

  template <class Number>
  const Number* quantized(const Linear& linear, int groups, int t, const bf16* values);

  int tokens_;
  float *memory_, *factors_, *scales_;
};

// Memory for rows of up to so many columns.
struct InputMemory {
  InputMemory(int tokens, int most_columns)
      : memory(InputRows::size(tokens, most_columns)), factors(tokens), scales(tokens * InputRows::row_input_scales(most_columns)) {}

  Aligned<float> memory, factors, scales;
};

class Input : InputMemory, public InputRows {
 public:
  Input(int tokens, int most_columns)
      : InputMemory(tokens, most_columns), InputRows(tokens, memory.data(), factors.data(), scales.data()) {}
};

}  // namespace piecework
