// What the programs that run the kernels under emulation have in common: fixed inputs, and a line of each output.
#pragma once
#include <algorithm>
#include <cstdio>
#include <iterator>
#include <string>

#include "gguf/formats.h"
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

// A block of a GGUF file: float16 before and behind so many bytes.
struct StoredBlock {
  int32_t format;
  int halves_before, bytes, halves_behind;
  float largest;  // of the float16
};

constexpr StoredBlock kStoredBlocks[] = {
    {Q8_0::kNumber, 1, 32, 0, 0.05f},   {Q4_1::kNumber, 2, 16, 0, 0.05f},   {Q4_0::kNumber, 1, 16, 0, 0.05f},
    {Q3_K::kNumber, 0, 108, 1, 0.005f}, {Q4_K::kNumber, 2, 140, 0, 0.005f}, {Q5_K::kNumber, 2, 172, 0, 0.005f},
    {Q6_K::kNumber, 0, 208, 1, 0.005f}, {Q2_K::kNumber, 0, 80, 2, 0.02f},   {Q5_0::kNumber, 1, 20, 0, 0.05f},
    {Q5_1::kNumber, 2, 20, 0, 0.05f},   {IQ4_NL::kNumber, 1, 16, 0, 0.005f}, {IQ4_XS::kNumber, 1, 134, 0, 0.0002f},
    {MXFP4::kNumber, 0, 17, 0, 0.0f},   {NVFP4::kNumber, 0, 36, 0, 0.0f}};

inline std::vector<int32_t> formats() {
  std::vector<int32_t> all = {kBf16, kInt8, kFp8, kFp8Blocks};
  GGUFFormats::each([&](auto of) { all.push_back(of.kNumber); });
  return all;
}

// A stored row of a format that `piecework_pack` knows.
inline std::vector<uint8_t> stored_row(int32_t format, int columns) {
  std::vector<uint8_t> row;
  if (format == kBf16) {
    for (const bf16 each : numbers(columns)) row.push_back(each.bits & 255), row.push_back(each.bits >> 8);
  } else if (format >= kInt8) {
    for (int i = 0; i < columns; ++i) row.push_back(format == kInt8 ? next_bits() & 255 : (next_bits() & 127) % 100 | (next_bits() & 128));
  }
  GGUFFormats::with(format, [&](auto of) {
    const StoredBlock& block = *std::find_if(std::begin(kStoredBlocks), std::end(kStoredBlocks), [&](auto& each) { return each.format == format; });
    const auto add_halves = [&](int count) {
      for (int i = 0; i < count; ++i) {
        const uint16_t bits = float_to_half(next_number() * block.largest);
        row.push_back(bits & 255), row.push_back(bits >> 8);
      }
    };
    for (int g = 0; g < columns / decltype(of)::Kind::kColumns; ++g) {
      add_halves(block.halves_before);
      for (int i = 0; i < block.bytes; ++i)
        // The first byte of MXFP4 is an exponent, and the first four of NVFP4 are scales.
        row.push_back(format == MXFP4::kNumber && i == 0   ? 120 + next_bits() % 6
                      : format == NVFP4::kNumber && i < 4 ? next_bits() % 60
                                                          : next_bits() & 255);
      add_halves(block.halves_behind);
    }
  });
  return row;
}

// Weights of a format, laid out in panels.
inline Aligned<uint8_t> packed(int32_t format, int rows, int columns) {
  std::vector<std::vector<uint8_t>> stored;
  std::vector<const void*> places;
  for (int r = 0; r < rows; ++r) stored.push_back(stored_row(format, columns));
  for (const auto& row : stored) places.push_back(row.data());
  std::vector<float> scales(rows * std::max(1, row_scales(format, columns)), 0.01f);
  Aligned<uint8_t> made((rows + kPanel - 1) / kPanel * panel_bytes(format, columns));
  piecework_pack(format, places.data(), rows, columns, scales.data(), made.data(), kThreads);
  return made;
}

}  // namespace piecework
