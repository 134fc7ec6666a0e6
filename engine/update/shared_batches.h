// Whether the ranks that share a batch, each with a piece of its sequences, were given the same one. Each reads for
// itself; nothing else would tell that one of them trains on a piece of another document.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "dsengine/comm.h"

namespace ds::engine {

// The digest of what a rank cut since the last step, in a form that ranks add up with other numbers.
struct SharedDigest {
  at::Tensor value;     // float64 [] on the ranks' device, a whole number below 2^32; undefined: no batch is shared
  double factor = 0.0;  // the values of ranks that share one batch, times their factors, add up to nothing

  // Writes value x factor to a float64 [] on the ranks' device; leaves it where no batch is shared.
  void put(const at::Tensor& number) const;
  // Returns the value. Waits for the device.
  uint64_t number() const;
};

// Notes whole batches as they are cut. Used by the engine's thread.
class SharedBatches {
 public:
  // Notes a tensor that is about to be cut. Waits for no device.
  void note(const at::Tensor& whole);
  // Whether note() has been called.
  bool noted() const { return noted_; }
  // Returns the digest and begins anew. `ranks`: those that share a batch; null: none do.
  SharedDigest take(const comm::Communicator* ranks, at::Device device);

 private:
  at::Tensor digest_;  // int64 []; undefined: of nothing
  bool noted_ = false;
};

// The words of step() for ranks whose digests differ.
inline constexpr const char* kOtherBatches =
    "that share a batch (sequence_parallel_size) have cut different ones. Read by engine->communicator().rank(), which "
    "they have in common, not by engine->global_rank(), and draw random numbers alike";

}  // namespace ds::engine
