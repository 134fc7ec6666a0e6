// Training steps whose loss or gradient is NaN, what they say, and all state that they may not change.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <nlohmann/json.hpp>
#include <string>

#include "core/text.h"
#include "dsengine/engine.h"
#include "dsengine/errors.h"
#include "optim/shard_optimizer.h"
#include "tests/model/small_run.h"

namespace ds::engine {

inline constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

inline nlohmann::ordered_json with_precision(nlohmann::ordered_json config, const std::string& precision) {
  if (precision == "bf16") config["bf16"] = {{"enabled", true}};
  if (precision == "fp16") config["fp16"] = {{"enabled", true}, {"loss_scale", 128}};
  return config;
}

// Adds nothing to the loss and, where it is `bad`, NaN to the gradient of norm.bias alone: 0 times the slope of a
// square root at 0. At stage 3 all ranks use the parameter.
inline at::Tensor masked_root(SmallNet& model, bool bad) {
  return (torch::sqrt(model->norm->bias * 0 + (bad ? 0.0 : 1.0)) * 0).sum();
}

enum class Poison { kLoss, kGradient };

// One optimizer step; `bad`: the last rank's last micro-batch is poisoned.
inline void one_bad_step(Engine& engine, SmallNet& model, int64_t first, bool bad, Poison poison) {
  for (int64_t i = 0; i < engine.gradient_accumulation_steps(); ++i) {
    const bool here =
        bad && engine.global_rank() == engine.world_size() - 1 && i + 1 == engine.gradient_accumulation_steps();
    const at::Tensor loss = model->loss(sample(first + i, engine.global_rank()));
    engine.backward(poison == Poison::kLoss ? loss * (here ? kNan : 1.0) : loss + masked_root(model, here));
    engine.step();
  }
}

// What the call says, which must fail.
template <class Call>
std::string bad_step_error(const Call& call) {
  try {
    call();
  } catch (const NonFiniteError& error) {
    return error.what();
  }
  ADD_FAILURE() << "expected a NonFiniteError";
  return {};
}

// Of all that an update changes.
inline State whole_state(Engine& engine) {
  State state = copy_of(engine.fp32_state_dict());
  for (const auto& [name, tensor] : engine.module_state_dict()) state["module." + name] = tensor.clone();
  if (!engine.optimizer()) return state;
  for (int64_t slice = 0; slice < engine.optimizer()->slice_count(); ++slice) {
    for (const auto& [name, tensor] : engine.optimizer()->states(slice)) {
      if (tensor.storage().nbytes() > 0) state[cat(slice, ".", name)] = tensor.clone();  // else it is in a file
    }
  }
  return state;
}

inline void expect_equal_bits(const State& found, const State& wanted) {
  ASSERT_EQ(found.size(), wanted.size());
  for (const auto& [name, tensor] : wanted) EXPECT_TRUE(at::equal(found.at(name), tensor)) << name;
}

}  // namespace ds::engine
