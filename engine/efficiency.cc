#include "dsengine/efficiency.h"

#include <utility>

#include "config/sparsity_section.h"
#include "core/check.h"
#include "data/curriculum_sampler.h"
#include "dsengine/comm.h"
#include "engine/engine_impl.h"
#include "engine/make_sampler.h"

namespace ds::engine {
namespace {

// The record of which parts of the config the program has asked for.
Engine::Impl::Asked& find_asked(const std::shared_ptr<Engine>& engine, const char* call) {
  require(engine != nullptr, call, ": expected the engine that initialize() returned, found null");
  return EngineAccess::impl_of(*engine).asked;
}

std::shared_ptr<Engine> require_alive(const std::weak_ptr<Engine>& engine, const char* what) {
  std::shared_ptr<Engine> result = engine.lock();
  require(result != nullptr, what, ": its engine has ended; make it anew of the engine that trains the model now");
  return result;
}

efficiency::TrainingStateSource state_of(const std::shared_ptr<Engine>& engine, const char* what) {
  return [weak = std::weak_ptr<Engine>(engine), what]() -> efficiency::TrainingState {
    const std::shared_ptr<Engine> now = require_alive(weak, what);
    return {.optimizer_steps = now->global_steps(),
            .training = now->module()->is_training(),
            .accumulation = EngineAccess::impl_of(*now).accumulations};
  };
}

}  // namespace

Curriculum::Curriculum(std::weak_ptr<Engine> engine) : engine_(std::move(engine)) {
  const config::CurriculumLearningSection& section = require_alive(engine_, "curriculum")->config().curriculum_learning;
  schedule_ = section.schedule;
  enabled_ = section.enabled;
}

std::optional<int64_t> Curriculum::difficulty() const {
  if (!enabled_) return std::nullopt;
  const int64_t now = schedule_.at(require_alive(engine_, "curriculum")->global_steps() + 1);
  require(now > 0, "curriculum: expected a difficulty > 0, found ", now, " of the custom schedule");
  return now;
}

at::Tensor Curriculum::truncate(const at::Tensor& tensor, int64_t dim) const {
  const std::optional<int64_t> now = difficulty();
  return now && *now < tensor.size(dim) ? tensor.narrow(dim, 0, *now) : tensor;
}

void Curriculum::set_custom_schedule(std::function<int64_t(int64_t step)> schedule) {
  require(enabled_ && schedule_.kind == efficiency::DifficultySchedule::Kind::kCustom,
          "set_custom_schedule: expected curriculum_learning with the schedule_type \"custom\", found ",
          enabled_ ? "another type" : "the section off");
  schedule_.custom = std::move(schedule);
}

std::shared_ptr<Curriculum> curriculum(const std::shared_ptr<Engine>& engine) {
  find_asked(engine, "curriculum").curriculum = true;
  return std::make_shared<Curriculum>(engine);
}

std::shared_ptr<efficiency::ProgressiveLayerDrop> progressive_layer_drop(const std::shared_ptr<Engine>& engine) {
  find_asked(engine, "progressive_layer_drop").layer_drop = true;
  const config::DsConfig& config = engine->config();
  const config::ProgressiveLayerDropSection& section = config.progressive_layer_drop;
  return std::make_shared<efficiency::ProgressiveLayerDrop>(section.enabled ? section.theta : 1.0, section.gamma,
                                                            static_cast<uint64_t>(config.seed),
                                                            state_of(engine, "progressive_layer_drop"));
}

std::shared_ptr<efficiency::RandomLtd> random_ltd(const std::shared_ptr<Engine>& engine) {
  find_asked(engine, "random_ltd").token_drop = true;
  const config::DsConfig& config = engine->config();
  const config::RandomLtdSection& section = config.data_efficiency.data_routing.random_ltd;
  efficiency::RandomLtdOptions options;
  if (config.data_efficiency.drops_tokens()) options.layers = section.random_ltd_layer_id;
  options.kept = section.kept;
  options.sequence_dim = section.hidden_state_order == "batch_seq_dim" ? 1 : 0;
  return std::make_shared<efficiency::RandomLtd>(std::move(options), static_cast<uint64_t>(config.data_efficiency.seed),
                                                 engine->communicator().rank(), state_of(engine, "random_ltd"));
}

std::shared_ptr<ops::SparseSelfAttention> sparse_self_attention(const std::shared_ptr<Engine>& engine, int64_t heads) {
  find_asked(engine, "sparse_self_attention").sparse_attention = true;
  const config::DsConfig& config = engine->config();
  if (!config.sparse_attention) {
    return std::make_shared<ops::SparseSelfAttention>(ops::SparseSelfAttention::dense(heads));
  }
  return std::make_shared<ops::SparseSelfAttention>(config::pattern_of(*config.sparse_attention), heads,
                                                    static_cast<uint64_t>(config.seed));
}

SamplerPlace Engine::Impl::sampler_place() const {
  return {.rank = state.ranks.data->rank(),
          .world_size = state.ranks.data->size(),
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
    require(self.progress.global_steps == 0 && self.order.micro_batches.at_start(), "data_sampler: expected the first ",
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
