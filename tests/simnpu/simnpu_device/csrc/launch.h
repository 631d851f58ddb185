// A kernel launch: every op that reaches the device goes through launch(), which runs it on the host's kernels, or
// records it with raw addresses while a stream is capturing.
#pragma once
#include "tensors.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace simnpu {

using torch::jit::Stack;

// Rules that Python sets from the committed extract of torch_npu (see ops.py and install.py).
struct LaunchRules {
  std::set<std::string> cpu_fallbacks;   // "aten::nonzero_static": runs on the host there, which waits for the device
  std::set<std::string> host_arguments;  // "atb::_npu_paged_attention.context_lens": read by the host at launch
};
inline LaunchRules rules;

enum class Execution { kNone, kTrial, kRun };
inline thread_local Execution execution = Execution::kNone;  // whether host kernels run on behalf of the device

// Host kernels see neither autograd nor the modes (fake tensors, recorders) of the Python code that launched.
class HostExecution {
  at::AutoDispatchBelowADInplaceOrView below_autograd_;
  c10::impl::ExcludeDispatchKeyGuard without_modes_{
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
  Execution before_ = execution;

 public:
  explicit HostExecution(Execution kind) { execution = kind; }
  ~HostExecution() { execution = before_; }
};

inline void run_on_host(const c10::OperatorHandle& op, Stack& stack, Execution kind) {
  HostExecution guard(kind);
  op.callBoxed(&stack);
}

inline void copy_on_host(const at::Tensor& to, const at::Tensor& from) {
  HostExecution guard(Execution::kRun);
  to.copy_(from);
}

inline at::Tensor snapshot_on_host(const at::Tensor& from) {
  HostExecution guard(Execution::kRun);
  return from.clone(at::MemoryFormat::Contiguous);
}

// An output of no elements that the kernel may resize; the host stand-in is what it resizes.
struct ResizableOutput {
  size_t argument;
  at::Tensor device, host;
};

// Turns the arguments of a launch into what the host kernel gets: device tensors become aliases of their bytes.
class ArgumentTranslator {
 public:
  ArgumentTranslator(const c10::OperatorHandle& op, const Capture* capture)
      : schema_(op.schema()), name_(c10::toString(op.operator_name())), capture_(capture) {}

  Stack translate(const Stack& device) {
    Stack host;
    for (size_t i = 0; i < device.size(); ++i) host.push_back(translate(i, device[i]));
    return host;
  }

  std::vector<ResizableOutput> resizable;

 private:
  const c10::FunctionSchema& schema_;
  const std::string name_;
  const Capture* capture_;

  c10::IValue translate(size_t index, const c10::IValue& value) {
    if (value.isTensor()) return translate(index, value.toTensor());
    if (value.isTensorList()) {
      c10::List<at::Tensor> tensors;
      for (const at::Tensor& tensor : value.toTensorVector()) tensors.push_back(translate(index, tensor));
      return tensors;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> tensors;
      for (const auto& tensor : value.toOptionalTensorVector())
        tensors.push_back(tensor ? std::optional(translate(index, *tensor)) : std::nullopt);
      return tensors;
    }
    if (value.isDevice() && value.toDevice().type() == kNpu) return c10::Device(c10::kCPU);
    TORCH_CHECK(!value.isGenerator(), "simnpu: ", name_, ": generators of the npu are not simulated");
    return value;
  }

  at::Tensor translate(size_t index, const at::Tensor& tensor) {
    const auto& argument = schema_.arguments()[index];
    if (!tensor.defined()) return tensor;
    if (rules.host_arguments.count(schema_.name() + "." + argument.name())) return host_argument(argument, tensor);
    if (!is_npu(tensor)) return host_tensor(argument, tensor);
    if (is_mask_index(argument, tensor)) wait_for_device(name_ + " with a mask as index");
    if (argument.is_out() && tensor.numel() == 0) {
      resizable.push_back({index, tensor, at::empty({0}, at::TensorOptions().dtype(tensor.scalar_type()))});
      return resizable.back().host;
    }
    return host_alias(tensor);
  }

  // Lengths that the kernel's host part reads; a graph keeps their values of the moment of capture.
  at::Tensor host_argument(const c10::Argument& argument, const at::Tensor& tensor) {
    TORCH_CHECK(
        tensor.device().is_cpu(), name_, ": ", argument.name(), " must be a host tensor, got one on ", tensor.device());
    return tensor.clone();
  }

  // Numbers in 0-dim host tensors become constants of the launch; index tensors are uploaded, which waits.
  at::Tensor host_tensor(const c10::Argument& argument, const at::Tensor& tensor) {
    if (tensor.device().is_cpu() && tensor.dim() == 0) return capture_ ? tensor.clone() : tensor;
    if (tensor.device().is_cpu() && argument.name() == "indices") {
      wait_for_device(name_ + " with an index on the host");
      return tensor;
    }
    TORCH_CHECK(
        false, "Expected all tensors to be on the same device, but ", argument.name(), " is on ", tensor.device(),
        ", different from other tensors on npu:0 (", name_, ")");
  }

  static bool is_mask_index(const c10::Argument& argument, const at::Tensor& tensor) {
    return argument.name() == "indices" && (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte);
  }
};

// Calls `change` on every tensor of a stack.
template <typename Change>
Stack map_tensors(const Stack& stack, Change change) {
  Stack changed;
  for (const auto& value : stack) {
    if (value.isTensor()) {
      changed.push_back(change(value.toTensor()));
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> tensors;
      for (const at::Tensor& tensor : value.toTensorVector()) tensors.push_back(change(tensor));
      changed.push_back(tensors);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> tensors;
      for (const auto& tensor : value.toOptionalTensorVector())
        tensors.push_back(tensor ? std::optional(change(*tensor)) : std::nullopt);
      changed.push_back(tensors);
    } else {
      changed.push_back(value);
    }
  }
  return changed;
}

// A capture executes nothing. What it needs, the checks of the arguments and the shapes of the results, comes from a
// trial on zeros in place of everything that lies on the device.
inline Stack zeros_for_trial(const Stack& host) {
  HostExecution guard(Execution::kTrial);
  return map_tensors(host, [](const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.numel() || !memory.contains(tensor.const_data_ptr())) return tensor;
    return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options()).zero_();
  });
}

inline void check_has_kernel(const c10::OperatorHandle& op) {
  static const std::set<std::string> device_namespaces{"aten", "npu", "atb"};
  const std::string& name = op.schema().name();
  TORCH_CHECK_NOT_IMPLEMENTED(
      device_namespaces.count(name.substr(0, name.find("::"))), "Could not run '", name,
      "' with arguments from the 'npu' backend: no kernel is registered for PrivateUse1");
}

// Ascend computes float64 on its control processor alone, a hundred times slower, which no step of a server may ask
// for; the 910 has no numbers of FP8, whose bytes it can only move (CANN's aclnnCast).
inline bool is_computed(const at::Tensor& tensor) {
  const auto type = tensor.scalar_type();
  return type != at::kDouble && type != at::kFloat8_e4m3fn && type != at::kFloat8_e5m2;
}

inline void check_is_computed(const c10::OperatorHandle& op, const Stack& stack) {
  for (const auto& value : torch::jit::last(stack, op.schema().arguments().size()))
    TORCH_CHECK(
        !value.isTensor() || !is_npu(value.toTensor()) || is_computed(value.toTensor()), "simnpu: ",
        op.schema().name(), " in ", value.isTensor() ? toString(value.toTensor().scalar_type()) : "",
        ", which the NPU's compute units do not know");
}

// Ops whose launch makes the host wait: it needs values that the device computes, or runs the op itself.
inline std::string why_it_waits(const c10::OperatorHandle& op) {
  const std::string name = c10::toString(op.operator_name());
  if (rules.cpu_fallbacks.count(name)) return name + ", which torch_npu runs on the CPU,";
  const bool reads_values = op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
  // index.Tensor is tagged for the sake of masks, which ArgumentTranslator looks for.
  return reads_values && name != "aten::index.Tensor" ? name + ", whose result depends on values of the device," : "";
}

// Pushes what the op returns: the argument itself where the schema says so, else a new device tensor.
class ResultTranslator {
 public:
  ResultTranslator(const c10::OperatorHandle& op, const Stack& device_arguments, bool copy)
      : schema_(op.schema()), name_(schema_.name()), arguments_(device_arguments), copy_(copy) {}

  void translate(const Stack& host_results, Stack* stack) {
    for (size_t i = 0; i < host_results.size(); ++i) stack->push_back(translate(schema_.returns()[i], host_results[i]));
  }

  std::vector<at::Tensor> aliases;  // one for each tensor returned, undefined where it is an argument

 private:
  const c10::FunctionSchema& schema_;
  const std::string& name_;
  const Stack& arguments_;
  const bool copy_;

  c10::IValue translate(const c10::Argument& returned, const c10::IValue& host) {
    if (returned.alias_info()) {
      aliases.emplace_back();
      return aliased_argument(*returned.alias_info());
    }
    if (host.isTensor()) return to_device(host.toTensor());
    if (!host.isTensorList()) return host;
    c10::List<at::Tensor> tensors;
    for (const at::Tensor& tensor : host.toTensorVector()) tensors.push_back(to_device(tensor));
    return tensors;
  }

  c10::IValue aliased_argument(const c10::AliasInfo& alias) {
    TORCH_CHECK(alias.isWrite(), "simnpu: the view op ", name_, " is not simulated");
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const auto* info = schema_.arguments()[i].alias_info();
      if (info && *info == alias) return arguments_[i];
    }
    TORCH_INTERNAL_ASSERT(false, name_, " returns an alias of no argument");
  }

  at::Tensor to_device(const at::Tensor& host) {
    aliases.emplace_back();
    if (!host.defined()) return host;
    at::Tensor device = empty_like_host(host);
    aliases.back() = host_alias(device);
    if (copy_) copy_on_host(aliases.back(), host);
    return device;
  }
};

// Between graph_task_update_begin and _end launches replace recorded ones and run nothing.
struct TaskUpdate {
  std::shared_ptr<Recording> recording;
  size_t begin, end;
  Recording launches;
};
inline thread_local std::unique_ptr<TaskUpdate> task_update;

inline void launch(const c10::OperatorHandle& op, Stack* stack) {
  check_has_kernel(op);
  check_is_computed(op, *stack);
  if (!task_update) wait_if_behind_stall(current_stream, op.schema().name());
  auto capture = task_update ? nullptr : capture_for_launch(op.schema().name());
  if (const std::string why = why_it_waits(op); !why.empty()) wait_for_device(why);

  Stack device = torch::jit::last(*stack, op.schema().arguments().size()).vec();
  torch::jit::drop(*stack, device.size());
  ArgumentTranslator translator(op, capture.get());
  Node node{Node::Kind::kLaunch, op, translator.translate(device), {}, nullptr};
  const bool runs = !capture && !task_update;
  Stack results = runs ? node.arguments : zeros_for_trial(node.arguments);
  run_on_host(op, results, runs ? Execution::kRun : Execution::kTrial);

  for (auto& [index, output, host] : translator.resizable) {
    output.resize_(host.sizes());
    node.arguments[index] = host_alias(output);
    if (runs) copy_on_host(host_alias(output), host);
  }
  if (task_update) {
    task_update->launches.push_back(std::move(node));
    stack->insert(stack->end(), results.begin(), results.end());
    return;
  }
  ResultTranslator returned(op, device, runs);
  returned.translate(results, stack);
  node.results = std::move(returned.aliases);
  if (capture) capture->recording->push_back(std::move(node));
}

inline at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
  TORCH_CHECK(
      from.scalar_type() == to.scalar_type() || (is_computed(from) && is_computed(to)), "simnpu: a conversion of ",
      toString(from.scalar_type()), " to ", toString(to.scalar_type()),
      ", one of which the NPU's compute units do not know");
  wait_if_behind_stall(current_stream, "a copy");
  if (!non_blocking && !is_npu(from)) wait_for_device("a blocking copy to the device");
  if (!non_blocking && !is_npu(to)) wait_for_device("a copy to the host");
  const at::Tensor target = is_npu(to) ? host_alias(to) : to, source = is_npu(from) ? host_alias(from) : from;
  if (auto capture = capture_for_launch("a copy"))
    capture->recording->push_back(Node{Node::Kind::kLaunch, op, {target, source, false}, {at::Tensor()}, nullptr});
  else if (non_blocking && !is_npu(to) && to.is_contiguous() && to.scalar_type() == from.scalar_type() && to.sizes() == from.sizes())
    progress.copy_to_host(to, snapshot_on_host(source));
  else
    copy_on_host(target, source);
  return to;
}

inline at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, /*non_blocking=*/false);
}

inline at::Scalar read_scalar(const at::Tensor& tensor) {
  wait_for_device("reading a value of the device on the host (item, tolist, bool)");
  const at::Tensor host = host_alias(tensor);
  HostExecution guard(Execution::kRun);
  return host.item();
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&launch>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", read_scalar);
}

}  // namespace simnpu
