// What train_batch takes from the training data.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace ds::pipeline {

// What the first stage computes from, and what the loss compares with.
struct MicroBatch {
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> labels;
};

// Gives the next micro-batch of this rank's share of the data. It is asked on the ranks of the first and of the last
// stage, which have to get the same ones.
using BatchSource = std::function<MicroBatch()>;

}  // namespace ds::pipeline
