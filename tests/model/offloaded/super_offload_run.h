// The same training with and without super_offload, and comparing the two bit by bit.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/text.h"
#include "dsengine/engine.h"
#include "tests/model/offloaded/offload_run.h"
#include "tests/model/small_run.h"

namespace ds::engine {

struct Outcome {
  State weights;    // float32
  State module;     // in the model's dtype
  State optimizer;  // of this rank
  std::vector<double> losses;
  int64_t step_count = 0;
  int64_t skipped = 0;
  Engine::Speculation speculation;
};

inline State optimizer_states(optimizers::ShardOptimizer& optimizer) {
  State states;
  for (int64_t slice = 0; slice < optimizer.slice_count(); ++slice) {
    for (const auto& [name, state] : optimizer.states(slice)) states[cat(slice, ".", name)] = state.clone();
  }
  return states;
}

// Calls of one training; losses are kept by `backward`.
struct Script {
  Engine& engine;
  SmallNet& model;
  std::vector<double>& losses;
  int64_t micro = 0;

  void backward(double factor = 1.0) {
    const at::Tensor loss = model->loss(sample(micro++, engine.global_rank())) * factor;
    losses.push_back(loss.item<double>());
    engine.backward(loss);
  }
  // One optimizer step, whose gradient is multiplied by `factor`.
  void step(double factor = 1.0) {
    for (int64_t i = 0; i < engine.gradient_accumulation_steps(); ++i) {
      backward(factor);
      engine.step();
    }
  }
};

using Calls = std::function<void(Script&)>;

inline Outcome train_by(const nlohmann::ordered_json& config, comm::Communicator& communicator, const Calls& calls) {
  SmallNet model;
  const auto engine = start(model.ptr(), config, communicator).engine;
  Outcome outcome;
  Script script{*engine, model, outcome.losses};
  calls(script);
  EXPECT_EQ(engine->offloaded_state_bytes(), engine->plan().offloaded_bytes);
  EXPECT_EQ(engine->model_state_bytes().parameters, engine->plan().bytes->parameters);
  EXPECT_EQ(engine->model_state_bytes().master, engine->plan().bytes->master);
  EXPECT_EQ(engine->model_state_bytes().optimizer, engine->plan().bytes->optimizer);
  outcome.weights = copy_of(engine->fp32_state_dict());
  outcome.module = copy_of(engine->module_state_dict());
  outcome.optimizer = optimizer_states(*engine->optimizer());
  outcome.step_count = engine->optimizer()->step_count();
  outcome.skipped = engine->skipped_steps();
  outcome.speculation = engine->speculation();
  return outcome;
}

inline void expect_same_bits(const State& a, const State& b, const std::string& what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  for (const auto& [name, tensor] : a) {
    ASSERT_TRUE(b.count(name)) << what << name;
    EXPECT_TRUE(tensor.equal(b.at(name))) << what << ": " << name;
  }
}

inline nlohmann::ordered_json with_speculation(nlohmann::ordered_json config) {
  config["zero_optimization"]["offload_optimizer"]["super_offload"] = true;
  return config;
}

// `config`: with offload_optimizer. Returns what became of the speculative updates.
inline Engine::Speculation expect_same_training(const nlohmann::ordered_json& config, comm::Communicator& communicator,
                                                const Calls& calls, const std::string& what = "") {
  const Outcome plain = train_by(config, communicator, calls);
  const Outcome speculative = train_by(with_speculation(config), communicator, calls);
  EXPECT_EQ(speculative.losses, plain.losses) << what;
  expect_same_bits(speculative.weights, plain.weights, cat(what, " weights"));
  expect_same_bits(speculative.module, plain.module, cat(what, " module"));
  expect_same_bits(speculative.optimizer, plain.optimizer, cat(what, " optimizer"));
  EXPECT_EQ(speculative.step_count, plain.step_count) << what;
  EXPECT_EQ(speculative.skipped, plain.skipped) << what;
  EXPECT_EQ(plain.speculation.stood + plain.speculation.rolled_back, 0) << what;
  return speculative.speculation;
}

// Several buckets at every stage.
inline nlohmann::ordered_json offloading_config(int stage, int accumulation, const std::string& precision = "fp32",
                                                const nlohmann::ordered_json& optimizer = on_host()) {
  nlohmann::ordered_json config = with_offload(small_config(stage, accumulation), optimizer);
  config["zero_optimization"]["reduce_bucket_size"] = 40;
  if (precision != "fp32") config[precision]["enabled"] = true;
  if (precision == "fp16") config["fp16"].update({{"initial_scale_power", 8}, {"hysteresis", 1}});
  return config;
}

}  // namespace ds::engine
