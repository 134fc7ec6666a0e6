// What the ranks of a tensor axis compare once a step: they run one program on one batch.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "core/device/readback.h"
#include "model/state/tensor_parts.h"

namespace ds::engine {

// Of this rank, since the last step.
struct AxisFacts {
  int64_t step = 0;
  int64_t delivered = 0;          // batches of the engine's loader, for messages
  uint64_t position = 0;          // digest of where the loader stands
  at::Tensor loss;                // float64 [], on the ranks' device; undefined: not known
  DataDigest data;                // of what split operators have read
  uint64_t changes = 0;           // digest of what the program did to parameters, this rank's parts with it
  uint64_t axis_changes = 0;      // likewise, of what is the same along the axis
  uint64_t gradient_changes = 0;  // digest of what the program did to reduced gradients
};

// The same on all ranks of the axis.
struct AxisVerdict {
  std::string problem;   // in words, where two of them differ, naming them; empty: they agree
  uint64_t changes = 0;  // of the digests of all of them, so that axes compare wholes; 0: nobody has changed parameters
};

// One exchange of a few numbers. The host need not wait for them: what other ranks are told of the verdict can be
// computed on the device, and the words be read later. Collective over the axis; other axes may come to another
// verdict, which goes on to all.
class AxisAgreement {
 public:
  AxisAgreement(const AxisFacts& facts, const TensorParts& parts, c10::Device device);

  // On the device: float64 [], 1 where ranks differ, else 0; and int64 [], AxisVerdict::changes.
  at::Tensor problem() const;
  at::Tensor changes() const;
  bool arrived() const { return numbers_.arrived(); }
  AxisVerdict verdict() const;  // waits

 private:
  std::vector<int> world_ranks_;
  at::Tensor all_;    // int64 [ranks, places]
  Readback numbers_;  // of it
};

}  // namespace ds::engine
