#include "model/state/model_optimizer.h"

#include "dsengine/optimizer.h"

namespace ds::engine {

std::string ModelOptimizer::name() const { return own ? own->name() : client ? "client optimizer" : "none"; }

std::shared_ptr<optimizers::ShardOptimizer> ModelOptimizer::of_config() const { return client ? nullptr : own; }

std::vector<optimizers::GroupOptions> ModelOptimizer::group_options() const {
  if (!client) return own ? own->groups() : std::vector<optimizers::GroupOptions>();
  std::vector<optimizers::GroupOptions> result;
  for (const auto& group : client->param_groups()) result.push_back(optimizers::group_options_of(group.options()));
  return result;
}

void ModelOptimizer::set_group_options(const std::vector<optimizers::GroupOptions>& options) const {
  for (size_t i = 0; i < options.size(); ++i) {
    if (client) {
      optimizers::set_group_options(client->param_groups()[i].options(), options[i]);
      continue;
    }
    const bool non_freeze = own->groups()[i].non_freeze;  // the program's
    own->groups()[i] = options[i];
    own->groups()[i].non_freeze = non_freeze;
  }
}

std::vector<double> ModelOptimizer::learning_rates() const {
  if (!own && !client) return {};
  return client ? engine::learning_rates(*client) : engine::learning_rates(*own);
}

std::vector<std::vector<double>> ModelOptimizer::momenta() const {
  std::vector<std::vector<double>> result;
  if (!own || client) return result;
  const bool has_betas = own->traits().uses_betas;
  for (const optimizers::GroupOptions& group : own->groups()) {
    result.push_back(has_betas ? std::vector<double>{group.beta1, group.beta2}
                               : std::vector<double>{group.momentum, 0.0});
  }
  return result;
}

void ModelOptimizer::go_back_to(int64_t steps) const {
  if (own && own->step_count() > steps) own->set_step_count(steps);
}

optimizers::NamedStates ModelOptimizer::states(size_t bucket) const {
  return own ? own->states(static_cast<int64_t>(bucket)) : optimizers::NamedStates();
}

at::Tensor ModelOptimizer::weights(size_t bucket, const at::Tensor& master) const {
  return own ? own->weights(static_cast<int64_t>(bucket)) : master;
}

}  // namespace ds::engine
