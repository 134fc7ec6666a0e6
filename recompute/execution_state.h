// The state that a region's result depends on beside its inputs: the states of random generators and of autocast.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <memory>
#include <vector>

namespace ds::recompute {

// The devices of `tensors` other than the CPU, and the current one of an accelerator that is in use; each once.
std::vector<at::Device> accelerators_in_use(const std::vector<at::Tensor>& tensors);

class ExecutionState {
 public:
  // Autocast of this thread; the default generators of the CPU and of `devices` when `generators`.
  static ExecutionState capture(const std::vector<at::Device>& devices, bool generators);

  // Likewise; the default generators of `drawn` alone.
  static ExecutionState capture_of(const std::vector<at::Device>& drawn);

  // In force while it lives, then what was before.
  class Scope {
   public:
    explicit Scope(const ExecutionState& state);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    std::unique_ptr<ExecutionState> before_;
  };

 private:
  struct OfGenerator {
    at::Generator generator;
    at::Tensor state;
  };
  struct OfAutocast {
    c10::DeviceType device;
    bool enabled;
    at::ScalarType dtype;
  };
  static OfGenerator state_of(at::Generator generator);
  static std::vector<OfAutocast> state_of_autocast();
  void set() const;

  std::vector<OfGenerator> generators_;
  std::vector<OfAutocast> autocast_;
};

// The weight cache of autocast is off while it lives: a weight cast in a run without graph must never be met by one
// with a graph.
class WithoutAutocastCache {
 public:
  WithoutAutocastCache();
  ~WithoutAutocastCache();
  WithoutAutocastCache(const WithoutAutocastCache&) = delete;
  WithoutAutocastCache& operator=(const WithoutAutocastCache&) = delete;

 private:
  const bool before_;
};

}  // namespace ds::recompute
