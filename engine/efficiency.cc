#include "dsengine/efficiency.h"

#include <utility>

#include "config/sparsity_section.h"
#include "core/check.h"
#include "dsengine/comm.h"
#include "engine/engine_impl.h"

namespace ds::engine {
namespace {

Engine::Impl::Asked& asked_of(const std::shared_ptr<Engine>& engine, const char* call) {
  require(engine != nullptr, call, ": expected the engine that initialize() returned, found null");
  return EngineAccess::impl_of(*engine).asked;
}

std::shared_ptr<Engine> alive(const std::weak_ptr<Engine>& engine, const char* what) {
  std::shared_ptr<Engine> result = engine.lock();
  require(result != nullptr, what, ": its engine has ended; make it anew of the engine that trains the model now");
  return result;
}

efficiency::TrainingStateSource state_of(const std::shared_ptr<Engine>& engine, const char* what) {
  return [weak = std::weak_ptr<Engine>(engine), what]() -> efficiency::TrainingState {
    const std::shared_ptr<Engine> now = alive(weak, what);
    return {.optimizer_steps = now->global_steps(),
            .training = now->module()->is_training(),
            .accumulation = EngineAccess::impl_of(*now).accumulations};
  };
}

}  // namespace

Curriculum::Curriculum(std::weak_ptr<Engine> engine) : engine_(std::move(engine)) {
  const config::CurriculumLearningSection& section = alive(engine_, "curriculum")->config().curriculum_learning;
  schedule_ = section.schedule;
  enabled_ = section.enabled;
}

std::optional<int64_t> Curriculum::difficulty() const {
  if (!enabled_) return std::nullopt;
  const int64_t now = schedule_.at(alive(engine_, "curriculum")->global_steps() + 1);
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
  asked_of(engine, "curriculum").curriculum = true;
  return std::make_shared<Curriculum>(engine);
}

std::shared_ptr<efficiency::ProgressiveLayerDrop> progressive_layer_drop(const std::shared_ptr<Engine>& engine) {
  asked_of(engine, "progressive_layer_drop").layer_drop = true;
  const config::DsConfig& config = engine->config();
  const config::ProgressiveLayerDropSection& section = config.progressive_layer_drop;
  return std::make_shared<efficiency::ProgressiveLayerDrop>(section.enabled ? section.theta : 1.0, section.gamma,
                                                            static_cast<uint64_t>(config.seed),
                                                            state_of(engine, "progressive_layer_drop"));
}

std::shared_ptr<efficiency::RandomLtd> random_ltd(const std::shared_ptr<Engine>& engine) {
  asked_of(engine, "random_ltd").token_drop = true;
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
  asked_of(engine, "sparse_self_attention").sparse_attention = true;
  const config::DsConfig& config = engine->config();
  if (!config.sparse_attention) {
    return std::make_shared<ops::SparseSelfAttention>(ops::SparseSelfAttention::dense(heads));
  }
  return std::make_shared<ops::SparseSelfAttention>(config::pattern_of(*config.sparse_attention), heads,
                                                    static_cast<uint64_t>(config.seed));
}

}  // namespace ds::engine
