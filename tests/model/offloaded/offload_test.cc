// offload_optimizer and offload_param: the same training as without them, from other memory.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/text.h"
#include "dsengine/engine.h"
#include "profiling/tensor_memory.h"
#include "tests/model/offloaded/offload_run.h"
#include "tests/model/small_run.h"
#include "tests/support/grid.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using ::testing::HasSubstr;

// What is offloaded, and how: keys of zero_optimization.
struct OffloadCase {
  const char* name;
  std::string keys;
  int first_stage = 1;
};

std::string disk() { return on_disk()["nvme_path"]; }

std::string in_file(const char* section, const char* more = "") {
  return cat("\"", section, R"(": {"device": "nvme", "nvme_path": ")", disk(), "\"", more, "}");
}

const std::vector<OffloadCase> kOffloads = {
    {"Optimizer", R"({"offload_optimizer": {"device": "cpu"}})"},
    {"HalfOfTheOptimizer", R"({"offload_optimizer": {"device": "cpu", "ratio": 0.5}})"},
    {"Parameters", R"({"offload_param": {"device": "cpu"}})", 3},
    {"Both", R"({"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}})", 3},
    {"ParametersAndHalfOfTheOptimizer",
     R"({"offload_optimizer": {"device": "cpu", "ratio": 0.5}, "offload_param": {"device": "cpu"}})", 3},
    {"OptimizerInAFile", cat("{", in_file("offload_optimizer"), "}")},
    {"OptimizerInAFilePipelined",
     cat("{", in_file("offload_optimizer", R"(, "pipeline_read": true, "pipeline_write": true)"), "}")},
    {"ParametersInAFile", cat("{", in_file("offload_param", R"(, "max_in_cpu": 0)"), "}"), 3},
    {"AllInFiles",
     cat("{", in_file("offload_optimizer"), ",", in_file("offload_param", R"(, "max_in_cpu": 40, "buffer_count": 2)"),
         "}"),
     3},
};

ordered_json offloading(ordered_json config, const std::string& keys) {
  config["zero_optimization"].update(ordered_json::parse(keys));
  return config;
}

struct OffloadCell {
  OffloadCase offload;
  int stage;
  int world;
  std::string precision;
};

// 153 cells. The sample of 51 has every offload at every stage on every number of ranks and in every precision.
std::vector<OffloadCell> offload_cells() {
  std::vector<std::pair<OffloadCase, int>> offloads;
  for (const OffloadCase& offload : kOffloads) {
    for (int stage = offload.first_stage; stage <= 3; ++stage) offloads.emplace_back(offload, stage);
  }
  std::vector<OffloadCell> cells;
  for (const auto& [offload, world, precision] :
       test::grid_sample(2, offloads, std::vector{1, 2, 3}, std::vector<std::string>{"fp32", "bf16", "fp16"})) {
    cells.push_back({offload.first, offload.second, world, precision});
  }
  return cells;
}

class Offload : public ::testing::TestWithParam<OffloadCell> {
 protected:
  const std::string& keys() const { return GetParam().offload.keys; }
  int world() const { return GetParam().world; }

  ordered_json plain_config() const {
    ordered_json config = small_config(GetParam().stage, /*accumulation=*/2);
    const std::string& precision = GetParam().precision;
    config["gradient_clipping"] = 0.5;
    config["zero_optimization"]["reduce_bucket_size"] = 40;
    if (precision != "fp32") config[precision]["enabled"] = true;
    if (precision == "fp16") config["fp16"]["initial_scale_power"] = 8;
    return config;
  }
};

INSTANTIATE_TEST_SUITE_P(Grid, Offload, ::testing::ValuesIn(offload_cells()), [](const auto& cell) {
  const OffloadCell& at = cell.param;
  return cat(at.offload.name, "Stage", at.stage, "Ranks", at.world, at.precision);
});

TEST_P(Offload, TrainsAsWithoutIt) {
  test::run_ranks(world(), [&](comm::Communicator& communicator) {
    const auto run = [&](const ordered_json& config) {
      SmallNet model;
      const auto engine = start(model.ptr(), config, communicator).engine;
      return train(*engine, model, 6);
    };
    const State plain = run(plain_config());
    EXPECT_EQ(largest_difference(run(offloading(plain_config(), keys())), plain), 0.0);
  });
}

TEST_P(Offload, PredictedBytesAreThoseThatAreHeld) {
  test::run_ranks(world(), [&](comm::Communicator& communicator) {
    SmallNet model;
    ordered_json config = offloading(plain_config(), keys());
    config["zero_optimization"]["reduce_bucket_size"] = 100;  // buckets end where modules do
    const auto engine = start(model.ptr(), config, communicator).engine;
    train(*engine, model, 2);
    EXPECT_EQ(engine->offloaded_state_bytes(), engine->plan().offloaded_bytes);
    const Engine::ModelStateBytes held = engine->model_state_bytes();
    const zero::ModelStateBytes& predicted = *engine->plan().bytes;
    EXPECT_EQ(held.parameters, predicted.parameters);
    EXPECT_EQ(held.gradients, predicted.gradients);
    EXPECT_EQ(held.master, predicted.master);
    EXPECT_EQ(held.optimizer, predicted.optimizer);
  });
}

TEST(OffloadEngine, AgreesWithTorch) {
  for (const int stage : {1, 2, 3}) {
    test::run_ranks(2, [&](comm::Communicator& communicator) {
      SmallNet model;
      const auto engine =
          start(model.ptr(), offloading(small_config(stage, 2), kOffloads[0].keys), communicator).engine;
      const State weights = train(*engine, model, 50);
      const State reference = TorchRun{.world = 2, .accumulation = 2, .steps = 50}.train_adamw();
      EXPECT_LT(largest_difference(weights, reference), 2e-5) << stage;
    });
  }
}

TEST(OffloadEngine, EveryOptimizerRunsOnTheHost) {
  for (const char* type : {"Adam", "Adagrad", "Lion", "SGD", "Lamb", "Muon", "RMSprop", "NAdam", "Adadelta"}) {
    test::run_ranks(2, [&](comm::Communicator& communicator) {
      ordered_json config = small_config(2, 1);
      config["optimizer"]["type"] = type;
      if (std::string(type) == "Adagrad") config["optimizer"]["params"]["initial_accumulator_value"] = 0.1;
      config["zero_allow_untested_optimizer"] = true;
      const auto run = [&](const ordered_json& with) {
        SmallNet model;
        const auto engine = start(model.ptr(), with, communicator).engine;
        const State weights = train(*engine, model, 4);
        EXPECT_EQ(engine->offloaded_state_bytes(), engine->plan().offloaded_bytes) << type;
        return weights;
      };
      const State plain = run(config);
      for (const size_t offload : {0, 5}) {
        EXPECT_EQ(largest_difference(run(offloading(config, kOffloads[offload].keys)), plain), 0.0)
            << type << kOffloads[offload].name;
      }
    });
  }
}

TEST(OffloadEngine, GradientsLeaveTheDeviceBucketByBucketAlsoOnOneRank) {
  test::run_ranks(1, [&](comm::Communicator& communicator) {
    const auto gradient_bytes = [&](const std::string& keys) {
      ordered_json config = small_config(2, 1);
      config["zero_optimization"]["reduce_bucket_size"] = 16;
      SmallNet model;
      const auto engine = start(model.ptr(), offloading(config, keys), communicator).engine;
      train(*engine, model, 2);
      return engine->model_state_bytes().gradients;
    };
    EXPECT_LT(gradient_bytes(kOffloads[0].keys), gradient_bytes("{}"));
  });
}

TEST(OffloadEngine, AnOverflowSkipsTheStep) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    ordered_json config = small_config(2, 1);
    config["fp16"] = {{"enabled", true}, {"initial_scale_power", 4}};
    SmallNet model;
    const auto engine = start(model.ptr(), offloading(config, kOffloads[0].keys), communicator).engine;
    const State before = copy_of(engine->fp32_state_dict());
    engine->backward(model->loss(sample(0, communicator.rank())) * std::numeric_limits<float>::infinity());
    engine->step();
    EXPECT_FALSE(engine->was_step_applied());
    EXPECT_EQ(largest_difference(copy_of(engine->fp32_state_dict()), before), 0.0);
    engine->backward(model->loss(sample(0, communicator.rank())));
    engine->step();
    EXPECT_TRUE(engine->was_step_applied());
    EXPECT_GT(largest_difference(copy_of(engine->fp32_state_dict()), before), 0.0);
  });
}

TEST(OffloadEngine, ChangedParametersReachTheHost) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    const auto run = [&](int stage, const std::string& keys) {
      SmallNet model;
      const auto engine = start(model.ptr(), offloading(small_config(stage, 1), keys), communicator).engine;
      train(*engine, model, 1);
      {
        const auto whole = engine->gathered_parameters({model->last->weight}, 0);
        const torch::NoGradGuard no_grad;
        if (communicator.rank() == 0) model->last->weight.mul_(0.5);
      }
      return train(*engine, model, 2);
    };
    EXPECT_EQ(largest_difference(run(2, kOffloads[0].keys), run(2, "{}")), 0.0);
    const State plain = run(3, "{}");
    for (const OffloadCase& offload : kOffloads) {
      EXPECT_EQ(largest_difference(run(3, offload.keys), plain), 0.0) << offload.name;
    }
  });
}

// Averaged weights are put in the place of the 16-bit ones, read, and taken away again.
TEST(OffloadEngine, MastersComeBackWithTheValuesThatWereSwappedOut) {
  for (const OffloadCase& offload : kOffloads) {
    SCOPED_TRACE(offload.name);
    test::run_ranks(2, [&](comm::Communicator& communicator) {
      ordered_json config = offloading(small_config(std::max(2, offload.first_stage), 1), offload.keys);
      config["bf16"] = {{"enabled", true}};
      SmallNet model;
      const auto engine = start(model.ptr(), config, communicator).engine;
      const State masters = train(*engine, model, 2);
      const torch::NoGradGuard no_grad;
      std::vector<at::Tensor> own;
      for (const at::Tensor& parameter : model->parameters()) own.push_back(parameter * 1.0);
      for (size_t i = 0; i < own.size(); ++i) model->parameters()[i].copy_(own[i] * 0.75);
      EXPECT_GT(largest_difference(copy_of(engine->fp32_state_dict()), masters), 0.01) << "what is read counts";
      for (size_t i = 0; i < own.size(); ++i) model->parameters()[i].copy_(own[i]);
      EXPECT_EQ(largest_difference(copy_of(engine->fp32_state_dict()), masters), 0.0);
    });
  }
}

TEST(OffloadEngine, TheDeviceHoldsNothingOfWhatIsOffloaded) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    const profiling::TensorMemory memory;
    SmallNet model;
    const auto engine = start(model.ptr(), offloading(small_config(3, 1), kOffloads[3].keys), communicator).engine;
    train(*engine, model, 2);
    const Engine::ModelStateBytes held = engine->model_state_bytes();
    EXPECT_EQ(held.parameters + held.master + held.optimizer, 0);
  });
}

// What a delayed update means: the gradient of step t is of the weights before update t - 1, and changes those after
// it.
State delayed_by_torch(int world, int steps, int64_t first_delayed) {
  SmallNet visible;
  SmallNet master;
  torch::optim::AdamW optimizer(master->parameters(), torch::optim::AdamWOptions(0.02).weight_decay(0.1));
  const auto copy_weights = [](SmallNet& from, SmallNet& to) {
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < from->parameters().size(); ++i) to->parameters()[i].copy_(from->parameters()[i]);
  };
  for (int64_t step = 0; step < steps; ++step) {
    visible->zero_grad();
    for (int rank = 0; rank < world; ++rank)
      (visible->loss(sample(step, rank)) / static_cast<double>(world)).backward();
    copy_weights(master, visible);  // the update of the last step is published
    for (size_t i = 0; i < master->parameters().size(); ++i) {
      master->parameters()[i].mutable_grad() = visible->parameters()[i].grad().clone();
    }
    optimizer.step();
    if (step + 1 < first_delayed) copy_weights(master, visible);
  }
  return parameters_of(*master);
}

TEST(OffloadEngine, ADelayedUpdateIsOneStepLate) {
  for (const int stage : {1, 2, 3}) {
    for (const char* more : {"", R"(, "offload_param": {"device": "cpu"})"}) {
      if (stage < 3 && *more != '\0') continue;
      for (const int64_t first : {1, 4}) {
        test::run_ranks(2, [&](comm::Communicator& communicator) {
          const std::string keys =
              cat(R"({"offload_optimizer": {"device": "cpu", "delayed_update": true, "delayed_update_start": )", first,
                  "}", more, "}");
          SmallNet model;
          const auto engine = start(model.ptr(), offloading(small_config(stage, 1), keys), communicator).engine;
          const State weights = train(*engine, model, 8);
          EXPECT_LT(largest_difference(weights, delayed_by_torch(2, 8, first)), 2e-6) << keys;
          EXPECT_EQ(engine->offloaded_state_bytes(), engine->plan().offloaded_bytes) << keys;
        });
      }
    }
  }
}

TEST(OffloadEngine, ADelayedUpdateFromAFileIsTheSame) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    const auto run = [&](const std::string& section) {
      ordered_json config = offloading(small_config(2, 2), cat("{", section, "}"));
      config["zero_optimization"]["offload_optimizer"]["delayed_update"] = true;
      config["zero_optimization"]["offload_optimizer"]["delayed_update_start"] = 2;
      config["bf16"]["enabled"] = true;
      SmallNet model;
      const auto engine = start(model.ptr(), config, communicator).engine;
      return train(*engine, model, 6);
    };
    const State host = run(R"("offload_optimizer": {"device": "cpu"})");
    EXPECT_EQ(largest_difference(run(in_file("offload_optimizer")), host), 0.0);
    EXPECT_EQ(largest_difference(run(in_file("offload_optimizer", R"(, "pipeline_read": true)")), host), 0.0);
  });
}

TEST(OffloadEngine, ADelayedUpdateIsRefusedForOptimizersThatTalk) {
  test::run_ranks(1, [&](comm::Communicator& communicator) {
    ordered_json config =
        offloading(small_config(2, 1), R"({"offload_optimizer": {"device": "cpu", "delayed_update": true}})");
    config["optimizer"]["type"] = "Lamb";
    config["zero_allow_untested_optimizer"] = true;
    SmallNet model;
    try {
      start(model.ptr(), config, communicator);
      FAIL() << "expected a ConfigError";
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(), HasSubstr("delayed_update: expected false with the optimizer Lamb"));
    }
  });
}

TEST(OffloadEngine, WhatHasNoEffectIsSaid) {
  test::run_ranks(1, [&](comm::Communicator& communicator) {
    for (const auto& [stage, key] : {std::pair(0, "offload_optimizer"), std::pair(2, "offload_param")}) {
      SmallNet model;
      ordered_json config = small_config(stage, 1);
      config["zero_optimization"][key] = {{"device", "cpu"}};
      const auto engine = start(model.ptr(), config, communicator).engine;
      EXPECT_THAT(to_table(engine->plan()), HasSubstr(key));
      EXPECT_EQ(engine->offloaded_state_bytes(), zero::OffloadedBytes());
    }
  });
}

}  // namespace
}  // namespace ds::engine
