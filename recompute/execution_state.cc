#include "recompute/execution_state.h"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

#include "core/random_streams.h"

namespace ds::recompute {

std::vector<at::Device> accelerators_in_use(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Device> devices;
  const auto add = [&](at::Device device) {
    if (std::find(devices.begin(), devices.end(), device) == devices.end()) devices.push_back(device);
  };
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined() && at::accelerator::isAccelerator(tensor.device().type())) add(tensor.device());
  }
  // Parameters may be there although no input is.
  const auto type = at::getAccelerator();
  if (!type || !at::globalContext().getAcceleratorHooksInterface(type).isAvailable()) return devices;
  const at::Device current = c10::impl::VirtualGuardImpl(*type).getDevice();
  if (at::globalContext().getAcceleratorHooksInterface(type).hasPrimaryContext(current.index())) add(current);
  return devices;
}

ExecutionState::OfGenerator ExecutionState::state_of(at::Generator generator) {
  at::Tensor state = generator_state(generator);
  return {std::move(generator), std::move(state)};
}

std::vector<ExecutionState::OfAutocast> ExecutionState::state_of_autocast() {
  std::vector<OfAutocast> states;
  for (const c10::DeviceType device : at::autocast::_AUTOCAST_SUPPORTED_DEVICES) {
    states.push_back({device, at::autocast::is_autocast_enabled(device), at::autocast::get_autocast_dtype(device)});
  }
  return states;
}

ExecutionState ExecutionState::capture(const std::vector<at::Device>& devices, bool generators) {
  ExecutionState state;
  state.autocast_ = state_of_autocast();
  if (!generators) return state;
  state.generators_.push_back(state_of(at::globalContext().defaultGenerator(at::kCPU)));
  for (const at::Device device : devices) {
    state.generators_.push_back(state_of(at::globalContext().defaultGenerator(device)));
  }
  return state;
}

ExecutionState ExecutionState::capture_of(const std::vector<at::Device>& drawn) {
  ExecutionState state;
  state.autocast_ = state_of_autocast();
  for (const at::Device device : drawn) {
    state.generators_.push_back(state_of(at::globalContext().defaultGenerator(device)));
  }
  return state;
}

void ExecutionState::set() const {
  for (const OfAutocast& autocast : autocast_) {
    at::autocast::set_autocast_enabled(autocast.device, autocast.enabled);
    at::autocast::set_autocast_dtype(autocast.device, autocast.dtype);
  }
  for (const OfGenerator& of : generators_) set_generator_state(of.generator, of.state);
}

ExecutionState::Scope::Scope(const ExecutionState& state) : before_(std::make_unique<ExecutionState>()) {
  before_->autocast_ = state_of_autocast();
  for (const OfGenerator& of : state.generators_) before_->generators_.push_back(state_of(of.generator));
  state.set();
}

ExecutionState::Scope::~Scope() { before_->set(); }

WithoutAutocastCache::WithoutAutocastCache() : before_(at::autocast::is_autocast_cache_enabled()) {
  at::autocast::set_autocast_cache_enabled(false);
}

WithoutAutocastCache::~WithoutAutocastCache() { at::autocast::set_autocast_cache_enabled(before_); }

}  // namespace ds::recompute
