// What the ranks of a tensor axis compare once a step: they run one program on one batch.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "engine/state/tensor_parts.h"

namespace ds::engine {

// Of this rank, since the last step.
struct AxisFacts {
  int64_t step = 0;
  int64_t delivered = 0;          // batches of the engine's loader, for messages
  uint64_t position = 0;          // digest of where the loader stands
  std::optional<double> loss;     // nothing: not known
  uint64_t data = 0;              // digest of what split operators have read
  uint64_t changes = 0;           // digest of what the program did to parameters, this rank's parts with it
  uint64_t axis_changes = 0;      // likewise, of what is the same along the axis
  uint64_t gradient_changes = 0;  // digest of what the program did to reduced gradients
};

// The same on all ranks of the axis.
struct AxisVerdict {
  std::string problem;   // in words, where two of them differ, naming them; empty: they agree
  uint64_t changes = 0;  // of the digests of all of them, so that axes compare wholes; 0: nobody has changed parameters
};

// Other axes may come to another verdict: it goes on to all. Collective over the axis.
AxisVerdict axis_verdict(const AxisFacts& facts, const TensorParts& parts, c10::Device device);

}  // namespace ds::engine
