// How a token is chosen of a row of logits.
#pragma once
#include <cstdint>

namespace piecework {

enum Choosing : int32_t { kLikeliest = 0, kPlain = 1, kFiltered = 2 };

// What one row asks for. `kPlain` takes `seed` and `temperature`, `kFiltered` all others too.
struct Draw {
  uint64_t seed;
  int64_t top_k;
  float temperature, top_p, min_p;
  int32_t choosing;
};

// The token of a position, -1 where logits are not finite: what the functions of sampling.cpp give of the same row, which may be overwritten.
int64_t choose_token(float* row, int vocab, const Draw& draw, int64_t position);

}  // namespace piecework
