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
  bool changed = false;           // the program has changed parameters
  uint64_t gradient_changes = 0;  // digest of what the program did to reduced gradients
};

// In words, where two ranks of this axis differ, naming them; empty: they agree. The same on all ranks of the axis, of
// which others may agree: the verdict goes on to all. Collective over the axis.
std::string axis_problem(const AxisFacts& facts, const TensorParts& parts, c10::Device device);

}  // namespace ds::engine
