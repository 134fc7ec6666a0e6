// Training with offload: its keys in a config, and a step that fails.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "core/check.h"
#include "tests/engine/small_run.h"

namespace ds::engine {

// A real disk: the folder of the test's binary, not /tmp, which may be memory.
inline nlohmann::ordered_json on_disk(nlohmann::ordered_json section = nlohmann::ordered_json::object()) {
  section["device"] = "nvme";
  section["nvme_path"] = std::filesystem::read_symlink("/proc/self/exe").parent_path().string();
  return section;
}

inline nlohmann::ordered_json on_host(nlohmann::ordered_json section = nlohmann::ordered_json::object()) {
  section["device"] = "cpu";
  return section;
}

inline nlohmann::ordered_json with_offload(nlohmann::ordered_json config, const nlohmann::ordered_json& optimizer,
                                           const nlohmann::ordered_json& parameters = {}) {
  if (!optimizer.is_null()) config["zero_optimization"]["offload_optimizer"] = optimizer;
  if (!parameters.is_null()) config["zero_optimization"]["offload_param"] = parameters;
  return config;
}

// An update that the optimizer refuses: it counts steps from a negative number.
inline void expect_failing_step(Engine& engine, SmallNet& model) {
  const int64_t steps = engine.optimizer()->step_count();
  engine.optimizer()->set_step_count(-5);
  engine.backward(model->loss(sample(0, engine.global_rank())));
  EXPECT_THROW(engine.step(), UsageError);
  engine.optimizer()->set_step_count(steps);
  engine.zero_grad();
}

}  // namespace ds::engine
