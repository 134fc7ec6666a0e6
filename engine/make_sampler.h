// The sampler that a config asks for, and the loader of the engine that stands on it.
#pragma once

#include <cstdint>
#include <memory>

#include "data/distributed_sampler.h"
#include "dsengine/config.h"
#include "dsengine/data_loader.h"
#include "dsengine/initialize.h"

namespace ds::engine {

// A rank among those that have other samples: the ranks of its place in the pipeline and on the tensor axis.
struct SamplerPlace {
  int rank = 0;
  int world_size = 1;
  bool tells = false;  // whether it writes to the log
};

// Makes a CurriculumSampler where data_efficiency.data_sampling chooses samples, else a DistributedSampler, with the
// order of the program where it has one. Throws as those do, and UsageError for an order beside a curriculum.
std::shared_ptr<BatchSampler> make_sampler(const config::DsConfig& config, const SamplerPlace& place,
                                           int64_t dataset_size, const EpochOrder& order = {});

// Makes the loader of options.training_data. Its workers are those of options.loading, else those of
// data_efficiency.data_sampling.
std::shared_ptr<DataLoader> make_loader(const config::DsConfig& config, const SamplerPlace& place,
                                        const InitializeOptions& options, std::shared_ptr<BatchSampler> sampler,
                                        at::Device device);

}  // namespace ds::engine
