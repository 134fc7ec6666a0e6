// NCCL on simulated GPUs, as c10d::ProcessGroupNCCL shows it: operations run on streams of their own, after what the
// current stream was given, and wait() orders the current stream after them. gloo carries the bytes.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>

namespace ds::simulated_gpu {

// As there, the first operation of a group, and the first between two of its ranks, blocks the host until all that take
// part have issued it; all messages between two ranks share a stream; an operation that fails, or takes two seconds
// more than the timeout, ends the process. A group that ends without shutdown() drops what it has not done yet, and so
// does abort().
c10::intrusive_ptr<c10d::Backend> connect_nccl(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                               c10::Device device, std::chrono::milliseconds timeout);

}  // namespace ds::simulated_gpu
