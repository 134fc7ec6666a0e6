// What ranks that share layers send one another: sums over them, as rings of neighbours. Pure arithmetic, torch-free.
#pragma once

#include <cstdint>
#include <vector>

#include "pipeline/schedule/schedule_timing.h"
#include "tools/machine.h"
#include "tools/model_cost.h"

namespace ds::tool {

// Of a stage and a micro-batch: bytes that a rank sends, and how many sums they are.
struct StageSums {
  double forward_bytes = 0;
  double backward_bytes = 0;
  int forward_count = 0;
  int backward_count = 0;
};

// Of layers [begin, end); what is `recomputed` in backward adds up again there.
StageSums sums_of(std::vector<LayerCost>::const_iterator begin, std::vector<LayerCost>::const_iterator end,
                  int64_t tensor, bool recomputed);

// Bytes a second of the slowest of all rings of `tensor` neighbours, which send at once; `machine` has a multiple of
// them.
double tensor_rate(const Machine& machine, int64_t tensor);

// Seconds that forward and backward (its first half) wait. `beside`: seconds of the products of weights, beside which
// those of backward run; 0: none.
pipeline::StageTimes seconds_of(const StageSums& sums, const Machine& machine, int64_t tensor, double beside);

}  // namespace ds::tool
