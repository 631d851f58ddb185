// Decodes of a small decoder in one call, as kernel_outputs.cpp prints what they make: with weights of one format everywhere, of which the second
// layer has experts.
#include "kernel_cases.h"
#include "step.h"

using namespace piecework;

extern "C" int piecework_step(const void*, int);

void take_steps();

namespace {

constexpr int kHidden = 256, kQueryHeads = 4, kKvHeads = 2, kHeadSize = 64, kWidth = 256, kVocab = 150, kExperts = 4, kPageSize = 16, kPages = 6;
constexpr int kPlaces = kPageSize * kPages, kMostRequests = 9;

// Weights, and the memory that they lie in.
class Weights {
 public:
  Weights(int32_t format, int group) : format_(format), group_(group) {}

  Linear linear(int rows, int columns) {
    return {kept_.emplace_back(packed(format_, rows, columns)).data(), nullptr, rows, columns, format_, {nullptr, group_}, nullptr};
  }

  Norm norm(int size) {
    std::vector<bf16>& weight = norms_.emplace_back(numbers(size));
    for (bf16& each : weight) each = from_float<bf16>(1.0f + 0.2f * to_float(each));
    return {weight.data(), 1e-5f, 0};
  }

 private:
  int32_t format_;
  int group_;
  std::vector<Aligned<uint8_t>> kept_;
  std::vector<std::vector<bf16>> norms_;
};

// Decodes of `requests`, twice: the second reads what the first has written.
void decode(int32_t format, int requests, int way) {
  if (way == kIntegers ? format == kBf16 : !piecework_choose_way(way)) return;
  state = 23 + format;
  Weights weights(format, way == kIntegers ? GroupedColumns::kGroup : 0);
  const auto cos = numbers(kPlaces * kHeadSize), sin = numbers(kPlaces * kHeadSize);
  std::vector<bf16> caches[4];
  for (auto& cache : caches) cache = numbers(kMostRequests * kPlaces * kKvHeads * kHeadSize);
  Layer layers[2] = {};
  for (int i = 0; i < 2; ++i) {
    Layer& layer = layers[i];
    layer.before_attention = weights.norm(kHidden), layer.before_feed_forward = weights.norm(kHidden);
    layer.q_norm = weights.norm(kHeadSize), layer.k_norm = weights.norm(kHeadSize);
    layer.qkv = weights.linear((kQueryHeads + 2 * kKvHeads) * kHeadSize, kHidden), layer.output = weights.linear(kHidden, kHidden);
    layer.cos = cos.data(), layer.signed_sin = sin.data(), layer.turned = kHeadSize;
    layer.k_cache = caches[2 * i].data(), layer.v_cache = caches[2 * i + 1].data();
    layer.multiplier = layer.k_scale = layer.v_scale = 1.0f, layer.scale = 0.125f;
  }
  layers[0].dense = {weights.linear(2 * kWidth, kHidden), weights.linear(kHidden, kWidth), kSilu};
  layers[1].routing = {weights.linear(kExperts, kHidden), nullptr, 2, 0, 1, 0, 1.0f};
  layers[1].experts = {weights.linear(2 * kExperts * kWidth, kHidden), weights.linear(kExperts * kHidden, kWidth), kExperts, 0, 0.0f};
  const std::vector<bf16> embedding = numbers(kVocab * kHidden);
  Model model{};
  model.layers = layers, model.norm = weights.norm(kHidden), model.head = weights.linear(kVocab, kHidden), model.num_layers = 2;
  model.embedding = {reinterpret_cast<const uint8_t*>(embedding.data()), nullptr, kVocab, kHidden, kRows, {}, nullptr};
  model.hidden = kHidden, model.intermediate = kWidth, model.heads = kQueryHeads, model.kv_heads = kKvHeads, model.head_size = kHeadSize;
  model.page_size = kPageSize, model.group = kQueryHeads / kKvHeads, model.embedding_scale = 1.0f;
  std::vector<int64_t> ids, positions(requests), slots(requests), table, sampled, chosen(requests);
  std::vector<int32_t> query_lens(requests, 1);
  std::vector<float> logits(requests * kVocab);
  std::vector<Draw> draws;
  for (int b = 0; b < requests; ++b) {
    ids.push_back(b * 7 % kVocab), sampled.push_back(b);
    for (int i = 0; i < kPages; ++i) table.push_back(b * kPages + i);
    draws.push_back({static_cast<uint64_t>(17 + b), 20, 0.1f, 0.9f, 0.0f, b % 3});
  }
  Step step{&model, ids.data(), positions.data(), positions.data(), {slots.data(), nullptr}, {table.data(), nullptr}, query_lens.data()};
  step.sampled = sampled.data(), step.chosen = chosen.data(), step.logits = logits.data();
  step.table_stride = kPages, step.requests = step.tokens = step.samples = requests;
  for (int at = 0; at < 2; ++at) {
    for (int b = 0; b < requests; ++b) positions[b] = 9 * b + 5 + at, slots[b] = b * kPlaces + positions[b];
    const std::string what = " of format " + std::to_string(format) + " for " + std::to_string(requests) + " at " + std::to_string(at);
    const std::string end = what + " by way " + std::to_string(way) + ":";
    step.draws = nullptr, piecework_step(&step, kThreads);
    print("logits of a step" + end, logits.data(), logits.size());
    step.draws = draws.data(), piecework_step(&step, kThreads);
    print("draws of a step" + end, chosen.data(), requests);
    for (int b = 0; b < requests; ++b) ids[b] = (b * 11 + 31) % kVocab;
  }
}

}  // namespace

void take_steps() {
  for (int32_t format : {int32_t{kBf16}, int32_t{Q8_0::kNumber}, int32_t{Q4_K::kNumber}, int32_t{Q6_K::kNumber}})
    for (int way : {kFloats, kDots, kHalves, kIntegers})
      for (int requests : {1, 3, kMostRequests}) decode(format, requests, way);
}
