// Prints what the kernels make of fixed inputs, a line a case: its name, then its numbers. Compiled with the kernels' own files for a CPU
// that this machine is not, and run under emulation.
#include "attention.h"
#include "kernel_cases.h"
#include "recurrent.h"
#include "rows.h"

using namespace piecework;

extern "C" {
void piecework_linear(const void*, const void*, int64_t, const float*, int, void*, int, int);
void piecework_attention_bf16(const void*, int);
void piecework_attention_f32(const void*, int);
void piecework_argmax(const float*, int64_t, int, int, int64_t*, int);
void piecework_softmax(float*, int64_t, int, int, const float*, int);
void piecework_sample_plain(const float*, int64_t, int, int, const float*, const float*, int64_t*, int);
void piecework_sample_filtered(const float*, int64_t, int, int, const int64_t*, const float*, const float*, const double*, int64_t*, int);
int piecework_has_tiles();
void piecework_mamba2_step(const void*, const void*, int, int);
void piecework_gated_delta_step(const void*, const void*, int, int);
void piecework_mamba2_prompts(const void*, const void*, const void*, int, int);
void piecework_gated_delta_prompts(const void*, const void*, const void*, int, int);
}

void take_steps();  // kernel_steps.cpp

namespace {

// Whole blocks, and of few formats a multiple of what is summed at once.
int columns_of(int32_t format) {
  int columns = format == kBf16 ? 1100 : 1152;
  GGUFFormats::with(format, [&](auto of) { columns = decltype(of)::Kind::kColumns == kUnit ? 1152 : 1280; });
  return columns;
}

void multiply(int32_t format, int columns, int tokens, int way) {
  constexpr int kRows = 45;
  state = 7 + format;
  const bool has_blocks = format != kBf16 && format < kInt8;
  if (way == kIntegers ? !has_blocks : !piecework_choose_way(way)) return;
  const Aligned<uint8_t> weight = packed(format, kRows, columns);
  const std::vector<bf16> bias = numbers(kRows), x = numbers(static_cast<size_t>(tokens) * columns);
  const Linear linear{weight.data(), bias.data(), kRows, columns, format, {nullptr, way == kIntegers ? GroupedColumns::kGroup : 0}, nullptr};
  std::vector<bf16> out(static_cast<size_t>(tokens) * kRows);
  if (format < kInt8) {
    piecework_linear(&linear, x.data(), columns, nullptr, 0, out.data(), tokens, kThreads);
  } else {
    const int groups = format == kFp8Blocks ? columns / kScaledColumns : 1;
    std::vector<float> x_scales(tokens * groups);
    std::vector<uint8_t> small(x.size());
    for (int t = 0; t < tokens; ++t) {
      const Quantization how{nullptr, columns / groups};
      if (format == kInt8)
        quantize(x.data() + t * columns, columns, how, reinterpret_cast<int8_t*>(small.data()) + t * columns, x_scales.data() + t);
      else
        quantize(x.data() + t * columns, columns, how, reinterpret_cast<fp8*>(small.data()) + t * columns, x_scales.data() + t * groups);
    }
    piecework_linear(&linear, small.data(), columns, x_scales.data(), groups, out.data(), tokens, kThreads);
  }
  print("linear of format " + std::to_string(format) + " for " + std::to_string(tokens) + " tokens by way " + std::to_string(way) + ":", out.data(), out.size());
}

template <class T>
std::vector<T> some(size_t count) {
  std::vector<T> made(count);
  for (T& each : made) each = from_float<T>(next_number());
  return made;
}

template <class T>
struct Attention {
  static constexpr int kHeads = 6, kKvHeads = 2, kPage = 16, kPages = 6;  // kPages: of a request

  Attention(CacheKind kind, int head_size, int requests, int way) : kind(kind), head_size(head_size), way(way) {
    const size_t page = (kPage * kKvHeads * head_size + 2 * kPage * kKvHeads) * sizeof(T);
    k_cache.resize(requests * kPages * page), v_cache.resize(requests * kPages * page);
    for (int b = 0; b < requests; ++b)
      for (int i = 0; i < kPages; ++i) table.push_back(b * kPages + i * 5 % kPages);
  }

  void run(const std::vector<int32_t>& query_lens, const std::vector<int32_t>& seq_lens, int window, float softcap) {
    state = 11;
    std::vector<int64_t> slots;
    for (size_t b = 0; b < query_lens.size(); ++b)
      for (int place = seq_lens[b] - query_lens[b]; place < seq_lens[b]; ++place)
        slots.push_back(table[b * kPages + place / kPage] * kPage + place % kPage);
    const int tokens = static_cast<int>(slots.size());
    const auto q = some<T>(tokens * kHeads * head_size), k = some<T>(tokens * kKvHeads * head_size), v = some<T>(tokens * kKvHeads * head_size);
    std::vector<T> out(q.size());
    AttentionCall<T> call{};
    call.q = q.data(), call.k = k.data(), call.v = v.data(), call.out = out.data(), call.k_cache = k_cache.data(), call.v_cache = v_cache.data();
    call.slots = slots.data(), call.table = table.data(), call.query_lens = query_lens.data(), call.seq_lens = seq_lens.data();
    call.q_stride = call.out_stride = kHeads * head_size, call.k_stride = call.v_stride = kKvHeads * head_size, call.table_stride = kPages;
    call.requests = static_cast<int>(query_lens.size()), call.tokens = tokens, call.heads = kHeads, call.kv_heads = kKvHeads;
    call.head_size = call.value_size = head_size, call.page_size = kPage, call.window = window, call.group = kHeads / kKvHeads;
    call.cache_kind = kind, call.scale = 0.2f, call.softcap = softcap;
    call.k_scale = call.v_scale = kind == CacheKind::kE4M3 || kind == CacheKind::kE5M2 ? 0.01f : 1.0f;
    if constexpr (sizeof(T) == 2)
      piecework_attention_bf16(&call, kThreads);
    else
      piecework_attention_f32(&call, kThreads);
    print(std::string("attention of ") + (sizeof(T) == 2 ? "bf16" : "f32") + " over cache " + std::to_string(static_cast<int>(kind)) + " by " +
              std::to_string(tokens) + " tokens of " + std::to_string(head_size) + " by way " + std::to_string(way) + ":",
          out.data(), out.size());
  }

  CacheKind kind;
  int head_size, way;
  std::vector<uint8_t> k_cache, v_cache;
  std::vector<int64_t> table;
};

// Prompts, then decodes over what they have left.
template <class T>
void attend(CacheKind kind, int head_size, int way) {
  if (!piecework_choose_way(way)) return;
  Attention<T> attention(kind, head_size, 2, way);
  attention.run({40, 89}, {40, 89}, 24, 3.0f);
  attention.run({1, 1}, {41, 90}, 0, 0.0f);
}

void norms() {
  constexpr int kSize = 80;
  state = 13;
  const auto x = numbers(kSize), weight = numbers(kSize), cos = numbers(kSize), sin = numbers(kSize);
  std::vector<bf16> out(kSize);
  rms_norm(x.data(), weight.data(), kSize, 1e-5f, out.data());
  print("norm:", out.data(), kSize);
  rotate(x.data(), cos.data(), sin.data(), kSize, out.data());
  print("rotation:", out.data(), kSize);
  silu_and_mul(x.data(), weight.data(), kSize, out.data());
  print("gate:", out.data(), kSize);
  std::vector<int8_t> bytes(kSize);
  std::vector<fp8> floats8(kSize);
  float scales[2];
  quantize(x.data(), kSize, Quantization{nullptr, kSize / 2}, bytes.data(), scales);
  print("int8:", bytes.data(), kSize);
  quantize(x.data(), kSize, Quantization{nullptr, kSize / 2}, floats8.data(), scales);
  print("fp8:", floats8.data(), kSize);
}

void sample() {
  constexpr int kRows = 4, kVocab = 1000;
  state = 17;
  std::vector<float> probs(kRows * kVocab);
  for (int row = 0; row < kRows; ++row) {
    float sum = 0.0f;
    for (int i = 0; i < kVocab; ++i) sum += probs[row * kVocab + i] = static_cast<float>(1 + next_bits() % 5000u);
    for (int i = 0; i < kVocab; ++i) probs[row * kVocab + i] /= sum;
  }
  const int64_t top_k[] = {kVocab, 20, kVocab, 5};
  const float top_p[] = {1.0f, 0.5f, 0.3f, 1.0f}, min_p[] = {0.0f, 0.0f, 0.2f, 0.5f};
  const double uniform[] = {0.1, 0.9, 0.5, 0.99};
  int64_t tokens[kRows];
  piecework_argmax(probs.data(), kVocab, kRows, kVocab, tokens, kThreads);
  print("argmax:", tokens, kRows);
  piecework_sample_filtered(probs.data(), kVocab, kRows, kVocab, top_k, top_p, min_p, uniform, tokens, kThreads);
  print("sampled:", tokens, kRows);
  const float temperatures[] = {1.0f, 0.5f, 2.0f, 0.1f}, places[] = {0.1f, 0.9f, 0.5f, 0.5f, 0.7f, 0.2f, 0.99f, 0.01f};
  for (float& each : probs) each = 4.0f * next_number();
  piecework_sample_plain(probs.data(), kVocab, kRows, kVocab, temperatures, places, tokens, kThreads);
  print("sampled of logits:", tokens, kRows);
  piecework_softmax(probs.data(), kVocab, kRows, kVocab, temperatures, kThreads);
  print("probabilities:", probs.data(), probs.size());
}

// A layer with a recurrent state. Two prompts whose states lie at slots 2 and 1: one of more than a part's tokens, and one of no whole chunk.
// The states go on, so a second run begins with those that the first has left, and a token of each follows.
template <class T>
void recur(bool is_delta, int size, int numbers) {
  constexpr int kHeads = 6, kGroups = 2, kColumns = 4, kCapacity = 512;
  const int64_t begins[] = {0, 270}, lens[] = {270, 21}, slots[] = {2, 1};
  const int tokens = 291, channels = kHeads * size + 2 * kGroups * numbers;
  state = 19;
  const auto x = some<T>(tokens * channels), first = some<T>(tokens * kHeads), second = some<T>(tokens * kHeads);
  const auto weight = some<float>(channels * kColumns), bias = some<float>(channels), d = some<float>(kHeads), dt_bias = some<float>(kHeads);
  std::vector<float> a = some<float>(kHeads), states = some<float>(3 * kHeads * size * numbers), room(kCapacity * channels);
  for (float& each : a) each -= 1.5f;
  std::vector<T> tails(3 * (kColumns - 1) * channels), out(tokens * kHeads * size);
  Conv conv{x.data(), tails.data(), weight.data(), is_delta ? nullptr : bias.data(), slots, nullptr, channels, tokens, channels, kColumns, 1};
  Heads heads{states.data(), first.data(), second.data(), a.data(), d.data(),  dt_bias.data(), out.data(),
              kHeads,        kHeads,       kHeads,        kGroups,  size,      numbers,        1,          0.01f,
              1.5f,          1.0f};
  const Prompts prompts{begins, lens, room.data(), 2, kCapacity};
  const auto show = [&](const std::string& run, const auto* results, size_t count) {
    const std::string name = std::string(is_delta ? "gated delta" : "mamba2") + (sizeof(T) == 2 ? " bf16 " : " f32 ") + run;
    print(name + " tokens:", results, count);
    print(name + " states:", states.data(), states.size());
    print(name + " convolution:", tails.data(), tails.size());
  };
  for (int run = 0; run < 2; ++run) {
    (is_delta ? piecework_gated_delta_prompts : piecework_mamba2_prompts)(&conv, &heads, &prompts, sizeof(T) == 2, kThreads);
    show(std::to_string(run), out.data(), out.size());
  }
  std::vector<float> convolved(2 * channels), results(2 * kHeads * size);
  conv.tokens = 2, conv.out = convolved.data(), heads.out = results.data();
  (is_delta ? piecework_gated_delta_step : piecework_mamba2_step)(&conv, &heads, sizeof(T) == 2, kThreads);
  show("step", results.data(), results.size());
}

}  // namespace

int main() {
  const int has_tiles = piecework_has_tiles(), unpacks = piecework_unpack_panels(1);
  print("tiles:", &has_tiles, 1);
  print("unpacks:", &unpacks, 1);
  for (int32_t format : formats())
    for (int way : {kFloats, kDots, kHalves, kIntegers})
      for (int tokens : {1, 2, 13, 43, 71})
        // Each thread has so many of 71 that whole numbers may unpack a panel for them, and some are left.
        if (tokens < 71 || way == kIntegers) multiply(format, columns_of(format), tokens, way);
  for (CacheKind kind : {CacheKind::kAsQueries, CacheKind::kE4M3, CacheKind::kE5M2, CacheKind::kInt8})
    for (int head_size : {64, 20})
      for (int way : {kFloats, kDots}) attend<bf16>(kind, head_size, way);
  attend<float>(CacheKind::kAsQueries, 64, kFloats);
  norms();
  sample();
  for (bool is_delta : {false, true}) {
    recur<bf16>(is_delta, 20, 24);
    recur<float>(is_delta, 64, 16);
  }
  take_steps();
}
