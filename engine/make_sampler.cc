#include "engine/make_sampler.h"

#include "data/curriculum_sampler.h"
#include "data/distributed_sampler.h"

namespace ds::engine {

std::shared_ptr<BatchSampler> make_sampler(const config::DsConfig& config, const SamplerPlace& place,
                                           int64_t dataset_size) {
  const config::DataEfficiencySection& data = config.data_efficiency;
  if (data.chooses_samples()) {
    return std::make_shared<CurriculumSampler>(
        CurriculumOptions{.metrics = data.data_sampling.curriculum_learning.metrics,
                          .dataset_size = dataset_size,
                          .batch_size = config.train_micro_batch_size_per_gpu,
                          .accumulation = config.gradient_accumulation_steps,
                          .rank = place.rank,
                          .world_size = place.world_size,
                          .seed = static_cast<uint64_t>(data.seed),
                          .num_epochs = data.data_sampling.num_epochs,
                          .drop_last = config.dataloader_drop_last,
                          .tells = place.tells});
  }
  return std::make_shared<DistributedSampler>(SamplerOptions{.dataset_size = dataset_size,
                                                             .batch_size = config.train_micro_batch_size_per_gpu,
                                                             .rank = place.rank,
                                                             .world_size = place.world_size,
                                                             .seed = static_cast<uint64_t>(config.seed),
                                                             .drop_last = config.dataloader_drop_last});
}

}  // namespace ds::engine
