// What a capture is: the streams that take part, the launches recorded, and what may not happen meanwhile.
#pragma once
#include "memory.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace simnpu {

using StreamId = int64_t;
constexpr StreamId kDefaultStream = 0;
inline thread_local StreamId current_stream = kDefaultStream;

// Recorded by the host (NPUGraph.update), waited for by a graph.
struct ExternalEvent {
  void record() {
    std::lock_guard<std::mutex> lock(mutex);
    recorded = true;
    changed.notify_all();
  }
  void reset() {
    std::lock_guard<std::mutex> lock(mutex);
    recorded = false;
  }
  bool wait(std::chrono::duration<double> limit) {
    std::unique_lock<std::mutex> lock(mutex);
    return changed.wait_for(lock, limit, [this] { return recorded; });
  }
  std::mutex mutex;
  std::condition_variable changed;
  bool recorded = false;
};

// One step of a graph. `arguments` and `results` hold host tensors that do not own their memory: the raw device
// addresses of the moment of capture, which a replay reads and writes whatever has become of the tensors.
struct Node {
  enum class Kind { kLaunch, kWaitEvent, kResetEvent };
  Kind kind = Kind::kLaunch;
  std::optional<c10::OperatorHandle> op;
  torch::jit::Stack arguments;
  std::vector<at::Tensor> results;
  std::shared_ptr<ExternalEvent> event;
};
using Recording = std::vector<Node>;

struct Capture {
  PoolId pool;
  StreamId stream;
  std::thread::id thread;
  std::string error_mode;
  std::set<StreamId> streams;
  std::shared_ptr<Recording> recording = std::make_shared<Recording>();
  size_t group_begin = 0;
  std::string invalidated_by;

  bool takes_part() const { return thread == std::this_thread::get_id() && streams.count(current_stream); }
  bool forbids_unsafe_calls() const {
    if (error_mode == "relaxed") return false;
    return error_mode == "global" || thread == std::this_thread::get_id();
  }
};

// One capture at a time in a process, as in CANN.
inline std::shared_ptr<Capture> the_capture;
inline std::mutex the_capture_mutex;

inline std::shared_ptr<Capture> capture_underway() {
  std::lock_guard<std::mutex> lock(the_capture_mutex);
  return the_capture;
}

// The capture that records what the calling thread launches now, if any.
inline std::shared_ptr<Capture> capture_here() {
  auto capture = capture_underway();
  return capture && capture->takes_part() ? capture : nullptr;
}

[[noreturn]] inline void invalidate(Capture& capture, const std::string& what) {
  if (capture.invalidated_by.empty()) capture.invalidated_by = what;
  TORCH_CHECK(false, what, " is not permitted while a stream is capturing");
}

inline void forbid_while_capturing(const std::string& what) {
  auto capture = capture_underway();
  if (capture && capture->forbids_unsafe_calls()) invalidate(*capture, what);
}

inline bool waiting_forbidden = false;  // set by tests that prove that a step never waits

// What the host knows of the device's progress: nothing of what it has launched is done, as far as it can tell, before it waits
// for that. So events are not complete and non-blocking copies to the host have not arrived, although here all runs at once.
class Progress {
  struct Arrival {
    uint64_t number;
    at::Tensor target, values;
  };
  uint64_t launched_ = 0, known_ = 0;
  std::vector<Arrival> coming_;

 public:
  uint64_t launch() { return ++launched_; }
  uint64_t launched() const { return launched_; }
  bool is_known(uint64_t number) const { return number <= known_; }

  // Until the host has waited, `target` holds no numbers that mean anything. Both lie on the host, contiguous, of one dtype.
  void copy_to_host(const at::Tensor& target, const at::Tensor& values) {
    std::memset(target.data_ptr(), kPoison, target.nbytes());
    coming_.push_back({launch(), target, values});
  }

  void learn(uint64_t number) {
    known_ = std::max(known_, number);
    std::erase_if(coming_, [&](const Arrival& arrival) {
      if (arrival.number > known_) return false;
      std::memcpy(arrival.target.data_ptr(), arrival.values.const_data_ptr(), arrival.values.nbytes());
      return true;
    });
  }
};
inline Progress progress;

// The host waits for the device: never while a stream is capturing, and never where a test forbids it.
inline void wait_for_device(const std::string& what, uint64_t number = progress.launched()) {
  forbid_while_capturing(what);
  TORCH_CHECK(!waiting_forbidden, "simnpu: ", what, " waits for the device");
  progress.learn(number);
}

// The capture that must record a launch, null where it runs at once.
inline std::shared_ptr<Capture> capture_for_launch(const std::string& name) {
  auto capture = capture_underway();
  if (!capture || capture->thread != std::this_thread::get_id()) return nullptr;
  if (!capture->takes_part() && capture->error_mode != "relaxed")
    invalidate(*capture, name + " on stream " + std::to_string(current_stream) + ", which does not take part in the capture,");
  return capture->takes_part() ? capture : nullptr;
}

inline bool is_stream_capturing(StreamId stream) {
  auto capture = capture_underway();
  return capture && capture->streams.count(stream);
}

inline PoolId pool_for_allocation() {
  auto capture = capture_here();
  if (!capture) return kDefaultPool;
  memory.ask_recording_graphs();
  return capture->pool;
}

}  // namespace simnpu
