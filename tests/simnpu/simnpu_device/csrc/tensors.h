// Device tensors: how they are made, seen from the host, viewed and resized. None of this is a launch.
#pragma once
#include "capture.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

namespace simnpu {

inline c10::Device npu_device() {
  return c10::Device(kNpu, 0);
}

inline void free_memory(void* pointer) {
  memory.free(pointer);
}

struct NpuAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* pointer = memory.allocate(bytes, pool_for_allocation());
    return {pointer, pointer, &free_memory, npu_device()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_memory; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
inline NpuAllocator allocator;

inline bool is_npu(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kNpu;
}

// The same bytes as a host tensor that owns nothing: what a kernel sees of a device tensor.
inline at::Tensor host_alias(const at::Tensor& tensor) {
  auto* address = const_cast<void*>(tensor.const_data_ptr());
  return at::from_blob(address, tensor.sizes(), tensor.strides(), at::TensorOptions().dtype(tensor.scalar_type()));
}

inline at::Tensor empty_like_host(const at::Tensor& host) {
  return at::detail::empty_strided_generic(
      host.sizes(), host.strides(), &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), host.scalar_type());
}

// The same bytes as a device tensor that owns nothing.
inline at::Tensor weak_reference(const at::Tensor& tensor) {
  TORCH_CHECK(is_npu(tensor), "_weak_ref_tensor expects an npu tensor, got one on ", tensor.device());
  auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(npu_device());
  return at::for_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes())
      .strides(tensor.strides())
      .options(options)
      .target_device(npu_device())
      .make_tensor();
}

inline void resize_storage(const c10::Storage& storage, size_t bytes) {
  auto fresh = allocator.allocate(bytes);
  if (storage.nbytes()) std::memcpy(fresh.get(), storage.data(), std::min(bytes, storage.nbytes()));
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

namespace ops {

inline at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &allocator, keys, c10::dtype_or_default(dtype), format);
}

inline at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>) {
  c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &allocator, keys, c10::dtype_or_default(dtype));
}

inline at::Tensor as_strided(
    const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

inline at::Tensor view(const at::Tensor& self, at::IntArrayRef size) {
  return at::native::view(self, size);
}

inline at::Tensor reshape_alias(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}

inline const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  const size_t bytes = (self.storage_offset() + c10::multiply_integers(size)) * self.element_size();
  if (bytes > self.storage().nbytes()) resize_storage(self.storage(), bytes);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

inline at::Tensor& set_storage(
    at::Tensor& self, c10::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(source), offset, size, stride);
}

inline at::Tensor& set_whole_storage(at::Tensor& self, c10::Storage source) {
  const int64_t elements = source.nbytes() / self.element_size();
  return at::native::set_storage_cpu_(self, std::move(source), 0, {elements}, {1});
}

inline void record_stream(at::Tensor&, c10::Stream) {}  // streams run in program order here

}  // namespace ops

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", ops::empty);
  m.impl("empty_strided", ops::empty_strided);
  m.impl("as_strided", ops::as_strided);
  m.impl("view", ops::view);
  m.impl("_reshape_alias", ops::reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("resize_", ops::resize_);
  m.impl("set_.source_Storage_storage_offset", ops::set_storage);
  m.impl("set_.source_Storage", ops::set_whole_storage);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("record_stream", ops::record_stream);
}

}  // namespace simnpu
