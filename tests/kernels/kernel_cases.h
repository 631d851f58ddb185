// What the programs that run the kernels under emulation have in common: fixed inputs, and a line of each output.
#pragma once
#include <cstdio>
#include <string>

#include "linear.h"

extern "C" {
void piecework_pack(int, const void* const*, int, int, const float*, void*, int);
int piecework_choose_way(int);
int piecework_unpack_panels(int);
}

namespace piecework {

constexpr int kThreads = 2;
inline uint32_t state = 1;

inline uint32_t next_bits() { return (state = state * 1664525u + 1013904223u) >> 8; }
inline float next_number() { return static_cast<float>(next_bits() % 2001u) / 1000.0f - 1.0f; }

inline std::vector<bf16> numbers(size_t count) {
  std::vector<bf16> made(count);
  for (bf16& each : made) each = from_float<bf16>(next_number());
  return made;
}

template <class T>
void print(const std::string& name, const T* values, size_t count) {
  std::printf("%s", name.c_str());
  for (size_t i = 0; i < count; ++i) {
    if constexpr (std::is_integral_v<T>)
      std::printf(" %lld", static_cast<long long>(values[i]));
    else
      std::printf(" %.9g", to_float(values[i]));
  }
  std::printf("\n");
}

// GGUF's blocks: float16 before and behind so many bytes.
struct StoredBlock {
  int columns, halves_before, bytes, halves_behind;
  float largest;  // of the float16
};

// A stored row of each kind that `piecework_pack` knows.
inline std::vector<uint8_t> stored_row(int kind, int columns) {
  constexpr StoredBlock kBlocks[] = {{1, 0, 2, 0, 0},          {32, 1, 32, 0, 0.05f},    {32, 2, 16, 0, 0.05f},    {32, 1, 16, 0, 0.05f},
                                     {1, 0, 1, 0, 0},          {1, 0, 1, 0, 0},          {1, 0, 1, 0, 0},          {256, 0, 108, 1, 0.005f},
                                     {256, 2, 140, 0, 0.005f}, {256, 2, 172, 0, 0.005f}, {256, 0, 208, 1, 0.005f}, {256, 0, 80, 2, 0.02f},
                                     {32, 1, 20, 0, 0.05f},    {32, 2, 20, 0, 0.05f},    {32, 1, 16, 0, 0.005f},   {256, 1, 134, 0, 0.0002f}};
  std::vector<uint8_t> row;
  if (kind == 0) {
    for (const bf16 each : numbers(columns)) row.push_back(each.bits & 255), row.push_back(each.bits >> 8);
  } else if (kind == 16) {
    for (int g = 0; g < columns / 32; ++g) {
      row.push_back(120 + next_bits() % 6);  // an exponent
      for (int i = 0; i < 16; ++i) row.push_back(next_bits() & 255);
    }
  } else if (kind >= 4 && kind <= 6) {
    for (int i = 0; i < columns; ++i) row.push_back(kind == 4 ? next_bits() & 255 : (next_bits() & 127) % 100 | (next_bits() & 128));
  } else {
    const StoredBlock& block = kBlocks[kind];
    const auto add_halves = [&](int count) {
      for (int i = 0; i < count; ++i) {
        const uint16_t bits = float_to_half(next_number() * block.largest);
        row.push_back(bits & 255), row.push_back(bits >> 8);
      }
    };
    for (int g = 0; g < columns / block.columns; ++g) {
      add_halves(block.halves_before);
      for (int i = 0; i < block.bytes; ++i) row.push_back(next_bits() & 255);
      add_halves(block.halves_behind);
    }
  }
  return row;
}

constexpr Format kFormatOf[] = {kBf16, kQ8, kQ4, kQ40, kInt8, kFp8, kFp8Blocks, kQ3K, kQ4K, kQ5K, kQ6K, kQ2K, kQ5, kQ5, kIQ4NL, kIQ4XS, kMXFP4};
constexpr int kKinds = 17;

// Weights of a kind, laid out in panels.
inline Aligned<uint8_t> packed(int kind, int rows, int columns) {
  const Format format = kFormatOf[kind];
  std::vector<std::vector<uint8_t>> stored;
  std::vector<const void*> places;
  for (int r = 0; r < rows; ++r) stored.push_back(stored_row(kind, columns));
  for (const auto& row : stored) places.push_back(row.data());
  std::vector<float> scales(rows * std::max(1, row_scales(format, columns)), 0.01f);
  Aligned<uint8_t> made((rows + kPanel - 1) / kPanel * panel_bytes(format, columns));
  piecework_pack(kind, places.data(), rows, columns, scales.data(), made.data(), kThreads);
  return made;
}

}  // namespace piecework
