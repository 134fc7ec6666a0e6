// Full tensors of all stages of a pipeline, brought to its first rank one at a time, for a file of the whole model.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

#include "model/state/model_state.h"

namespace ds::engine {

// A tensor that a stage gives, under its name in the whole model.
struct StageTensor {
  std::string name;
  at::ScalarType dtype;
  std::vector<int64_t> sizes;
  bool is_buffer = false;
};

// The tensors that the ranks of one pipeline give. The first rank receives what the others send, rank after rank.
class StageTensors {
 public:
  // `own`: what this rank has. Copies of tied weights of an earlier rank are left out, here and in send(). Collective
  // over the ranks of the pipeline. `state` outlives it.
  StageTensors(const ModelState& state, const std::vector<StageTensor>& own);

  // Returns what all ranks give, in their order, each name once.
  const std::vector<StageTensor>& all() const { return all_; }
  // Whether this rank receives.
  bool is_first() const { return state_.pipeline_rank() == 0; }

  // On the other ranks: sends a tensor of `own`, on any device. Every one of them is sent once, in any order.
  void send(const std::string& name, const at::Tensor& values);
  // On the other ranks: tells the first rank that no more tensors come, for this rank has failed. Without effect where
  // all are sent, since the first rank then listens no more.
  void give_up();
  // On the first rank: hands over what the others send, on this rank's device. Where `take` throws, or another rank
  // has given up, receives from all others to the end, and then throws what `take` has thrown, or IoError.
  void receive(const std::function<void(const StageTensor& tensor, const at::Tensor& values)>& take) const;

 private:
  const ModelState& state_;
  std::vector<StageTensor> all_;
  std::vector<size_t> first_of_;                   // by rank: the place in all_ where its tensors begin; then the end
  std::unordered_map<std::string, size_t> place_;  // of each name in all_
  size_t unsent_ = 0;                              // on the other ranks: the tensors that are not sent yet
};

// Returns the names of the modules of all stages that have no tensors. Collective over the ranks of the pipeline.
std::vector<std::string> modules_without_tensors(const ModelState& state);

}  // namespace ds::engine
