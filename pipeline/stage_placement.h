// The facts that the engine and a pipeline::PipelineModule tell each other: where its stages are to be built, and which
// layers are tied across ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "dsengine/comm.h"
#include "dsengine/pipeline.h"
#include "pipeline/schedule/stage_partition.h"

namespace ds::pipeline {

// Where a module is to be built.
struct StagePlacement {
  int rank = 0;
  std::vector<int> rank_of = {0};       // of each stage
  comm::Communicator* ranks = nullptr;  // of the pipeline; null: one
  // The ranks of all pipelines of the job, whose first rank measures for all ("profile"); null: there is one pipeline.
  comm::Communicator* world = nullptr;
  at::Device device = at::kCPU;  // on which they talk
  std::string partition = "parameters";
  int64_t activation_checkpoint_interval = 0;
  bool seed_layers = false;
};

// Tied layers that are on several ranks, or a tensor that layers with whole names share.
struct TiedLayers {
  std::string key;                 // that of the layers, or the first name of the tensor
  std::vector<std::string> names;  // the name of the layers, or all names of the tensor
  std::vector<int> ranks;          // ascending; the first one counts for the model's norm, and writes checkpoints
};

}  // namespace ds::pipeline
