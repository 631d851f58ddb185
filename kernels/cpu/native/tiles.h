// Intel's AMX: a tile holds up to 16 rows of up to 64 bytes, and one instruction multiplies a tile of x by a tile of W.
//
// A panel consists of such tiles: a group of 2 columns of bfloat16, or of 4 of bytes, is a line of two tiles, 16 rows of W each. The
// instructions are described in Intel's Software Developer's Manual, volume 2 (TDPBF16PS, TDPBSUD). With PIECEWORK_TILE_MODEL they are
// computed as described there, for tests on CPUs without them.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "common.h"

namespace piecework::amx {

constexpr int kTileRows = 16, kTileBytes = 64;  // Rows of a tile, and bytes of a row.

// The memory that LDTILECFG reads: rows and bytes per row of 8 tiles.
struct alignas(64) Shapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

#if defined(PIECEWORK_TILE_MODEL)

constexpr bool kHasTiles = true;

struct Model {
  Shapes shapes;
  uint8_t numbers[8][kTileRows][kTileBytes];

  template <class T>
  T* row(int tile, int row) { return reinterpret_cast<T*>(numbers[tile][row]); }
};

inline Model& model() {
  static thread_local Model of_this_thread;
  return of_this_thread;
}

// The processor raises an exception if this is false.
inline void check(bool holds) {
  if (!holds) std::abort();
}

inline void set_shapes(const Shapes& shapes) {
  for (int i = 0; i < 8; ++i)
    check(shapes.rows[i] <= kTileRows && shapes.row_bytes[i] <= kTileBytes && (shapes.rows[i] == 0) == (shapes.row_bytes[i] == 0));
  model().shapes = shapes;
  std::memset(model().numbers, 0, sizeof model().numbers);
}

inline void release() { model().shapes = Shapes{0}; }

template <int T>
void clear() {
  check(model().shapes.rows[T] > 0);
  std::memset(model().numbers[T], 0, sizeof model().numbers[T]);
}

template <int T>
void load(const void* from, int64_t stride) {
  check(model().shapes.rows[T] > 0);
  for (int i = 0; i < model().shapes.rows[T]; ++i)
    std::memcpy(model().numbers[T][i], static_cast<const uint8_t*>(from) + i * stride, model().shapes.row_bytes[T]);
}

template <int T>
void store(void* to, int64_t stride) {
  check(model().shapes.rows[T] > 0);
  for (int i = 0; i < model().shapes.rows[T]; ++i)
    std::memcpy(static_cast<uint8_t*>(to) + i * stride, model().numbers[T][i], model().shapes.row_bytes[T]);
}

// Call work(m, k, n) for every word of C, A and B that meet.
template <int C, int A, int B, class Work>
void each_word(Work work) {
  const Shapes& shapes = model().shapes;
  check(shapes.rows[C] > 0 && shapes.rows[C] == shapes.rows[A] && shapes.row_bytes[C] == shapes.row_bytes[B] &&
        shapes.row_bytes[A] == 4 * shapes.rows[B]);
  for (int m = 0; m < shapes.rows[C]; ++m)
    for (int k = 0; k < shapes.rows[B]; ++k)
      for (int n = 0; n < shapes.row_bytes[C] / 4; ++n) work(m, k, n);
}

template <int C, int A, int B>
void dot_pairs() {
  float sums[kTileRows][kTileRows][2] = {};
  each_word<C, A, B>([&](int m, int k, int n) {
    for (int i = 0; i < 2; ++i)
      sums[m][n][i] += to_float(model().row<bf16>(A, m)[2 * k + i]) * to_float(model().row<bf16>(B, k)[2 * n + i]);
  });
  for (int m = 0; m < model().shapes.rows[C]; ++m)
    for (int n = 0; n < model().shapes.row_bytes[C] / 4; ++n) model().row<float>(C, m)[n] += sums[m][n][0] + sums[m][n][1];
}

template <int C, int A, int B>
void dot_bytes() {
  each_word<C, A, B>([&](int m, int k, int n) {
    for (int i = 0; i < 4; ++i)
      model().row<int32_t>(C, m)[n] += int32_t{model().row<int8_t>(A, m)[4 * k + i]} * int32_t{model().row<uint8_t>(B, k)[4 * n + i]};
  });
}

#elif defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)

constexpr bool kHasTiles = true;

// Compilers' own functions need the numbers of tiles as literals.
inline void set_shapes(const Shapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
inline void release() { asm volatile("tilerelease"); }

template <int T>
inline void clear() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}

template <int T>
inline void load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}

template <int T>
inline void store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}

// C += A times B: pairs of bfloat16 with pairs, sums in float32.
template <int C, int A, int B>
inline void dot_pairs() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

// The same with four bytes: those of A are signed, those of B are unsigned.
template <int C, int A, int B>
inline void dot_bytes() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

#else

constexpr bool kHasTiles = false;

#endif

// Whether this process may use tiles. The kernel allocates their memory only on request and may refuse. Requested and tried once.
bool are_usable();

constexpr int kLeastRows = 8;  // Rows of x for which tiles are worth it; an instruction takes as long as its tiles have rows.

enum Tile : int { kSums = 0, kX = 4, kWeights = 6 };  // The first tile of each use; sums are [2 of x][2 of W].

// to [tokens][32] = or += the products of `steps` times 64 bytes of rows of x, `stride` bytes apart, with as many lines of two tiles of a
// panel. Sums are float32 for pairs, int32 for bytes.
template <bool kArePairs>
void multiply(const uint8_t* panel, const uint8_t* x, int64_t stride, int steps, int tokens, void* to, bool adds) {
#if defined(PIECEWORK_TILE_MODEL) || (defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__))
  constexpr int64_t line = 2 * kTileBytes;
  uint8_t* out = static_cast<uint8_t*>(to);
  int shaped = 0;
  for (int t = 0; t < tokens; t += 2 * kTileRows, x += 2 * kTileRows * stride, out += 2 * kTileRows * line) {
    const int rows = tokens - t < 2 * kTileRows ? tokens - t : 2 * kTileRows;
    if (rows != shaped) {
      Shapes shapes;
      const auto shape = [&](int tile, int count) { shapes.rows[tile] = count, shapes.row_bytes[tile] = count > 0 ? kTileBytes : 0; };
      for (int half = 0; half < 2; ++half) {
        const int count = half == 0 ? (rows < kTileRows ? rows : kTileRows) : (rows > kTileRows ? rows - kTileRows : 0);
        shape(kX + half, count), shape(kSums + 2 * half, count), shape(kSums + 2 * half + 1, count);
        shape(kWeights + half, kTileRows);
      }
      set_shapes(shapes);
      shaped = rows;
    }
    const bool is_two = rows > kTileRows;
    uint8_t* const second = out + kTileRows * line;
    if (adds) {
      load<kSums>(out, line), load<kSums + 1>(out + kTileBytes, line);
      if (is_two) load<kSums + 2>(second, line), load<kSums + 3>(second + kTileBytes, line);
    } else {
      clear<kSums>(), clear<kSums + 1>();
      if (is_two) clear<kSums + 2>(), clear<kSums + 3>();
    }
    for (int step = 0; step < steps; ++step) {
      const uint8_t *weights = panel + step * kTileRows * line, *numbers = x + step * kTileBytes;
      load<kWeights>(weights, line), load<kWeights + 1>(weights + kTileBytes, line), load<kX>(numbers, stride);
      const auto meet = [&](auto half) {
        constexpr int sums = kSums + 2 * half, from = kX + half;
        if constexpr (kArePairs)
          dot_pairs<sums, from, kWeights>(), dot_pairs<sums + 1, from, kWeights + 1>();
        else
          dot_bytes<sums, from, kWeights>(), dot_bytes<sums + 1, from, kWeights + 1>();
      };
      meet(std::integral_constant<int, 0>{});
      if (is_two) load<kX + 1>(numbers + kTileRows * stride, stride), meet(std::integral_constant<int, 1>{});
    }
    store<kSums>(out, line), store<kSums + 1>(out + kTileBytes, line);
    if (is_two) store<kSums + 2>(second, line), store<kSums + 3>(second + kTileBytes, line);
  }
  release();
#else
  static_cast<void>(panel), static_cast<void>(x), static_cast<void>(stride), static_cast<void>(steps), static_cast<void>(tokens);
  static_cast<void>(to), static_cast<void>(adds);
#endif
}

}  // namespace piecework::amx
