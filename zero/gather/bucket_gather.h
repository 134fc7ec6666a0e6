// One gather: brings the elements of a bucket from where they are kept to the bucket's memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "core/device/transfer_stream.h"
#include "dsengine/comm.h"
#include "zero/parameter_bucket.h"

namespace ds::zero {

// The ranks that the elements of a bucket come from, and the form in which they are sent.
struct GatherRoutes {
  // Holds a slice of each bucket on every rank. Serves the gatherer alone, so that gathers and reductions need no
  // common order.
  comm::Communicator& slices;
  // hpZ (Wang et al., ZeRO++, arXiv:2306.10209): ranks of one node, consecutive ones of `slices` in their order. What
  // was gathered once after an update is gathered from their secondary slices until the next one. May be null.
  comm::Communicator* node = nullptr;
  // qwZ, same paper: 8 = slices are sent as 8-bit integers, and operators see values of that precision; 0 = as they
  // are.
  int bits = 0;
};

// The tensors that a gather under way holds. Default constructed: none is under way.
struct GatherUnderWay {
  comm::Work work;
  at::Tensor slice;              // this rank's slice, which has its elements meanwhile
  TransferStream::Mark arrived;  // the arrival of this rank's slice, where it comes from the host
  at::Tensor own;   // this rank's slice on the device or in the dtype that is sent, where others have slices
  at::Tensor sent;  // all slices, where they are sent in a dtype of their own
};

// Gathers buckets. Collective: all ranks start the same gathers in the same order. Not thread safe.
class BucketGather {
 public:
  // The groups of `routes` outlive it. `device`: the one that the buckets lie on.
  BucketGather(const GatherRoutes& routes, at::Device device) : routes_(routes), copies_(device) {}

  const GatherRoutes& routes() const { return routes_; }
  // Whether start() brings exactly the values of the slices, not values of 8 bits or of a narrower dtype.
  bool is_exact(const ParameterBucket& bucket, bool exact) const {
    return exact || (routes_.bits == 0 && !is_cast(bucket)) || !bucket.sharded();
  }
  // Begins to fill the bucket's memory. `exact` as asked for; an encoded bucket has no other values than its own.
  void start(const ParameterBucket& bucket, const std::string& label, bool exact, GatherUnderWay& gather);
  // Waits for a gather: returns when the current stream is ordered after it, and throws CommError when it failed.
  // Nothing is under way then.
  void wait(ParameterBucket& bucket, GatherUnderWay& gather);

 private:
  // Whether the bucket's slices are sent in another dtype than they have.
  static bool is_cast(const ParameterBucket& bucket) {
    const std::optional<int>& dtype = bucket.layout().sent_as;
    return dtype && static_cast<at::ScalarType>(*dtype) != bucket.options().dtype().toScalarType();
  }
  void start_cast(const ParameterBucket& bucket, const std::string& label, GatherUnderWay& gather);
  void start_from_host(const ParameterBucket& bucket, const std::string& label, GatherUnderWay& gather);
  // This rank's slice in the memory where collectives take it.
  static at::Tensor on_device(const ParameterBucket& bucket, const GatherUnderWay& gather);

  GatherRoutes routes_;
  TransferStream copies_;  // copies slices on the host
};

}  // namespace ds::zero
