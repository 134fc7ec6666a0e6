// Training with offload: its keys in a config, and a step that fails.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "core/check.h"
#include "model/offloaded/offloaded_state.h"
#include "optim/optimizer_factory.h"
#include "optim/shard_optimizer.h"
#include "tests/model/small_run.h"
#include "zero/partition.h"
#include "zero/slice_exchange.h"

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

// State of two buckets on the host, of 64 and 32 elements, with AdamW at masters of ones; without an engine.
struct TwoBuckets {
  TwoBuckets(const nlohmann::ordered_json& config, comm::Communicator& communicator)
      : TwoBuckets(config::parse(config, {.dp_world_size = 1}), communicator) {}

  at::Tensor ones(size_t bucket) const { return torch::ones({buckets[bucket].slice_numel}); }

  std::vector<zero::BucketLayout> buckets =
      zero::lay_out({{"a", 64, 0, 0, false}, {"b", 32, 0, 0, false}}, {.max_bucket_elements = 64});
  OffloadedState state;
  std::unique_ptr<optimizers::SliceOptimizer> optimizer = optimizers::make_optimizer({.type = "AdamW"});

 private:
  TwoBuckets(const config::DsConfig& config, comm::Communicator& communicator)
      : state(make_plan(config, {}), config,
              {.buckets = buckets, .frozen = {}, .states = std::vector<int64_t>(buckets.size(), 2)}, communicator) {
    for (size_t b = 0; b < buckets.size(); ++b) {
      optimizer->add_slice({.master = state.master_of(b, ones(b), false), .exchange = zero::make_whole_exchange()},
                           state.state_memory());
    }
  }
};

// An update that the optimizer refuses: it counts steps from a negative number.
inline void expect_failing_step(Engine& engine, SmallNet& model) {
  auto& optimizer = dynamic_cast<optimizers::SliceOptimizer&>(*engine.optimizer());
  const int64_t steps = optimizer.step_count();
  optimizer.set_step_count(-5);
  engine.backward(model->loss(sample(0, engine.global_rank())));
  EXPECT_THROW(engine.step(), UsageError);
  optimizer.set_step_count(steps);
  engine.zero_grad();
}

}  // namespace ds::engine
