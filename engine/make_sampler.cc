#include "engine/make_sampler.h"

#include <utility>

#include "core/check.h"
#include "data/curriculum_sampler.h"

namespace ds::engine {

std::shared_ptr<BatchSampler> make_sampler(const config::DsConfig& config, const SamplerPlace& place,
                                           int64_t dataset_size, const EpochOrder& order) {
  const config::DataEfficiencySection& data = config.data_efficiency;
  if (data.chooses_samples()) {
    require(!order, "initialize: .loading.order and data_efficiency.data_sampling both choose samples; leave one out");
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
                                                             .drop_last = config.dataloader_drop_last,
                                                             .order = order});
}

std::shared_ptr<DataLoader> make_loader(const config::DsConfig& config, const SamplerPlace& place,
                                        const InitializeOptions& options, std::shared_ptr<BatchSampler> sampler,
                                        at::Device device) {
  const config::DataEfficiencySection& data = config.data_efficiency;
  LoadingOptions loading = options.loading;
  if (data.chooses_samples() && loading.reading.num_workers == 0) {
    loading.reading.num_workers = static_cast<int>(data.data_sampling.num_workers);
  }
  return std::make_shared<DataLoader>(
      options.training_data, std::move(sampler),
      DataLoaderOptions{
          .rank = place.rank, .world_size = place.world_size, .device = device, .loading = std::move(loading)});
}

}  // namespace ds::engine
