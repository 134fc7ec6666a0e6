// torch.amp.GradScaler for loops that call backward() and an optimizer's step() themselves, with float16 autocast. The
// loss is multiplied by a scale, so that small gradients survive, and gradients are divided by it before the step. A
// step with a gradient that is infinite or NaN is skipped, and the scale adapts.
//
//   ds::engine::GradScaler scaler;
//   scaler.scale(loss).backward();
//   scaler.unscale_(optimizer);                                            // to clip; else step() does it
//   torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0);
//   scaler.step(optimizer);
//   scaler.update();
//
// Ranks agree on what is finite: over `process_group`, or the group that has the other slices where the optimizer's
// parameters are slices. Ranks of data-parallel training without either have the same reduced gradients, and agree by
// themselves. What is agreed is collective: all ranks of the group call unscale_() and step() alike.
//
// An engine scales losses by itself (fp16, torch_autocast with float16): it needs no GradScaler. Names, order of calls
// and words of errors are torch's. Not thread safe. Throws UsageError.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "dsengine/comm.h"

namespace torch::optim {
class Optimizer;
}

namespace ds::engine {

// Options of GradScaler, with torch's names.
struct GradScalerOptions {
  double init_scale = 65536.0;
  double growth_factor = 2.0;      // above 1; multiplies the scale after growth_interval finite steps in a row
  double backoff_factor = 0.5;     // below 1; multiplies the scale after a step that is not finite
  int64_t growth_interval = 2000;  // steps
  bool enabled = true;             // false: scale() returns its argument, step() is the optimizer's
  // The ranks that skip a step together; null: see the top of this file.
  std::shared_ptr<comm::Communicator> process_group;
};

// Scales losses and unscales gradients; see the top of this file.
class GradScaler {
 public:
  // Throws ConfigError for values out of range.
  explicit GradScaler(const GradScalerOptions& options = {});
  ~GradScaler();
  GradScaler(GradScaler&&) noexcept;
  GradScaler& operator=(GradScaler&&) noexcept;

  // Returns the outputs times the scale, each on its device; call backward() on the result.
  at::Tensor scale(const at::Tensor& outputs);
  std::vector<at::Tensor> scale(const std::vector<at::Tensor>& outputs);
  // Divides the gradients of the optimizer's parameters by the scale, and notes whether all are finite. Once between
  // two calls of update(), after all gradients are there. Throws for float16 gradients, which have lost it already.
  void unscale_(torch::optim::Optimizer& optimizer);  // NOLINT(readability-identifier-naming): torch's name
  // Calls unscale_() if the program has not, and the optimizer's step (without a closure) where all gradients are
  // finite. Returns whether it has stepped. Once for each optimizer between two calls of update().
  bool step(torch::optim::Optimizer& optimizer);
  // Chooses the scale of the next iteration, or sets `new_scale`. Call it once an iteration, after step() of all
  // optimizers.
  void update(std::optional<double> new_scale = std::nullopt);

  double get_scale() const;  // 1 if it is not enabled
  double get_growth_factor() const;
  double get_backoff_factor() const;
  int64_t get_growth_interval() const;
  void set_growth_factor(double factor);
  void set_backoff_factor(double factor);
  void set_growth_interval(int64_t interval);
  bool is_enabled() const;

  // Returns the state with torch's keys: scale, growth_factor, backoff_factor, growth_interval and _growth_tracker; an
  // empty object where it is not enabled. Call it after update(), as in torch. Fits into SaveOptions::client_state.
  nlohmann::json state_dict() const;
  // Sets the state. Throws UsageError for an empty one, and ConfigError for values out of range.
  void load_state_dict(const nlohmann::json& state);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ds::engine
