// Prompts through layers with a recurrent state: what kernels/recurrent_prompts.py computes. Tokens are processed in parts, so that the
// results of the convolution stay in the cache. Each thread takes heads of a part, and keeps their states from one chunk of tokens to the
// next.
//
// Both kinds of heads add k new^T to a state [numbers][size], and tokens read q^T state. In Mamba 2, b and c are k and q, and dt * x is
// new. In the gated delta rule, new depends on what the state and earlier tokens of the chunk have at k, which is a triangular system. Its
// states may decay row by row.
#include "attention_tiles.h"
#include "recurrent_conv.h"
#include "recurrent_memory.h"
#include "threads.h"

namespace piecework {
namespace {

static_assert(kPart % kChunk == 0);

// Heads [head, head + count) of one group over a stretch.
template <class T, bool kIsDelta>
class Run {
 public:
  Run(const Conv& conv, const Heads& call, const Prompts& prompts, const Stretch& part, int head, int count, Memory& memory)
      : conv_(conv), call_(call), memory_(memory), part_(part), head_(head), count_(count), size_(call.size), numbers_(call.numbers), by_rows_(kIsDelta && call.decays > 1) {
    const int64_t inner = static_cast<int64_t>(call.heads) * size_, all_keys = static_cast<int64_t>(call.groups) * numbers_;
    const int64_t group = static_cast<int64_t>(head / (call.heads / call.groups)) * numbers_;
    const float* rows = prompts.room + static_cast<int64_t>(part.at) * conv.channels;
    values_ = rows + (kIsDelta ? 2 * all_keys : 0) + static_cast<int64_t>(head) * size_;
    keys_ = rows + (kIsDelta ? all_keys : inner) + group;
    queries_ = rows + (kIsDelta ? 0 : inner + all_keys) + group;
    token_ = prompts.begins[part.prompt] + part.first;
    slot_ = conv.slots[part.prompt];
  }

  void run() {
    for (int i = 0; i < count_; ++i) fetch(i);
    for (int begin = 0; begin < part_.count; begin += kChunk) {
      const int tokens = std::min(kChunk, part_.count - begin);
      if (!by_rows_) load_keys(begin, tokens);
      for (int i = 0; i < count_; ++i) {
        if (by_rows_) load_rows(i, begin, tokens);
        weigh(i, begin, tokens);
        for (int panel = 0; panel < memory_.panels; ++panel) advance(i, panel, begin, tokens);
      }
    }
    if (slot_ != 0)
      for (int i = 0; i < count_; ++i) put_back(i);
  }

 private:
  float* panel_of(int i, int panel) { return memory_.states.data() + i * memory_.of_state + static_cast<int64_t>(panel) * numbers_ * kWide; }
  float* kept_state(int i) { return call_.states + (slot_ * call_.heads + head_ + i) * size_ * numbers_; }

  void fetch(int i) {
    const float* from = kept_state(i);
    for (int panel = 0; panel < memory_.panels; ++panel) {
      float* to = panel_of(i, panel);
      const int first = panel * kWide, width = std::min(kWide, size_ - first);
      if constexpr (kIsDelta) {
        for (int n = 0; n < numbers_; ++n) {
          std::memcpy(to + n * kWide, from + static_cast<int64_t>(n) * size_ + first, width * sizeof(float));
          for (int p = width; p < kWide; ++p) to[n * kWide + p] = 0.0f;
        }
      } else {
        for (int at = 0; at < kWide; at += kLanes) {
          const float* rows[kLanes];
          const int count = std::max(0, std::min(kLanes, width - at));
          for (int p = 0; p < count; ++p) rows[p] = from + static_cast<int64_t>(first + at + p) * numbers_;
          tiles::widen_transposed(rows, count, numbers_, splat(1.0f), to + at, kWide);
        }
      }
    }
  }

  void put_back(int i) {
    float* to = kept_state(i);
    for (int panel = 0; panel < memory_.panels; ++panel) {
      const float* from = panel_of(i, panel);
      const int first = panel * kWide, width = std::min(kWide, size_ - first);
      for (int n = 0; n < numbers_; ++n) {
        if constexpr (kIsDelta) {
          std::memcpy(to + static_cast<int64_t>(n) * size_ + first, from + n * kWide, width * sizeof(float));
        } else {
          for (int p = 0; p < width; ++p) to[static_cast<int64_t>(first + p) * numbers_ + n] = from[n * kWide + p];
        }
      }
    }
  }

  // Read keys and queries of a chunk. Those of a delta rule are normalised to length 1.
  void read_keys(int begin, int tokens) {
    const float *keys = keys_ + static_cast<int64_t>(begin) * conv_.channels, *queries = queries_ + static_cast<int64_t>(begin) * conv_.channels;
    alignas(64) float of_keys[kChunk], of_queries[kChunk];
    for (int i = 0; i < kChunk; ++i) {
      of_keys[i] = of_queries[i] = 1.0f;
      if (kIsDelta && i < tokens) {
        of_keys[i] = 1.0f / length(keys + static_cast<int64_t>(i) * conv_.channels, numbers_);
        of_queries[i] = 1.0f / (length(queries + static_cast<int64_t>(i) * conv_.channels, numbers_) * std::sqrt(static_cast<float>(numbers_)));
      }
    }
    for (int i = 0; i < tokens; ++i) {
      const float* from = keys + static_cast<int64_t>(i) * conv_.channels;
      float* to = &memory_.keys[i * numbers_];
#pragma omp simd
      for (int n = 0; n < numbers_; ++n) to[n] = from[n] * of_keys[i];
    }
    for (int at = 0; at < kChunk; at += kLanes) {
      const int count = std::max(0, std::min(kLanes, tokens - at));
      const float *rows[kLanes], *others[kLanes];
      for (int i = 0; i < count; ++i) {
        rows[i] = keys + static_cast<int64_t>(at + i) * conv_.channels;
        others[i] = queries + static_cast<int64_t>(at + i) * conv_.channels;
      }
      tiles::widen_transposed(rows, count, numbers_, load<floats>(of_keys + at), &memory_.key_columns[at], kChunk);
      tiles::widen_transposed(others, count, numbers_, load<floats>(of_queries + at), &memory_.query_columns[at], kChunk);
    }
  }

  // Read keys and queries, and compute their products.
  void load_keys(int begin, int tokens) {
    read_keys(begin, tokens);
    for (int j = 0; j < tokens; j += kBlockRows) {
      const int rows = std::min(kBlockRows, tokens - j);
      for (int at = j / kWide * kWide; at < tokens; at += kWide) {
        const float* columns = &memory_.key_columns[j];
        multiply(rows, columns, kChunk, &memory_.query_columns[at], kChunk, numbers_, 0.0f, &memory_.attends[j * kChunk + at], kChunk);
        if constexpr (kIsDelta)
          multiply(rows, columns, kChunk, &memory_.key_columns[at], kChunk, numbers_, 0.0f, &memory_.among_keys[j * kChunk + at], kChunk);
      }
    }
  }

  // The same if each number decays separately. Keys and queries become what `advance` needs without other decays.
  void load_rows(int i, int begin, int tokens) {
    Memory& m = memory_;
    read_keys(begin, tokens);
    for (int t = 0; t < kChunk; ++t)
      for (int n = 0; n < numbers_; ++n) {
        const float before = t == 0 ? 0.0f : m.row_sums[n * kChunk + t - 1];
        m.row_sums[n * kChunk + t] = before + (t < tokens ? log_decay<T>(call_, token_ + begin + t, head_ + i, n) * kLog2E : 0.0f);
      }
    for (int first = 0; first < tokens; first += kLanes) {
      if (first + kLanes < tokens) multiply_later(first, tokens);
      multiply_near(first, std::min(first + kLanes, tokens));
    }
    for (int n = 0; n < numbers_; ++n) {
      float *sums = &m.row_sums[n * kChunk], *keys = &m.key_columns[n * kChunk], *queries = &m.query_columns[n * kChunk];
      const float last = sums[kChunk - 1];
      m.lasting[n] = std::exp2(last);
      for (int at = 0; at < kChunk; at += kLanes) {
        const floats grown = power_of_two(load<floats>(sums + at));
        store(keys + at, load<floats>(keys + at) * grown);
        store(queries + at, load<floats>(queries + at) * grown);
        store(sums + at, power_of_two(last - load<floats>(sums + at)));
      }
      for (int t = 0; t < tokens; ++t) m.keys[t * numbers_ + n] *= sums[t];
    }
  }

  // Multiply the keys of the kLanes tokens from `first` on with later tokens. All factors are at most 1.
  void multiply_later(int first, int tokens) {
    Memory& m = memory_;
    const int next = first + kLanes;
    for (int n = 0; n < numbers_; ++n) {
      const float *sums = &m.row_sums[n * kChunk], *keys = &m.key_columns[n * kChunk], *queries = &m.query_columns[n * kChunk];
      const float last = sums[next - 1];
      store(&m.near_keys[n * kLanes], load<floats>(keys + first) * power_of_two(last - load<floats>(sums + first)));
      for (int at = next; at < kChunk; at += kLanes) {
        const floats faded = power_of_two(load<floats>(sums + at) - last);
        store(&m.far_keys[n * kChunk + at], load<floats>(keys + at) * faded);
        store(&m.far_queries[n * kChunk + at], load<floats>(queries + at) * faded);
      }
    }
    for (int j = 0; j < kLanes; j += kBlockRows) {
      const int rows = std::min(kBlockRows, kLanes - j), row = (first + j) * kChunk;
      for (int at = next / kWide * kWide; at < tokens; at += kWide) {
        multiply(rows, &m.near_keys[j], kLanes, &m.far_queries[at], kChunk, numbers_, 0.0f, &m.attends[row + at], kChunk);
        multiply(rows, &m.near_keys[j], kLanes, &m.far_keys[at], kChunk, numbers_, 0.0f, &m.among_keys[row + at], kChunk);
      }
    }
  }

  // Multiply the keys of the tokens [first, end) with one another and with their queries.
  void multiply_near(int first, int end) {
    Memory& m = memory_;
    for (int j = first; j < end; ++j) {
      floats of_queries{}, of_keys{};
      for (int n = 0; n < numbers_; ++n) {
        const float *sums = &m.row_sums[n * kChunk], *keys = &m.key_columns[n * kChunk], *queries = &m.query_columns[n * kChunk];
        const floats since = load<floats>(sums + first) - sums[j];
        const floats key = power_of_two(tiles::choose(since > 0.0f, floats{}, since)) * keys[j];
        of_queries += key * load<floats>(queries + first);
        of_keys += key * load<floats>(keys + first);
      }
      store(&m.attends[j * kChunk + first], of_queries);
      store(&m.among_keys[j * kChunk + first], of_keys);
    }
  }

  // Compute the weights of each key's row for later queries and for its own, with the decays of a head.
  void weigh(int i, int begin, int tokens) {
    Memory& m = memory_;
    float sum = 0.0f;
    for (int t = 0; t < kChunk; ++t) {
      const int64_t token = token_ + begin + t;
      m.rates[t] = 0.0f;
      if (t < tokens) {
        if constexpr (kIsDelta) {
          m.rates[t] = written_share<T>(call_, token, head_ + i);
          if (!by_rows_) sum += log_decay<T>(call_, token, head_ + i) * kLog2E;
        } else {
          m.rates[t] = step_length<T>(call_, token, head_ + i);
          sum += m.rates[t] * call_.a[head_ + i] * kLog2E;
        }
      }
      m.sums[t] = sum;
    }
    for (int t = 0; t < kChunk; t += kLanes) {
      const floats sums = load<floats>(&m.sums[t]);
      store(&m.grown[t], power_of_two(sums));
      store(&m.left[t], power_of_two(sum - sums));
    }
    const int end = round_up(tokens, kLanes);
    for (int j = 0; j < tokens; ++j) {
      for (int at = 0; at < j / kLanes * kLanes; at += kLanes) store(&m.weights[j * kChunk + at], floats{});
      for (int at = j / kLanes * kLanes; at < end; at += kLanes) {
        const ints is_before = tiles::lane_numbers() + at < j;
        const floats decay = tiles::choose(is_before, floats{}, power_of_two(load<floats>(&m.sums[at]) - m.sums[j]));
        // The rows of earlier tokens may hold anything.
        store(&m.weights[j * kChunk + at], tiles::choose(is_before, floats{}, load<floats>(&m.attends[j * kChunk + at]) * decay));
        if constexpr (kIsDelta)
          store(&m.system[j * kChunk + at], load<floats>(&m.among_keys[j * kChunk + at]) * decay * -load<floats>(&m.rates[at]));
      }
    }
  }

  // Advance kWide columns of a state over a chunk.
  void advance(int i, int panel, int begin, int tokens) {
    Memory& m = memory_;
    float* state = panel_of(i, panel);
    const int first = panel * kWide, width = std::min(kWide, size_ - first);
    const float* values = values_ + static_cast<int64_t>(begin) * conv_.channels + static_cast<int64_t>(i) * size_ + first;
    T* out = static_cast<T*>(call_.out) + ((token_ + begin) * call_.heads + head_ + i) * size_ + first;
    for (int t = 0; t < tokens; t += kBlockRows) {
      const int rows = std::min(kBlockRows, tokens - t);
      if constexpr (kIsDelta) multiply(rows, &m.key_columns[t], kChunk, state, kWide, numbers_, 0.0f, &m.written[t * kWide], kWide);
      multiply(rows, &m.query_columns[t], kChunk, state, kWide, numbers_, 0.0f, &m.read[t * kWide], kWide);
      for (int r = t; r < t + rows; ++r) {
        const float* value = values + static_cast<int64_t>(r) * conv_.channels;
        alignas(64) float padded[kWide] = {};
        if (width < kWide) {
          std::memcpy(padded, value, width * sizeof(float));
          value = padded;
        }
        for (int half = 0; half < kWide; half += kLanes) {
          float *written = &m.written[r * kWide + half], *read = &m.read[r * kWide + half];
          floats wanted = load<floats>(value + half);
          if constexpr (kIsDelta) wanted -= load<floats>(written) * m.grown[r];
          store(written, wanted * m.rates[r]);
          store(read, load<floats>(read) * m.grown[r]);
        }
      }
      if constexpr (kIsDelta) solve(t, rows);
      add_earlier(m.weights, m.read, t, rows, true);
    }
    for (int t = 0; t < tokens; ++t) {
      const float* value = values + static_cast<int64_t>(t) * conv_.channels;
      T* row = out + static_cast<int64_t>(t) * call_.heads * size_;
      const float through = kIsDelta ? 0.0f : call_.d[head_ + i];
#pragma omp simd
      for (int p = 0; p < width; ++p) row[p] = from_float<T>(m.read[t * kWide + p] + (kIsDelta ? 0.0f : through * value[p]));
      for (int half = 0; half < kWide; half += kLanes) {
        float* written = &m.written[t * kWide + half];
        store(written, load<floats>(written) * m.left[t]);
      }
    }
    for (int n = 0; by_rows_ && n < numbers_; ++n)
      for (int half = 0; half < kWide; half += kLanes) store(state + n * kWide + half, load<floats>(state + n * kWide + half) * m.lasting[n]);
    const float lasting = m.grown[kChunk - 1];
    for (int n = 0; n < numbers_; n += kBlockRows)
      multiply(std::min(kBlockRows, numbers_ - n), &m.keys[n], numbers_, m.written.data(), kWide, tokens, lasting, state + n * kWide, kWide);
  }

  // Subtract from the written rows [t, t + rows) what earlier rows wrote at their keys.
  void solve(int t, int rows) { add_earlier(memory_.system, memory_.written, t, rows, false); }

  // Add to the rows [t, t + rows) of `to` what earlier tokens wrote, and they themselves if `sees_own`, times `factors`. Later tokens are
  // not read, because 0 times NaN is NaN: the beginning of a prompt, which others may share, must not depend on later tokens.
  void add_earlier(Aligned<float>& factors, Aligned<float>& to, int t, int rows, bool sees_own) {
    const Memory& m = memory_;
    if (t > 0) multiply(rows, &factors[t], kChunk, m.written.data(), kWide, t, 1.0f, &to[t * kWide], kWide);
    for (int r = t; r < t + rows; ++r) {
      floats first = load<floats>(&to[r * kWide]), second = load<floats>(&to[r * kWide + kLanes]);
      for (int j = t; j < r + sees_own; ++j) {
        const float factor = factors[j * kChunk + r];
        first += load<floats>(&m.written[j * kWide]) * factor;
        second += load<floats>(&m.written[j * kWide + kLanes]) * factor;
      }
      store(&to[r * kWide], first);
      store(&to[r * kWide + kLanes], second);
    }
  }

  const Conv& conv_;
  const Heads& call_;
  Memory& memory_;
  const Stretch part_;
  const int head_, count_, size_, numbers_;
  const bool by_rows_;
  const float *values_, *keys_, *queries_;
  int64_t token_, slot_;
};

template <class T, bool kIsDelta>
void run_prompts(const Conv& conv, const Heads& call, const Prompts& prompts, int threads) {
  const std::vector<std::vector<Stretch>> parts = parts_of(prompts);
  const int times = call.heads / call.groups, runs = (times + kTogether - 1) / kTogether;
#pragma omp parallel num_threads(static_cast<int64_t>(conv.tokens) * conv.channels < kAlone ? 1 : threads)
  {
    Memory memory(call.numbers, call.size, kIsDelta, kIsDelta && call.decays > 1);
    for (const std::vector<Stretch>& part : parts) {
      convolve_all<T, float>(
          conv, prompts, part, [&](const Stretch& each) { return prompts.room + static_cast<int64_t>(each.at) * conv.channels; }, conv.channels);
#pragma omp for collapse(3) schedule(dynamic)
      for (size_t s = 0; s < part.size(); ++s)
        for (int group = 0; group < call.groups; ++group)
          for (int run = 0; run < runs; ++run) {
            const int head = group * times + run * kTogether, count = std::min(kTogether, times - run * kTogether);
            Run<T, kIsDelta>(conv, call, prompts, part[s], head, count, memory).run();
          }
    }
    keep_tails<T>(conv, prompts);
  }
}

template <class T>
void convolve_prompts(const Conv& conv, const Prompts& prompts, int threads) {
  T* out = static_cast<T*>(conv.out);
  std::vector<Stretch> all;
  for (const std::vector<Stretch>& part : parts_of(prompts)) all.insert(all.end(), part.begin(), part.end());
#pragma omp parallel num_threads(static_cast<int64_t>(conv.tokens) * conv.channels < kAlone ? 1 : threads)
  {
    convolve_all<T, T>(
        conv, prompts, all, [&](const Stretch& each) { return out + (prompts.begins[each.prompt] + each.first) * conv.channels; }, conv.channels);
    keep_tails<T>(conv, prompts);
  }
}

}  // namespace
}  // namespace piecework

extern "C" void piecework_conv_prompts(const void* conv, const void* prompts, int is_bf16, int threads) {
  using namespace piecework;
  (is_bf16 ? convolve_prompts<bf16> : convolve_prompts<float>)(*static_cast<const Conv*>(conv), *static_cast<const Prompts*>(prompts), threads);
}

extern "C" void piecework_mamba2_prompts(const void* conv, const void* heads, const void* prompts, int is_bf16, int threads) {
  using namespace piecework;
  const auto run = is_bf16 ? run_prompts<bf16, false> : run_prompts<float, false>;
  run(*static_cast<const Conv*>(conv), *static_cast<const Heads*>(heads), *static_cast<const Prompts*>(prompts), threads);
}

extern "C" void piecework_gated_delta_prompts(const void* conv, const void* heads, const void* prompts, int is_bf16, int threads) {
  using namespace piecework;
  const auto run = is_bf16 ? run_prompts<bf16, true> : run_prompts<float, true>;
  run(*static_cast<const Conv*>(conv), *static_cast<const Heads*>(heads), *static_cast<const Prompts*>(prompts), threads);
}
