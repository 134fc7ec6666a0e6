// What LibTorch asks of its CUDA library: whether there are devices, generators, pinned memory.
#include "tests/simulated_gpu/hooks.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>

#include <array>

#include "tests/simulated_gpu/memory.h"
#include "tests/simulated_gpu/streams.h"

namespace ds::simulated_gpu {
namespace {

class NumbersOfDevice : public c10::GeneratorImpl {
 public:
  NumbersOfDevice(c10::DeviceIndex device, at::Generator on_cpu)
      : c10::GeneratorImpl({c10::kCUDA, device}, c10::DispatchKeySet(c10::DispatchKey::CUDA)),
        on_cpu_(std::move(on_cpu)) {}

  const at::Generator& on_cpu() const { return on_cpu_; }

  void set_current_seed(uint64_t seed) override { on_cpu_.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "simulated generators have no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "simulated generators have no offset"); }
  uint64_t current_seed() const override { return on_cpu_.current_seed(); }
  uint64_t seed() override { return on_cpu_.seed(); }
  void set_state(const c10::TensorImpl& state) override { on_cpu_.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return on_cpu_.unsafeGetGeneratorImpl()->get_state();
  }
  c10::DeviceType device_type() const { return c10::kCUDA; }

 private:
  GeneratorImpl* clone_impl() const override { return new NumbersOfDevice(device().index(), on_cpu_.clone()); }

  at::Generator on_cpu_;
};

at::Generator make(c10::DeviceIndex device) {
  return at::make_generator<NumbersOfDevice>(device, at::detail::createCPUGenerator(c10::default_rng_seed_val));
}

class SimulatedHooks : public at::CUDAHooksInterface {
 public:
  explicit SimulatedHooks(at::CUDAHooksArgs) {}

  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return visible_devices(); }
  c10::DeviceIndex deviceCount() const override { return visible_devices(); }
  c10::DeviceIndex current_device() const override { return simulated_gpu::current_device().index(); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_device({c10::kCUDA, device}); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override { return make(device < 0 ? 0 : device); }
  bool isPinnedPtr(const void* data) const override {
    return Timeline::instance().is_pinned(reinterpret_cast<uintptr_t>(data));
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  at::Allocator* getCUDADeviceAllocator() const override { return device_allocator(); }
  void deviceSynchronize(c10::DeviceIndex device) const override { Timeline::instance().wait_for_device(device); }
};

using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, SimulatedHooks)

const bool kAllocates = [] {
  c10::SetAllocator(c10::kCUDA, device_allocator(), 200);
  return true;
}();

}  // namespace

at::Generator numbers_of(const at::Generator& generator) {
  if (!generator.defined() || generator.device().is_cpu()) return generator;
  return static_cast<const NumbersOfDevice*>(generator.unsafeGetGeneratorImpl())->on_cpu();
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  static const std::array<at::Generator, kDevices> generators = [] {
    std::array<at::Generator, kDevices> made;
    for (c10::DeviceIndex i = 0; i < kDevices; ++i) made.at(static_cast<size_t>(i)) = make(i);
    return made;
  }();
  return generators.at(static_cast<size_t>(device < 0 ? current_device().index() : device));
}

}  // namespace ds::simulated_gpu
