// NPUGraph: capture, replay, and the update of recorded launches.
#pragma once
#include "device.h"
#include "launch.h"

#include <atomic>

namespace simnpu {

inline std::atomic<int> live_graphs{0};

inline PoolId new_pool_id() {
  static std::atomic<uint64_t> next{1};
  return {0, next++};
}

// A run of launches inside a recording, kept to be updated.
struct TaskGroup {
  std::shared_ptr<Recording> recording;
  size_t begin, end;
};

inline void begin_task_group() {
  auto capture = capture_here();
  TORCH_CHECK(capture, "graph_task_group_begin: the current stream is not capturing");
  capture->group_begin = capture->recording->size();
}

inline TaskGroup end_task_group() {
  auto capture = capture_here();
  TORCH_CHECK(capture, "graph_task_group_end: the current stream is not capturing");
  return {capture->recording, capture->group_begin, capture->recording->size()};
}

inline void begin_task_update(const TaskGroup& group) {
  TORCH_CHECK(!task_update, "graph_task_update_begin: another update is under way");
  task_update.reset(new TaskUpdate{group.recording, group.begin, group.end, {}});
}

inline void end_task_update() {
  auto update = std::move(task_update);
  TORCH_CHECK(update, "graph_task_update_end without graph_task_update_begin");
  const size_t recorded = update->end - update->begin;
  TORCH_CHECK(
      update->launches.size() == recorded, "graph_task_update: the group recorded ", recorded, " launches, the update made ",
      update->launches.size());
  for (size_t i = 0; i < recorded; ++i) {
    Node& node = update->recording->at(update->begin + i);
    TORCH_CHECK(node.op->operator_name() == update->launches[i].op->operator_name(), "graph_task_update: another op");
    node.arguments = std::move(update->launches[i].arguments);
  }
}

inline void check_address(const at::Tensor& tensor, const Node& node) {
  if (!tensor.defined() || !tensor.numel() || !memory.contains(tensor.const_data_ptr())) return;
  TORCH_CHECK(
      memory.is_live(tensor.const_data_ptr()), "simnpu: the replay of ", node.op->operator_name(), " touches memory at ",
      tensor.const_data_ptr(), " that was freed after the capture");
}

inline void replay_launch(const Node& node) {
  if (settings.strict_addresses) {
    for (const auto& tensor : node.results) check_address(tensor, node);
    map_tensors(node.arguments, [&](const at::Tensor& tensor) { return check_address(tensor, node), tensor; });
  }
  Stack stack = node.arguments;
  run_on_host(*node.op, stack, Execution::kRun);
  size_t next = 0;
  auto store = [&](const at::Tensor& host) {
    const at::Tensor& result = node.results.at(next++);
    if (result.defined()) copy_on_host(result, host);
  };
  for (const auto& value : stack) {
    if (value.isTensor()) store(value.toTensor());
    if (value.isTensorList())
      for (const at::Tensor& tensor : value.toTensorVector()) store(tensor);
  }
}

// Whether the replay stops here, before an event that is not recorded.
inline bool stops(const Stall& replay) {
  const Node& node = replay.recording->at(replay.next);
  std::lock_guard<std::mutex> lock(stall_mutex);
  if (node.kind != Node::Kind::kWaitEvent || node.event->recorded) return false;
  stall = replay;
  return true;
}

inline void go_on(Stall replay) {
  for (; replay.next < replay.recording->size(); ++replay.next) {
    if (stops(replay)) return;
    const Node& node = replay.recording->at(replay.next);
    if (node.kind == Node::Kind::kLaunch) replay_launch(node);
    if (node.kind == Node::Kind::kResetEvent) node.event->recorded = false;
  }
}

inline void record_external_event(ExternalEvent& event, StreamId stream) {
  wait_if_behind_stall(stream, "an event that a graph waits for");
  event.recorded = true;
  std::optional<Stall> replay;
  {
    std::lock_guard<std::mutex> lock(stall_mutex);
    std::swap(replay, stall);
    replay_goes_on = replay.has_value();
  }
  if (!replay) return;
  go_on(*replay);
  {
    std::lock_guard<std::mutex> lock(stall_mutex);
    replay_goes_on = false;
  }
  stall_over.notify_all();
}

class Graph {
 public:
  Graph() = default;
  Graph(const Graph&) = delete;
  ~Graph() {
    reset();
    memory.graph_is_gone(this);
  }

  void capture_begin(std::optional<PoolId> pool, const std::string& error_mode) {
    TORCH_CHECK(!recording_, "This NPUGraph instance already owns a captured graph. To capture a new graph, create a new instance.");
    TORCH_CHECK(
        error_mode == "global" || error_mode == "thread_local" || error_mode == "relaxed",
        "Unknown capture error mode. Expected `global`, `thread_local`, or `relaxed`, got ", error_mode);
    TORCH_CHECK(current_stream != kDefaultStream, "NPU graphs must be captured on a non-default stream.");
    // The allocator is told first, so a capture that the device refuses leaves the pool recording.
    pool_ = pool.value_or(new_pool_id());
    memory.begin_recording(pool_, this);
    TORCH_CHECK(live_graphs < settings.graph_limit, "simnpu: no stream left for another graph: ", settings.graph_limit, " are kept");
    std::lock_guard<std::mutex> lock(the_capture_mutex);
    TORCH_CHECK(!the_capture, "simnpu: a capture is already under way in this process");
    the_capture = std::make_shared<Capture>(
        Capture{pool_, current_stream, std::this_thread::get_id(), error_mode, {current_stream}});
    capture_ = the_capture;
  }

  void capture_end() {
    TORCH_CHECK(capture_, "simnpu: capture_end without capture_begin");
    auto capture = abandon_capture();
    const bool same_stream = capture->stream == current_stream;
    if (capture->invalidated_by.empty() && same_stream) {
      memory.end_recording(pool_);
      recording_ = capture->recording;
      ++live_graphs;
      if (recording_->empty()) TORCH_WARN("The NPU graph is empty: nothing was launched on the capturing stream.");
      return;
    }
    // torch_npu raises before it tells the allocator, and counts the graph among the pool's for good.
    TORCH_CHECK(same_stream, "Capture must end on the same stream it began on.");
    TORCH_CHECK(false, "simnpu: the capture was invalidated by ", capture->invalidated_by, " and gives no graph");
  }

  void replay() const {
    TORCH_CHECK(recording_, "Called NPUGraph::replay without a preceding successful capture.");
    forbid_while_capturing("a replay");
    wait_if_behind_stall(current_stream, "a replay");
    static std::atomic<uint64_t> replays{0};
    go_on(Stall{recording_, 0, {current_stream}, ++replays});
  }

  void reset() {
    if (capture_) abandon_capture();
    if (!recording_) return;
    --live_graphs;
    recording_ = nullptr;
    memory.release_pool(pool_);
  }

  PoolId pool() const {
    TORCH_CHECK(recording_, "Called NPUGraph::pool() without a preceding successful capture.");
    return pool_;
  }

  std::vector<std::string> launches() const {
    TORCH_CHECK(recording_, "simnpu: no captured graph");
    std::vector<std::string> names;
    for (const Node& node : *recording_)
      if (node.kind == Node::Kind::kLaunch) names.push_back(c10::toString(node.op->operator_name()));
    return names;
  }

 private:
  std::shared_ptr<Recording> recording_;
  std::shared_ptr<Capture> capture_;
  PoolId pool_;

  std::shared_ptr<Capture> abandon_capture() {
    std::lock_guard<std::mutex> lock(the_capture_mutex);
    the_capture = nullptr;
    return std::move(capture_);
  }
};

}  // namespace simnpu
