// The same training on a device and on the CPU.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tests/gpu/tested_device.h"
#include "tests/model/offloaded/offload_run.h"
#include "tests/model/small_run.h"

namespace ds::engine {

inline constexpr int kDeviceRunSteps = 10;

struct DeviceRun {
  std::vector<double> losses;  // of each micro-batch
  State weights;               // float32, on the host
};

// SmallNet, two micro-batches a step. Each step ends with `after_step(engine)`.
template <class AfterStep>
DeviceRun train_on(at::Device device, const nlohmann::ordered_json& config, comm::Communicator& ranks,
                   AfterStep&& after_step) {
  SmallNet model;
  const auto engine =
      initialize({.model = model.ptr(), .config = config, .communicator = borrowed(ranks), .device = device.str()})
          .engine;
  DeviceRun run;
  for (int64_t micro = 0; micro < kDeviceRunSteps * engine->gradient_accumulation_steps(); ++micro) {
    const at::Tensor loss = model->loss(sample(micro, ranks.rank()).to(engine->device()));
    EXPECT_EQ(loss.device(), device);
    engine->backward(loss);
    engine->step();
    run.losses.push_back(loss.item<double>());
    if (engine->micro_steps() % engine->gradient_accumulation_steps() == 0) after_step(*engine);
  }
  run.weights = copy_of(engine->fp32_state_dict());
  return run;
}

inline DeviceRun train_on(at::Device device, const nlohmann::ordered_json& config, comm::Communicator& ranks) {
  return train_on(device, config, ranks, [](Engine&) {});
}

// fp32, bf16 or fp16; several buckets, clipping in some steps.
inline nlohmann::ordered_json device_config(int stage, const std::string& precision) {
  nlohmann::ordered_json config = small_config(stage, /*accumulation=*/2);
  config["gradient_clipping"] = 0.5;
  config["zero_optimization"]["reduce_bucket_size"] = 40;
  if (precision != "fp32") config[precision]["enabled"] = true;
  if (precision == "fp16") config["fp16"]["initial_scale_power"] = 8;
  return config;
}

// Kernels round differently; in 16 bits by a thousand times more.
inline double tolerance_of(const std::string& precision) { return precision == "fp32" ? 1e-4 : 0.05; }

inline void expect_same_losses(const std::vector<double>& found, const std::vector<double>& expected,
                               double tolerance) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) {
    EXPECT_NEAR(found[i], expected[i], tolerance * (1 + expected[i])) << "micro-batch " << i;
  }
}

// Else runs could be equal because nothing happened.
inline void expect_changed_weights(const DeviceRun& run) {
  SmallNet start;
  EXPECT_GT(largest_difference(run.weights, parameters_of(*start)), 0.05);
}

}  // namespace ds::engine
