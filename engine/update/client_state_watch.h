// Notices where the program changes the states of its own optimizer between steps: by torch::load(), or in place.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <string>
#include <vector>

#include "model/state/model_state.h"
#include "optim/shard_optimizer.h"

namespace ds::engine {

// Returns the tensors of a state of one of torch's classes by name, but for the lists of LBFGS; none of another class.
optimizers::NamedStates client_tensors(torch::optim::OptimizerParamState& state);

// Compares which tensors there are, and their versions, with those that note() has seen: no values, so that a step that
// finds no change does not wait for a device. It looks at optimizers of torch's classes whose states data-parallel
// ranks have alike: at stage 0, in memory of the device. Of other ones, and of classes of the program's, it finds
// nothing.
class ClientStateWatch {
 public:
  // `state` outlives it.
  explicit ClientStateWatch(const ModelState& state) : state_(state) {}

  // Takes the states for those that all ranks have alike, because a step, or a loaded checkpoint, has made them.
  void note();
  // Returns a digest of the values that have changed since; 0 where none has. Waits for their device otherwise.
  uint64_t digest_of_changes() const;
  // Returns all states for a message, as lines "what<TAB>value". Waits for their device.
  std::string lines() const;

 private:
  struct Seen {
    const void* tensor = nullptr;
    int64_t version = 0;
    bool operator==(const Seen&) const = default;
  };
  // Calls use(stepped, name, tensor) for each tensor of the state of each tensor that the optimizer steps on, a
  // parameter or a whole bucket, in an order that all ranks have.
  template <class Use>
  void visit(const Use& use) const;

  const ModelState& state_;
  std::vector<Seen> seen_;  // in the order of visit()
};

}  // namespace ds::engine
