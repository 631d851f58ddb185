// Chooses how products are computed.
#include <chrono>

#include "attention_tiles.h"
#include "linear.h"
#include "tiles.h"
#include "unpacked.h"
#include "weights.h"

namespace piecework {
namespace {

constexpr int kMeasured = -1;
constexpr double kWorthIt = 1.1;  // Another way must be this many times as fast.

int choice = kMeasured, unpacking = kMeasured;
bool invariant = false;

bool is_there(int way) { return way == kFloats || (way == kDots && kHasDots) || (way == kHalves && kHasHalves); }

// Seconds of the same products with x as `Number`, the least of several runs.
template <class Number>
double seconds() {
  constexpr int kTokens = 48, kTimes = 8;
  const Aligned<uint8_t> weight(panel_bytes(kBf16, kColumnsAtOnce), 0x3f);
  const Linear linear{weight.data(), nullptr, kPanel, kColumnsAtOnce, kBf16, {}};
  Aligned<Number> x(RowsOf<Number>::size(kTokens, kColumnsAtOnce));
  Aligned<float> factors(kTokens);
  const RowsOf<Number> rows{x.data(), kTokens, factors.data()};
  Multiplier multiplier;
  double least = 1e9;
  for (int i = 0; i < kTimes; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    multiplier.panel(linear, rows, 0, 0, kTokens);
    least = std::min(least, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  return least;
}

Way measured() {
  Way fastest = kFloats;
  double least = seconds<float>();
  const auto try_out = [&](Way way, double time) {
    if (kWorthIt * time < least) fastest = way, least = time;
  };
  if (kHasDots) try_out(kDots, seconds<bf16>());
  if (kHasHalves) try_out(kHalves, seconds<half>());
  return fastest;
}

// The way for many rows.
Way fastest_way() {
  if (choice != kMeasured) return static_cast<Way>(choice);
  static const Way fastest = measured();
  return fastest;
}

// Whether bfloat16 weights use dot products for any number of rows, and attention for blocks of rows. AMD's CPUs make twice as many
// products with them as with FMAs, and Intel's half as many. This is known, not measured, so that an engine gives the same results after a
// restart.
bool takes_dots() {
  if (choice != kMeasured) return choice == kDots;
#if defined(__AVX512BF16__)
  static const bool is_amd = (__builtin_cpu_init(), __builtin_cpu_is("amd"));
  return is_amd;
#else
  return false;
#endif
}

// Rows from which it pays to convert weights to bfloat16 or float16 first.
int least_rows(Way way, int32_t format) {
  if (way == kDots) return amx::are_usable() ? amx::kLeastRows : 24;
  return format == kBf16 ? 20 : 6;
}

}  // namespace

// AMD's CPUs have free ports for unpacking beside those that multiply, so nothing is gained there.
bool unpacks_panels() {
  if (unpacking != kMeasured) return unpacking == 1;
#if defined(__AVX512VNNI__)
  static const bool is_intel = (__builtin_cpu_init(), __builtin_cpu_is("intel"));
  return is_intel;
#else
  return false;
#endif
}

bool is_batch_invariant() { return invariant; }

bool prefers_dots() { return kHasDots && !invariant && takes_dots(); }

Way way_of(const Linear& linear, int tokens) {
  if (linear.format == kInt8) return kBytes;
  if (linear.format < kInt8 && linear.input.group == GroupedColumns::kGroup) return kIntegers;
  if (linear.format == kBf16 && takes_dots()) return kDots;
  if (invariant) return kFloats;
  // The fastest way is not determined before there are enough rows.
  if (tokens < least_rows(kHalves, linear.format)) return kFloats;
  const Way way = fastest_way();
  return way == kFloats || tokens < least_rows(way, linear.format) ? kFloats : way;
}

}  // namespace piecework

// Return whether products with weights in blocks are faster with 8-bit x in groups. This is known from the instructions, not measured, so
// that an engine gives the same results after a restart.
extern "C" int piecework_prefers_integers(int format) {
  using namespace piecework;
  int is_faster = 0;
  GGUFFormats::with(format, [&](auto of) { is_faster = of.kPrefersIntegers && decltype(of)::Kind::Numbers::kBits <= kIntegerBits; });
  return is_faster;
}

// Applies to the whole process from now on.
extern "C" void piecework_set_batch_invariant(int value) { piecework::invariant = value != 0; }

// From now on, use this way for products of many rows, also in attention, which uses kDots or FMAs; -1 means the fastest. Return whether
// the kernels have it; otherwise nothing changes.
extern "C" int piecework_choose_way(int way) {
  using namespace piecework;
  if (way != kMeasured && !is_there(way)) return 0;
  choice = way;
  return 1;
}

// From now on, integer products with many rows of x unpack panels first (1) or never (0); -1 means if that is known to be faster. The
// results have the same bits. Return whether the kernels can do this; otherwise nothing changes.
extern "C" int piecework_unpack_panels(int value) {
  using namespace piecework;
  if (!kHasUnpacked) return 0;
  unpacking = value;
  return 1;
}
