// Which layers a stage has, and what they add up to. Pure arithmetic, torch-free.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "pipeline/schedule/schedule.h"
#include "tools/model_cost.h"

namespace ds::tool {

// Of one micro-batch.
struct StageLayout {
  int begin = 0;  // layers [begin, end)
  int end = 0;
  int rank = 0;  // of the pipeline
  int64_t parameters = 0;
  double forward_flops = 0;
  double kept_bytes = 0;        // activations, from forward to backward
  double recomputed_bytes = 0;  // of the largest region that is computed again
  double output_bytes = 0;
};

// `partition`: pipeline.partition; "profile" goes by forward_flops. Every `interval` layers, from a stage's first one,
// are computed again together in backward and keep their input alone; 0: none. Throws ConfigError for an unknown
// partition and for fewer layers than stages.
std::vector<StageLayout> cut_into_stages(const std::vector<LayerCost>& layers, const pipeline::Schedule& schedule,
                                         const std::string& partition, int64_t interval);

}  // namespace ds::tool
