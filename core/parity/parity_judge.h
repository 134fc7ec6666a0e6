// Judges whether two recorded runs trained the same, and if not, where they part first and what the likely cause is.
#pragma once

#include <string>

#include "core/parity/parity_bounds.h"
#include "core/parity/recorded_run.h"

namespace ds {

struct ParityVerdict {
  bool equal = false;
  std::string text;  // one line
};

// Compares `run` with `reference`, which has taken the same global batches on one rank. What is compared in each step,
// in this order: the loss, each gradient, their norm, whether the step was applied, each weight. Throws IoError.
ParityVerdict judge_parity(const RecordedRun& run, const RecordedRun& reference, ChosenBounds bounds);

}  // namespace ds
