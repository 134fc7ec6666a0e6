// The exponential moving average (EMA) of the weights that an engine keeps beside training, for evaluation and export.
//
//   auto [engine, ...] = engine::initialize({.model = model.ptr(), .config = ..., .ema = {.decay = 0.999}});
//   ... engine->backward(loss); engine->step(); ...              // the engine updates the average in step()
//   {
//     const engine::EmaScope averaged(engine);                   // the model has the averaged weights
//     engine->eval();
//     ... model->forward(x) ...
//   }                                                            // it has its own again, bit for bit
//   engine->save_16bit_model("out", "ema.safetensors", /*exclude_frozen_parameters=*/false,
//                            engine::ema_state_dict(engine));
//
// After each applied update, average = decay * average + (1 - decay) * weight, in float32 (float64 in a float64 model)
// whatever the model's dtype is: torch.optim.swa_utils.get_ema_multi_avg_fn(decay) on the float32 masters. A skipped
// step changes nothing. Each rank keeps the average of the elements that it updates: all at stage 0, its slice at
// stages 1 to 3. Trained parameters are averaged; frozen ones and buffers are not. All calls belong to the engine's
// thread.
//
// Checkpoints keep the average, for any number of ranks and any stage. docs/from_libtorch.md#ema-of-the-weights.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "dsengine/checkpoint.h"

namespace ds::engine {

class Engine;

// The moving average that initialize() is asked for, equal on all ranks. It begins with the first weights.
struct EmaOptions {
  // The share of the average that stays at an update, above 0 and below 1; usual are 0.99 to 0.9999. 0: the engine
  // keeps no average, and the other fields keep their defaults (else ConfigError).
  double decay = 0;
  // Whether the decay of update n = 1, 2, ... (counted from 1 after update_after_step) is at most (1 + n) / (10 + n),
  // so that a short run forgets its first weights.
  bool warmup = false;
  // The number of first updates in which the average is the weights. 1 makes it that of torch's AveragedModel, whose
  // first update_parameters() copies.
  int64_t update_after_step = 0;

  bool operator==(const EmaOptions&) const = default;
};

// Shows the averaged weights, rounded to the model's dtype, in the model's parameters while it lives, at every stage.
// Buffers stay as they are. Forward passes, eval_batch(), module_state_dict(), save_16bit_model() and scopes of
// gathered_parameters() without a modifier rank, which end before it, work as usual, and save_weights() without
// masters. Calls that train, save or load, or read or set masters, are a UsageError. So is, at the next such call, a
// parameter that the program has changed meanwhile; at the scope's end the change is dropped and logged. A graph that
// was made before the scope, or inside, is refused by autograd after it. The engine keeps a copy of this rank's part of
// the weights in the model's dtype meanwhile.
class EmaScope {
 public:
  // Collective; between steps, or inside an accumulation. Throws UsageError inside another EmaScope or a scope of
  // gathered_parameters(), and for an engine without .ema.
  explicit EmaScope(std::shared_ptr<Engine> engine);
  // Gives the model its own weights again, the same bits. Collective. Errors are logged; if the weights could not be
  // given back, the engine's calls throw until a checkpoint is loaded.
  ~EmaScope();
  EmaScope(const EmaScope&) = delete;
  EmaScope& operator=(const EmaScope&) = delete;

 private:
  void restore() noexcept;

  std::shared_ptr<Engine> engine_;
  std::vector<at::Tensor> own_;  // by trainable bucket: the weights that this rank updates
};

// Returns the averaged weights by name, full and on the host, float32 (float64 in a float64 model), as
// Engine::fp32_state_dict() returns the masters: a tied weight once, and frozen parameters as they are. With a pipeline
// they are those of this rank's stage. Collective. Throws UsageError for an engine without .ema.
StateDict ema_state_dict(const std::shared_ptr<Engine>& engine);
// Returns the number of updates that the average has had, across checkpoints. On a GPU it may wait for the last step.
// Throws UsageError for an engine without .ema.
int64_t ema_updates(const std::shared_ptr<Engine>& engine);

}  // namespace ds::engine
