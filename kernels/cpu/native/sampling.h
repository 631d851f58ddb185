// How a token is chosen from a row of logits.
#pragma once
#include <cstdint>

namespace piecework {

enum Choosing : int32_t { kLikeliest = 0, kPlain = 1, kFiltered = 2 };

// What one row asks for. `kPlain` uses `seed` and `temperature`; `kFiltered` uses all members.
struct Draw {
  uint64_t seed;
  int64_t top_k;
  float temperature, top_p, min_p;
  int32_t choosing;
};

// The token at a position, or -1 if logits are not finite. The result is that of sampling.cpp's functions for the same row, which may be
// overwritten.
int64_t choose_token(float* row, int vocab, const Draw& draw, int64_t position);

}  // namespace piecework
