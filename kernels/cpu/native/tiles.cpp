// Checks whether this process may use AMX, and whether AMX computes correctly.
#include "tiles.h"

#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace piecework::amx {
namespace {

// Linux's arch_prctl(2): ARCH_REQ_XCOMP_PERM of XFEATURE_XTILEDATA, for all threads of the process. It fails in old kernels, in some
// sandboxes, and if a thread's signal stack is too small for the tiles.
bool is_permitted() {
#if defined(PIECEWORK_TILE_MODEL)
  return true;
#elif defined(__linux__) && defined(__x86_64__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

// One product of each kind, with numbers whose sums are exact.
bool computes() {
  constexpr int kTokens = 20, kSteps = 2, kPairs = kSteps * 16;
  alignas(64) static bf16 x[kTokens][2 * kPairs], w[kPairs][32][2];
  alignas(64) static int8_t small_x[kTokens][4 * kPairs];
  alignas(64) static uint8_t small_w[kPairs][32][4];
  alignas(64) static float sums[kTokens][32];
  alignas(64) static int32_t small_sums[kTokens][32];
  for (int t = 0; t < kTokens; ++t) {
    for (int k = 0; k < 2 * kPairs; ++k) x[t][k] = from_float<bf16>(static_cast<float>((t + 3 * k) % 7 - 3));
    for (int k = 0; k < 4 * kPairs; ++k) small_x[t][k] = static_cast<int8_t>((t * 5 + k) % 255 - 127);
  }
  for (int k = 0; k < kPairs; ++k)
    for (int n = 0; n < 32; ++n) {
      for (int i = 0; i < 2; ++i) w[k][n][i] = from_float<bf16>(static_cast<float>((n + 5 * k + i) % 9 - 4));
      for (int i = 0; i < 4; ++i) small_w[k][n][i] = static_cast<uint8_t>(n * 7 + k * 3 + i);
    }
  multiply<true>(reinterpret_cast<const uint8_t*>(w), reinterpret_cast<const uint8_t*>(x), sizeof x[0], kSteps, kTokens, sums, false);
  multiply<false>(reinterpret_cast<const uint8_t*>(small_w), reinterpret_cast<const uint8_t*>(small_x), sizeof small_x[0], kSteps, kTokens, small_sums, false);
  for (int t = 0; t < kTokens; ++t)
    for (int n = 0; n < 32; ++n) {
      float sum = 0.0f;
      int32_t small_sum = 0;
      for (int k = 0; k < 2 * kPairs; ++k) sum += to_float(x[t][k]) * to_float(w[k / 2][n][k % 2]);
      for (int k = 0; k < 4 * kPairs; ++k) small_sum += int32_t{small_x[t][k]} * int32_t{small_w[k / 4][n][k % 4]};
      if (sum != sums[t][n] || small_sum != small_sums[t][n]) return false;
    }
  return true;
}

}  // namespace

bool are_usable() {
  if constexpr (!kHasTiles) return false;
  static const bool usable = is_permitted() && computes();
  return usable;
}

}  // namespace piecework::amx

extern "C" int piecework_has_tiles() { return piecework::amx::are_usable(); }
