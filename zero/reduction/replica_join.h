// Adds gradients that replicas of the model state have reduced each for itself (MiCS, Zhang et al., arXiv:2205.00119,
// section 3.3: once, at the boundary of an accumulation).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <deque>
#include <string>

#include "dsengine/comm.h"

namespace ds::zero {

// For one boundary: add() for bucket after bucket, in the same order on every rank, then finish(). Both throw
// CommError. Ended without finish(), what is on its way is not waited for: the gradients are unspecified then.
class ReplicaJoin {
 public:
  // `op`: kSum or kAvg over the replicas.
  explicit ReplicaJoin(comm::ReduceOp op) : op_(op) {}

  // `gradient` becomes the sum or average over `replicas`, when finish() has returned. What travels has this dtype and
  // lies on `device`, also where the gradient does not.
  void add(comm::Communicator& replicas, const at::Tensor& gradient, at::Device device, at::ScalarType dtype,
           std::string label);
  void finish();

 private:
  struct Part {
    at::Tensor gradient;
    at::Tensor wire;  // what the collective runs on
    comm::Work work;
  };
  void finish_oldest();

  comm::ReduceOp op_;
  std::deque<Part> parts_;  // under way
};

}  // namespace ds::zero
