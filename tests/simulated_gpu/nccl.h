// NCCL on simulated GPUs, as c10d::ProcessGroupNCCL shows it: operations run on streams of their own, after what the
// current stream was given, and wait() orders the current stream after them. gloo carries the bytes.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>

namespace ds::simulated_gpu {

struct NcclPlace {
  int rank = 0;
  int size = 1;
  bool eager = false;  // connected at once, by all ranks: eagerConnectSingleDevice()
};

// As there, a group that is not eager connects with its first operation, and two of its ranks with their first message:
// that blocks the host until all that take part have issued it. All messages between two ranks share a stream, those of
// an eager group the one of its collectives. A message leaves when its receiver has come to it. An operation that
// fails, or takes two seconds more than the timeout, ends the process. A group that ends without shutdown() drops what
// it has not done yet, and so does abort().
c10::intrusive_ptr<c10d::Backend> connect_nccl(const c10::intrusive_ptr<c10d::Store>& store, NcclPlace place,
                                               c10::Device device, std::chrono::milliseconds timeout);

}  // namespace ds::simulated_gpu
