// The batch triple: train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x data-parallel
// size.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "core/json/json_problems.h"

namespace ds::engine::config {

// What the file (or an "auto") gives.
struct GivenBatchSizes {
  std::optional<int64_t> train, micro, accumulation;
  bool left_auto = false;  // one of them is "auto" and nobody said what it is
};

struct BatchSizes {
  int64_t train = 0, micro = 0, accumulation = 0;
};

// Fills in what is missing, by DeepSpeed's rules. Impossible numbers become errors that say where each number came from
// and which settings next to it fit.
BatchSizes resolve_batch_sizes(const GivenBatchSizes& given, int64_t dp_world_size, JsonProblems& problems);

}  // namespace ds::engine::config
