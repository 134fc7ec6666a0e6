// The functions of dsengine/model_compression.h, and the engine's part in compression: steps.
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <utility>

#include "config/compression_rules.h"
#include "core/check.h"
#include "dsengine/model_compression.h"
#include "engine/engine_impl.h"
#include "layers/compressed/compressed_model.h"
#include "layers/compressed/small_model.h"
#include "model/state/parameter_scope.h"
#include "model/state/parameter_values.h"
#include "zero/gather/gathered_scope.h"

namespace ds::engine {

namespace compression = model_compression;

std::vector<std::string> init_compression(torch::nn::Module& module, const config::ConfigSource& config,
                                          torch::nn::Module* teacher) {
  const config::CompressionTraining asked = config::read_compression_training(config);
  require(!compression::find_model(module), "init_compression: expected a module that is not prepared yet, found one ",
          "that is; call it once");
  const std::string prepared = compression::layer_of_another(module);
  require(prepared.empty(), "init_compression: expected a module none of whose layers is prepared, found ", prepared,
          ", which is as a layer of another module; call it once, with the module that initialize() gets");
  const config::LayerReductionSection& reduction = asked.section.layer_reduction;
  if (reduction.enabled) {
    require(teacher != nullptr,
            "init_compression: compression_training.layer_reduction: expected a teacher, found none; ",
            "pass the model whose layers the student begins with");
    compression::reduce_layers(module, *teacher,
                               {.prefix = reduction.module_name_prefix.value_or(""),
                                .teacher_layers = reduction.teacher_layer,
                                .kept_layers = reduction.keep_number_layer,
                                .other_modules = reduction.other_module_name});
  }
  auto model =
      std::make_shared<compression::CompressedModel>(module, config::compression_rules(asked.section), asked.seed);
  std::vector<std::string> names;
  for (const auto& layer : model->layers()) names.push_back(layer->name());
  compression::attach(module.shared_from_this(), std::move(model));
  return names;
}

void set_compression_step(torch::nn::Module& module, int64_t steps) {
  const auto model = compression::find_model(module);
  require(model != nullptr, "set_compression_step: expected the module that init_compression() has prepared, found ",
          "another one, or a part of it or one around it");
  require(steps != model->step() + 1 || !model->needs_gradients(),
          "set_compression_step: "
          "compression_training.sparse_pruning.shared_parameters.method: snip_momentum chooses by the gradients of "
          "steps, which only an engine's step() shows: train with engine::initialize(), or use l1 or topk");
  model->advance(steps,
                 {.with_whole = [](const at::Tensor&, const std::function<void()>& use) { use(); }, .largest = {}});
}

void Engine::Impl::show_gradients_to_compression() {
  const auto model = compression::find_model(*state.module);
  if (!model || !model->needs_gradients()) return;
  model->see_gradients([this](const at::Tensor& weight) {
    const ParameterValues values(state, weight, "snip_momentum");
    const at::Tensor gradient = reduced_gradient(values, "snip_momentum");
    compression::WeightAndGradient result = {.weight = {},
                                             .gradient = values.whole(gradient) / scaled_backward->gradient_scale()};
    values.use_master(/*changes=*/false, [&](const at::Tensor& master) { result.weight = values.whole(master); });
    return result;
  });
}

void Engine::Impl::follow_compression(bool restarted) {
  const auto model = compression::find_model(*state.module);
  if (!model) return;
  if (restarted) model->restart();
  if (!progress.step_applied) model->drop_gradients();
  const auto with_whole = [this](const at::Tensor& parameter, const std::function<void()>& use) {
    synchronize();
    zero::GatheredParameters::Scope scope = scope_of_parameters(state, {parameter}, std::nullopt);
    scope.closed = [] {};
    zero::GatheredParameters whole(std::move(scope));
    use();
    whole.close();
  };
  const auto largest = [this](at::Tensor& values) {
    state.ranks.part->all_reduce(values, comm::ReduceOp::kMax, "ranges of quantised inputs").wait();
  };
  model->advance(progress.global_steps, {.with_whole = with_whole, .largest = largest});
}

std::vector<std::pair<std::string, at::Tensor>> redundancy_clean(const std::shared_ptr<Engine>& engine) {
  require(engine != nullptr, "redundancy_clean: expected the engine that initialize() returned, found null");
  const auto model = compression::find_model(*engine->module());
  require(model != nullptr, "redundancy_clean: expected a model with compression_training, found one without");
  return compression::small_state(*model, engine->module_state_dict());
}

void redundancy_clean(torch::nn::Module& module) {
  const auto model = compression::find_model(module);
  require(model != nullptr, "redundancy_clean: expected the module that init_compression() has prepared, found ",
          "another one, or a part of it or one around it");
  compression::NamedTensors state;
  for (const auto& item : module.named_parameters()) state.emplace_back(item.key(), item.value().detach());
  for (const auto& item : module.named_buffers()) state.emplace_back(item.key(), item.value().detach());
  const compression::NamedTensors small = compression::small_state(*model, std::move(state));
  compression::drop_method_tensors(*model);
  compression::detach(module);
  compression::take_state(module, small);
}

void load_small_model(torch::nn::Module& module, const std::vector<std::pair<std::string, at::Tensor>>& state) {
  compression::take_state(module, state);
}

}  // namespace ds::engine
