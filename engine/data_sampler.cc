// engine::data_sampler: which samples batches have, for programs that load data themselves.
#include <utility>

#include "core/check.h"
#include "data/curriculum_sampler.h"
#include "dsengine/efficiency.h"
#include "engine/engine_impl.h"
#include "engine/setup/make_sampler.h"

namespace ds::engine {

SamplerPlace Engine::Impl::sampler_place() const {
  return {.rank = state.ranks.part->rank(),
          .world_size = state.ranks.part->size(),
          .tells = state.ranks.world->rank() == 0};
}

DataSampler::DataSampler(std::shared_ptr<BatchSampler> sampler, bool of_loader)
    : sampler_(std::move(sampler)),
      curriculum_(dynamic_cast<CurriculumSampler*>(sampler_.get())),
      of_loader_(of_loader) {}

std::vector<int64_t> DataSampler::next_batch() {
  require(!of_loader_, "data sampler: next_batch: the engine's loader takes the batches of .training_data; expected ",
          "no call, or an engine without training data");
  return sampler_->next_batch();
}

int64_t DataSampler::batches_per_epoch() const { return sampler_->batches_per_epoch(); }

std::optional<int64_t> DataSampler::difficulty(const std::string& metric) const {
  if (curriculum_ == nullptr) return std::nullopt;
  return curriculum_->difficulty(metric);
}

void DataSampler::set_custom_schedule(const std::string& metric, std::function<int64_t(int64_t step)> schedule) {
  require(curriculum_ != nullptr, "set_custom_schedule: expected data_efficiency.data_sampling with ",
          "curriculum_learning, found it off");
  curriculum_->set_custom_schedule(metric, std::move(schedule));
}

std::shared_ptr<DataSampler> data_sampler(const std::shared_ptr<Engine>& engine, std::optional<int64_t> dataset_size) {
  require(engine != nullptr, "data_sampler: expected the engine that initialize() returned, found null");
  Engine::Impl& self = EngineAccess::impl_of(*engine);
  if (!self.sampler) {
    require(dataset_size.has_value(), "data_sampler: expected the number of samples, for the engine has no training ",
            "data: data_sampler(engine, size)");
    require(self.progress.global_steps == 0 && self.order.accumulation_begins(), "data_sampler: expected the first ",
            "call before the first micro-batch and before load_checkpoint(), which sets where it stands; found step ",
            self.progress.global_steps);
    self.sampler = make_sampler(self.config, self.sampler_place(), *dataset_size);
    self.accumulation_start.data = self.sampler->state();
  }
  require(!dataset_size || *dataset_size == self.sampler->dataset_size(), "data_sampler: expected the ",
          self.sampler->dataset_size(), " samples that the engine's sampler has, found ", dataset_size.value_or(0));
  self.asked.data_sampler = true;
  return std::make_shared<DataSampler>(self.sampler, self.loader != nullptr);
}

}  // namespace ds::engine
