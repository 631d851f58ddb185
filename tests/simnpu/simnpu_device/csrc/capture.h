// What a capture is: the streams that take part, the launches recorded, and what may not happen meanwhile.
#pragma once
#include "memory.h"

#include <Python.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <algorithm>
#include <atomic>
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

// What tests may change; see `Simulator` in install.py.
struct Settings {
  bool strict_addresses = false;
  double hang_seconds = 1.0;
  int graph_limit = 1800;  // each captured graph keeps a stream, and the device has about 2,000 of them
};
inline Settings settings;

// Recorded by an update, waited for by a graph.
struct ExternalEvent {
  std::atomic<bool> recorded = false;
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

// A replay that has come to an event which is not recorded yet: it goes on when it is. `streams`: whose launches stand behind it.
struct Stall {
  std::shared_ptr<Recording> recording;
  size_t next = 0;
  std::set<StreamId> streams;
  uint64_t number = 0;
};
inline std::optional<Stall> stall;
inline bool replay_goes_on = false;
inline std::mutex stall_mutex;
inline std::condition_variable stall_over;

inline bool is_behind_stall(StreamId stream) {
  std::lock_guard<std::mutex> lock(stall_mutex);
  return stall && stall->streams.count(stream);
}

class WithoutGil {
  PyThreadState* state_ = PyGILState_Check() ? PyEval_SaveThread() : nullptr;

 public:
  WithoutGil() = default;
  WithoutGil(const WithoutGil&) = delete;
  ~WithoutGil() {
    if (state_) PyEval_RestoreThread(state_);
  }
};

// `what` stands behind a replay that waits for an update. It may come from another thread; hardware would wait for ever.
inline void wait_for_update(const std::string& what) {
  WithoutGil released;
  std::unique_lock<std::mutex> lock(stall_mutex);
  const auto limit = std::chrono::duration<double>(settings.hang_seconds);
  if (stall_over.wait_for(lock, limit, [] { return !stall && !replay_goes_on; })) return;
  stall.reset();
  TORCH_CHECK(
      false, "simnpu: ", what, " stands behind a replay that waits for an update that did not come: NPUGraph.update() must be "
      "called for each replay of a graph captured with auto_dispatch_capture, on a stream that does not wait for it (hardware would hang)");
}

inline void wait_if_behind_stall(StreamId stream, const std::string& what) {
  if (is_behind_stall(stream)) wait_for_update(what);
}

inline bool waiting_forbidden = false;  // set by tests that prove that a step never waits
inline std::atomic<uint64_t> waits = 0;  // how often the host has waited

// What the host knows of the device's progress: nothing of what it has launched is done, as far as it can tell, before it waits
// for that. So events are not complete and non-blocking copies to the host have not arrived, although here all runs at once.
// Any thread may wait: those that load weights do, all at once.
class Progress {
  struct Arrival {
    uint64_t number;
    at::Tensor target, values;
  };
  std::atomic<uint64_t> launched_ = 0;
  uint64_t known_ = 0;
  std::vector<Arrival> coming_;
  mutable std::mutex mutex_;

 public:
  uint64_t launch() { return ++launched_; }
  uint64_t launched() const { return launched_; }
  bool is_known(uint64_t number) const {
    std::lock_guard<std::mutex> lock(mutex_);
    return number <= known_;
  }

  // Until the host has waited, `target` holds no numbers that mean anything. Both lie on the host, contiguous, of one dtype.
  void copy_to_host(const at::Tensor& target, const at::Tensor& values) {
    std::memset(target.data_ptr(), kPoison, target.nbytes());
    std::lock_guard<std::mutex> lock(mutex_);
    coming_.push_back({launch(), target, values});
  }

  void learn(uint64_t number) {
    std::vector<Arrival> arrived, coming;  // let go of without the lock: a tensor may want the interpreter's first
    std::lock_guard<std::mutex> lock(mutex_);
    known_ = std::max(known_, number);
    for (Arrival& arrival : coming_) (arrival.number > known_ ? coming : arrived).push_back(std::move(arrival));
    coming_.swap(coming);
    for (const Arrival& arrival : arrived)
      std::memcpy(arrival.target.data_ptr(), arrival.values.const_data_ptr(), arrival.values.nbytes());
  }
};
inline Progress progress;

// The host waits for the device: never while a stream is capturing, and never where a test forbids it.
inline void wait_for_device(const std::string& what, uint64_t number = progress.launched()) {
  forbid_while_capturing(what);
  TORCH_CHECK(!waiting_forbidden, "simnpu: ", what, " waits for the device");
  ++waits;
  wait_for_update(what);
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
