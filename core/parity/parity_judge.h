// Judges whether two recorded runs trained the same, and if not, where they part first and what the likely cause is.
#pragma once

#include <string>

#include "core/parity/recorded_run.h"

namespace ds {

struct ParityVerdict {
  bool equal = false;
  std::string text;  // one line
};

// The relative differences in the first step that runs may have whose sums differ in order alone. Later steps may be
// further apart, since each one begins where the last has ended.
struct ParityBounds {
  double loss = 0;
  double norm = 0;
  double gradient = 0;  // of the L2 norm of a parameter's gradient
  double update = 0;    // of the L2 norm of the change of its weights; Adam makes large ones of small gradients
};
ParityBounds bounds_of(const std::string& dtype);

// Compares `run` with `reference`, which has taken the same global batches on one rank. What is compared in each step,
// in this order: the loss, each gradient, their norm, whether the step was applied, each weight. Throws IoError.
ParityVerdict judge_parity(const RecordedRun& run, const RecordedRun& reference);

}  // namespace ds
