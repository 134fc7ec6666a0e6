#include "dsengine/grad_scaler.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <torch/optim/optimizer.h>

#include <cmath>
#include <map>
#include <string>
#include <utility>

#include "comm/slice_group.h"
#include "core/check.h"
#include "optim/loss_scaler.h"

namespace ds::engine {
namespace {

void require_values(const GradScalerOptions& options) {
  require<ConfigError>(std::isfinite(options.init_scale) && options.init_scale > 0.0,
                       "GradScaler: The scale (init_scale) must be finite and > 0.0, found ", options.init_scale);
  require<ConfigError>(options.growth_interval > 0, "GradScaler: The growth interval must be > 0, found ",
                       options.growth_interval);
  require<ConfigError>(options.growth_factor > 1.0, "GradScaler: The growth factor must be > 1.0, found ",
                       options.growth_factor);
  require<ConfigError>(options.backoff_factor < 1.0 && options.backoff_factor > 0.0,
                       "GradScaler: The backoff factor must be < 1.0, found ", options.backoff_factor,
                       " (and above 0)");
}

optimizers::LossScaler scaler_of(const GradScalerOptions& options) {
  optimizers::LossScalerOptions rule = optimizers::torch_rule(options.init_scale, options.growth_interval);
  rule.growth_factor = options.growth_factor;
  rule.backoff_factor = options.backoff_factor;
  return optimizers::LossScaler(rule);
}

// Gradients that one kernel takes together.
using ByKind = std::map<std::pair<std::string, at::ScalarType>, std::vector<at::Tensor>>;

ByKind gradients_of(const torch::optim::Optimizer& optimizer) {
  ByKind result;
  for (const torch::optim::OptimizerParamGroup& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      at::Tensor gradient = parameter.grad();
      if (!gradient.defined()) continue;
      require(gradient.scalar_type() != at::kHalf, "GradScaler: Attempting to unscale FP16 gradients. Keep the model ",
              "in float32 and run forward under float16 autocast");
      // Values of rows that are given twice add up before they are judged.
      if (gradient.is_sparse()) {
        gradient = gradient.coalesce();
        parameter.mutable_grad() = gradient;
        gradient = gradient._values();
      }
      result[{gradient.device().str(), gradient.scalar_type()}].push_back(gradient.detach());
    }
  }
  return result;
}

// The device on which ranks agree.
c10::Device device_of(const torch::optim::Optimizer& optimizer) {
  for (const torch::optim::OptimizerParamGroup& group : optimizer.param_groups()) {
    if (!group.params().empty()) return group.params().front().device();
  }
  return at::kCPU;
}

}  // namespace

struct GradScaler::Impl {
  enum class Stage { kReady, kUnscaled, kStepped };
  // The state of an optimizer since the last update().
  struct OfOptimizer {
    Stage stage = Stage::kReady;
    std::optional<bool> found_inf;  // empty: nobody has looked
  };

  explicit Impl(GradScalerOptions given)
      : options(std::move(given)), scaler(scaler_of(options.enabled ? options : GradScalerOptions())) {}

  // Another rule, with the scale and the good steps so far. Throws before any change.
  void renew(GradScalerOptions changed, double scale, int64_t good_steps) {
    changed.init_scale = scale;
    if (changed.enabled) {
      require_values(changed);
      scaler = scaler_of(changed);
      scaler.load({.scale = scale, .iteration = good_steps, .last_overflow_iteration = -1});
    }
    options = std::move(changed);
  }
  int64_t good_steps() const {
    if (!options.enabled) return 0;
    const optimizers::LossScalerState& state = scaler.state();
    return (state.iteration - state.last_overflow_iteration - 1) % options.growth_interval;
  }
  void require_scaled(const char* call) const {
    require(scaled, "GradScaler: Attempted ", call, " but _scale is None. This may indicate your script did not use ",
            "scaler.scale(loss or outputs) earlier in the iteration.");
  }
  std::shared_ptr<comm::Communicator> group_of(const torch::optim::Optimizer& optimizer) const {
    if (options.process_group) return options.process_group;
    for (const torch::optim::OptimizerParamGroup& group : optimizer.param_groups()) {
      for (const at::Tensor& parameter : group.params()) {
        if (auto found = comm::slice_group_of(parameter)) return found;
      }
    }
    return nullptr;
  }
  void unscale(torch::optim::Optimizer& optimizer, OfOptimizer& own);

  GradScalerOptions options;
  optimizers::LossScaler scaler;
  bool scaled = false;  // scale() has been called, once
  std::map<const torch::optim::Optimizer*, OfOptimizer> of_optimizer;
};

void GradScaler::Impl::unscale(torch::optim::Optimizer& optimizer, OfOptimizer& own) {
  const at::NoGradGuard no_grad;
  bool found = false;
  ByKind gradients = gradients_of(optimizer);
  // The reciprocal is computed in float64 and then cast to float32, as in torch.
  const double inverse = static_cast<float>(1.0 / scaler.scale());
  for (auto& [kind, tensors] : gradients) {
    const auto options_there = at::TensorOptions().dtype(at::kFloat).device(tensors.front().device());
    at::Tensor found_inf = at::zeros({1}, options_there);
    at::_amp_foreach_non_finite_check_and_unscale_(tensors, found_inf, at::full({1}, inverse, options_there));
    found = found_inf.item<float>() != 0 || found;
  }
  bool any = !gradients.empty();
  if (const auto group = group_of(optimizer); group && group->size() > 1) {
    const at::Tensor outcome = at::zeros({2}, at::TensorOptions().dtype(at::kFloat).device(device_of(optimizer)));
    outcome[0].fill_(found ? 1.0 : 0.0);
    outcome[1].fill_(any ? 1.0 : 0.0);
    group->all_reduce(outcome, comm::ReduceOp::kMax, "gradients that are not finite").wait();
    found = outcome[0].item<float>() != 0;
    any = outcome[1].item<float>() != 0;
  }
  if (any) own.found_inf = found;
}

GradScaler::GradScaler(const GradScalerOptions& options) {
  if (options.enabled) require_values(options);
  impl_ = std::make_unique<Impl>(options);
}

GradScaler::~GradScaler() = default;
GradScaler::GradScaler(GradScaler&&) noexcept = default;
GradScaler& GradScaler::operator=(GradScaler&&) noexcept = default;

at::Tensor GradScaler::scale(const at::Tensor& outputs) {
  if (!impl_->options.enabled) return outputs;
  require(outputs.defined(), "GradScaler: scale(): expected a loss or outputs, found an undefined tensor");
  impl_->scaled = true;
  return outputs * impl_->scaler.scale();
}

std::vector<at::Tensor> GradScaler::scale(const std::vector<at::Tensor>& outputs) {
  std::vector<at::Tensor> result;
  for (const at::Tensor& output : outputs) result.push_back(scale(output));
  return result;
}

void GradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  if (!impl_->options.enabled) return;
  impl_->require_scaled("unscale_");
  Impl::OfOptimizer& own = impl_->of_optimizer[&optimizer];
  require(own.stage != Impl::Stage::kUnscaled,
          "GradScaler: unscale_() has already been called on this optimizer since the last update().");
  require(own.stage != Impl::Stage::kStepped, "GradScaler: unscale_() is being called after step().");
  impl_->unscale(optimizer, own);
  own.stage = Impl::Stage::kUnscaled;
}

bool GradScaler::step(torch::optim::Optimizer& optimizer) {
  if (!impl_->options.enabled) {
    optimizer.step();
    return true;
  }
  impl_->require_scaled("step");
  Impl::OfOptimizer& own = impl_->of_optimizer[&optimizer];
  require(own.stage != Impl::Stage::kStepped, "GradScaler: step() has already been called since the last update().");
  if (own.stage == Impl::Stage::kReady) impl_->unscale(optimizer, own);
  require(own.found_inf.has_value(), "GradScaler: No inf checks were recorded for this optimizer. None of its ",
          "parameters has a gradient: was backward() called?");
  const bool steps = !*own.found_inf;
  if (steps) optimizer.step();
  own.stage = Impl::Stage::kStepped;
  return steps;
}

void GradScaler::update(std::optional<double> new_scale) {
  if (!impl_->options.enabled) return;
  impl_->require_scaled("update");
  if (new_scale) {
    require(*new_scale > 0, "GradScaler: update(): expected a scale above 0, found ", *new_scale);
    impl_->renew(impl_->options, *new_scale, impl_->good_steps());
  } else {
    bool looked = false;
    bool found = false;
    for (const auto& [optimizer, own] : impl_->of_optimizer) {
      looked = looked || own.found_inf;
      found = found || own.found_inf.value_or(false);
    }
    require(looked, "GradScaler: No inf checks were recorded prior to update. Call step() or unscale_() before it");
    impl_->scaler.update(found);
  }
  impl_->of_optimizer.clear();
}

double GradScaler::get_scale() const { return impl_->options.enabled ? impl_->scaler.scale() : 1.0; }
double GradScaler::get_growth_factor() const { return impl_->options.growth_factor; }
double GradScaler::get_backoff_factor() const { return impl_->options.backoff_factor; }
int64_t GradScaler::get_growth_interval() const { return impl_->options.growth_interval; }
bool GradScaler::is_enabled() const { return impl_->options.enabled; }

void GradScaler::set_growth_factor(double factor) {
  GradScalerOptions options = impl_->options;
  options.growth_factor = factor;
  impl_->renew(std::move(options), impl_->scaler.scale(), impl_->good_steps());
}

void GradScaler::set_backoff_factor(double factor) {
  GradScalerOptions options = impl_->options;
  options.backoff_factor = factor;
  impl_->renew(std::move(options), impl_->scaler.scale(), impl_->good_steps());
}

void GradScaler::set_growth_interval(int64_t interval) {
  require(interval > 0, "GradScaler: expected a growth interval above 0, found ", interval);
  GradScalerOptions options = impl_->options;
  options.growth_interval = interval;
  impl_->renew(std::move(options), impl_->scaler.scale(), impl_->good_steps() % interval);
}

nlohmann::json GradScaler::state_dict() const {
  if (!impl_->options.enabled) return nlohmann::json::object();
  return {{"scale", impl_->scaler.scale()},
          {"growth_factor", impl_->options.growth_factor},
          {"backoff_factor", impl_->options.backoff_factor},
          {"growth_interval", impl_->options.growth_interval},
          {"_growth_tracker", impl_->good_steps()}};
}

void GradScaler::load_state_dict(const nlohmann::json& state) {
  if (!impl_->options.enabled) return;
  require(state.is_object() && !state.empty(), "GradScaler: The source state dict is empty, possibly because it was ",
          "saved from a disabled instance of GradScaler.");
  for (const char* key : {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}) {
    require(state.contains(key) && state.at(key).is_number(), "GradScaler: load_state_dict: expected the number \"",
            key, "\", found none");
  }
  const auto interval = state.at("growth_interval").get<int64_t>();
  require<ConfigError>(interval > 0, "GradScaler: expected a growth interval above 0, found ", interval);
  GradScalerOptions options = impl_->options;
  options.growth_factor = state.at("growth_factor").get<double>();
  options.backoff_factor = state.at("backoff_factor").get<double>();
  options.growth_interval = interval;
  impl_->renew(std::move(options), state.at("scale").get<double>(),
               state.at("_growth_tracker").get<int64_t>() % interval);
}

}  // namespace ds::engine
