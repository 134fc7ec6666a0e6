// The sampler that a config asks for. Torch-free.
#pragma once

#include <cstdint>
#include <memory>

#include "data/batch_sampler.h"
#include "dsengine/config.h"

namespace ds::engine {

// A rank among those that have other samples: the ranks of its place in the pipeline and on the tensor axis.
struct SamplerPlace {
  int rank = 0;
  int world_size = 1;
  bool tells = false;  // whether it writes to the log
};

// Makes a CurriculumSampler where data_efficiency.data_sampling chooses samples, else a DistributedSampler. Throws as
// those do.
std::shared_ptr<BatchSampler> make_sampler(const config::DsConfig& config, const SamplerPlace& place,
                                           int64_t dataset_size);

}  // namespace ds::engine
