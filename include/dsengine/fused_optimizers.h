// torch.optim.Adam(fused=True) and AdamW(fused=True), which LibTorch's classes do not have: an update of a parameter is
// one pass over its memory in place of about ten.
//
//   ds::FusedAdamW optimizer(model->parameters(), torch::optim::AdamWOptions(3e-4));
//
// Options, groups, states, torch::save and torch::load are those of the class of torch that each is: what that one has
// saved they go on with, and the other way round, with numbers that differ in the last bits as Python's do. They work
// on what torch::optim works on: plain parameters, DistributedDataParallel, the slices of fully_shard,
// InitializeOptions::optimizer at every stage. Floating-point parameters on CPU and CUDA, a gradient of its parameter's
// dtype and device each. Throw c10::Error for sparse gradients, as torch.
#pragma once

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

namespace ds {

class FusedAdam : public torch::optim::Adam {
 public:
  using torch::optim::Adam::Adam;
  // `closure`: computes the loss, which is returned; it runs first. Without one the result is undefined.
  at::Tensor step(LossClosure closure = nullptr) override;
};

class FusedAdamW : public torch::optim::AdamW {
 public:
  using torch::optim::AdamW::AdamW;
  at::Tensor step(LossClosure closure = nullptr) override;
};

}  // namespace ds
