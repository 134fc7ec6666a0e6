// torch.optim.Adam(fused=True) and AdamW(fused=True), which LibTorch's classes do not have: an update of a parameter is
// one pass over its memory in place of about ten.
//
//   ds::FusedAdamW optimizer(model->parameters(), torch::optim::AdamWOptions(3e-4));
//
// Each class derives from torch's class and has its options, groups, states, torch::save and torch::load: either goes
// on with what the other has saved. Results differ from the base class in the last bits, as Python's fused ones do.
// They work wherever torch::optim does: on plain parameters, with DistributedDataParallel, on the slices of
// fully_shard, as InitializeOptions::optimizer at every stage. Parameters are floating point on CPU or CUDA, gradients
// have the dtype and device of their parameter. Sparse gradients throw c10::Error, as in torch.
#pragma once

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

namespace ds {

// torch.optim.Adam(fused=True).
class FusedAdam : public torch::optim::Adam {
 public:
  using torch::optim::Adam::Adam;
  // Updates all parameters. `closure` computes the loss, runs first, and its result is returned; without one the result
  // is undefined.
  at::Tensor step(LossClosure closure = nullptr) override;
};

// torch.optim.AdamW(fused=True).
class FusedAdamW : public torch::optim::AdamW {
 public:
  using torch::optim::AdamW::AdamW;
  // Updates all parameters, as FusedAdam::step().
  at::Tensor step(LossClosure closure = nullptr) override;
};

}  // namespace ds
