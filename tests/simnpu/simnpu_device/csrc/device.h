// What torch asks of a backend: the device guard (current stream, events, waiting) and the accelerator hooks.
#pragma once
#include "tensors.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>

namespace simnpu {

inline StreamId new_stream() {
  static std::atomic<StreamId> next{1};
  return next++;
}

inline c10::Stream as_stream(StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, npu_device(), id);
}

inline void synchronize() {
  wait_for_device("a synchronization");
}

// One device. Streams run in program order, so that waiting is only a matter of being allowed to.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kNpu; }
  c10::Device exchangeDevice(c10::Device) const override { return npu_device(); }
  c10::Device getDevice() const override { return npu_device(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return as_stream(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return as_stream(kDefaultStream); }
  c10::Stream getNewStream(c10::Device, int) const override { return as_stream(new_stream()); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return as_stream(std::exchange(current_stream, stream.id()));
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { synchronize(); }
  void synchronizeDevice(c10::DeviceIndex) const override { synchronize(); }

  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override { synchronize(); }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::Device getDeviceFromPtr(void*) const override { return npu_device(); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override { resize_storage(storage, bytes); }
};

}  // namespace simnpu
