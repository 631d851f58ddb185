// The simulated NPU as a Python extension module; torch.npu is built on it in Python.
#include "graph.h"

#include <torch/csrc/utils/pybind.h>

namespace simnpu {
namespace {

REGISTER_ALLOCATOR(kNpu, &allocator);
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Ops that torch_npu has a kernel for although torch would compose them of others.
void register_launch(const std::vector<std::string>& names) {
  static std::vector<c10::RegistrationHandleRAII> registrations;
  for (const std::string& name : names) {
    const size_t dot = name.find('.');
    c10::OperatorName op(name.substr(0, dot), dot == std::string::npos ? "" : name.substr(dot + 1));
    registrations.push_back(c10::Dispatcher::singleton().registerImpl(
        op, c10::DispatchKey::PrivateUse1, c10::KernelFunction::makeFromBoxedFunction<&launch>(), std::nullopt, nullptr,
        "simnpu"));
  }
}

void record_event_step(Node::Kind kind, const std::shared_ptr<ExternalEvent>& event) {
  auto capture = capture_here();
  TORCH_CHECK(capture, "simnpu: an ExternalEvent is waited for and reset inside a capture only");
  capture->recording->push_back(Node{kind, std::nullopt, {}, {}, event});
}

// An event recorded on a capturing stream brings the stream that waits for it into the capture.
void join_capture(StreamId stream) {
  if (auto capture = capture_underway()) capture->streams.insert(stream);
}

void abort_capture() {
  std::lock_guard<std::mutex> lock(the_capture_mutex);
  the_capture = nullptr;
  task_update = nullptr;
  stall.reset();
  current_stream = kDefaultStream;
  memory.forget_recordings();
}

// The number of the replay that stalls what is launched on the stream, 0 where none does.
uint64_t stalled_by(StreamId stream) {
  std::lock_guard<std::mutex> lock(stall_mutex);
  return stall && stall->streams.count(stream) ? stall->number : 0;
}

void stand_behind(uint64_t number, StreamId stream) {
  std::lock_guard<std::mutex> lock(stall_mutex);
  if (number && stall && stall->number == number) stall->streams.insert(stream);
}

}  // namespace
}  // namespace simnpu

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace simnpu;
  namespace py = pybind11;
  using release_gil = py::call_guard<py::gil_scoped_release>;
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);

  py::class_<Graph>(m, "Graph")
      .def(py::init<>())
      .def("capture_begin", &Graph::capture_begin, py::arg("pool"), py::arg("capture_error_mode"))
      .def("capture_end", &Graph::capture_end)
      .def("replay", &Graph::replay, release_gil())
      .def("reset", &Graph::reset)
      .def("pool", &Graph::pool)
      .def("_launches", &Graph::launches);
  py::class_<ExternalEvent, std::shared_ptr<ExternalEvent>>(m, "ExternalEvent")
      .def(py::init<>())
      .def("record", [](ExternalEvent& event, StreamId stream) { record_external_event(event, stream); })
      .def("wait", [](std::shared_ptr<ExternalEvent> event) { record_event_step(Node::Kind::kWaitEvent, event); })
      .def("reset", [](std::shared_ptr<ExternalEvent> event) { record_event_step(Node::Kind::kResetEvent, event); });
  py::class_<TaskGroup>(m, "TaskGroup");
  m.def("begin_task_group", &begin_task_group);
  m.def("end_task_group", &end_task_group);
  m.def("begin_task_update", &begin_task_update);
  m.def("end_task_update", &end_task_update);
  m.def("abort_task_update", [] { task_update = nullptr; });

  m.def("new_pool_id", &new_pool_id);
  m.def("end_recording", [](PoolId pool) { memory.end_recording(pool); });
  m.def("release_pool", [](PoolId pool) { memory.release_pool(pool); });
  m.def("weak_reference", &weak_reference);
  m.def("is_capturing", [] { return capture_here() != nullptr; });
  m.def("is_stream_capturing", &is_stream_capturing);
  m.def("join_capture", &join_capture);
  m.def("abort_capture", &abort_capture);
  m.def("is_executing", [] { return execution != Execution::kNone; });
  m.def("is_trial", [] { return execution == Execution::kTrial; });

  m.def("new_stream", &new_stream);
  m.def("current_stream", [] { return current_stream; });
  m.def("set_current_stream", [](StreamId stream) { current_stream = stream; });
  m.def("synchronize", &synchronize);
  m.def("stalled_by", &stalled_by);
  m.def("stand_behind", &stand_behind);
  m.def("wait_if_behind_stall", &wait_if_behind_stall);
  m.def("waits", [] { return waits.load(); });
  m.def("record_event", [] { return progress.launch(); });
  m.def("is_event_done", [](uint64_t number) { return progress.is_known(number); });
  m.def("wait_for_event", [](uint64_t number) { wait_for_device("an event that was not waited for yet", number); });

  py::class_<Settings>(m, "Settings")
      .def_readwrite("strict_addresses", &Settings::strict_addresses)
      .def_readwrite("hang_seconds", &Settings::hang_seconds)
      .def_readwrite("graph_limit", &Settings::graph_limit)
      .def_property(
          "total_memory", [](Settings&) { return memory.total_bytes; },
          [](Settings&, size_t bytes) { memory.total_bytes = bytes; });
  m.def("forbid_waiting", [](bool forbidden) { waiting_forbidden = forbidden; });
  m.attr("settings") = py::cast(&settings, py::return_value_policy::reference);
  m.def("live_graphs", [] { return live_graphs.load(); });
  m.def("allocated", [] { return memory.allocated(); });
  m.def("reserved", [] { return memory.reserved(); });
  m.def("peak", [] { return memory.peak(); });
  m.def("reset_peak", [] { memory.reset_peak(); });
  m.def("empty_cache", [] { memory.empty_cache(); });

  m.def("register_launch", &register_launch);
  m.def("set_cpu_fallbacks", [](std::set<std::string> names) { rules.cpu_fallbacks = std::move(names); });
  m.def("set_host_arguments", [](std::set<std::string> names) { rules.host_arguments = std::move(names); });
}
