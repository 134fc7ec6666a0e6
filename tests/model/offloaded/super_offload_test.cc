// super_offload: updates on the host that begin before the gradient is judged leave no trace when they are undone.
#include <gtest/gtest.h>

#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/text.h"
#include "dsengine/engine.h"
#include "tests/model/offloaded/super_offload_run.h"
#include "tests/model/small_run.h"
#include "tests/support/grid.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct SuperOffloadCell {
  int stage;
  int world;
  int accumulation;
  std::string precision;
};

// 54 cells. The sample has every two settings together.
std::vector<SuperOffloadCell> super_offload_cells() {
  std::vector<SuperOffloadCell> cells;
  for (const auto& [stage, world, accumulation, precision] :
       test::grid_sample(2, std::vector{1, 2, 3}, std::vector{1, 2, 3}, std::vector{1, 3},
                         std::vector<std::string>{"fp32", "bf16", "fp16"})) {
    cells.push_back({stage, world, accumulation, precision});
  }
  return cells;
}

class SuperOffload : public ::testing::TestWithParam<SuperOffloadCell> {
 protected:
  int world() const { return GetParam().world; }
  ordered_json config() const {
    return offloading_config(GetParam().stage, GetParam().accumulation, GetParam().precision);
  }
};

INSTANTIATE_TEST_SUITE_P(Grid, SuperOffload, ::testing::ValuesIn(super_offload_cells()), [](const auto& cell) {
  const SuperOffloadCell& at = cell.param;
  return cat("Stage", at.stage, "Ranks", at.world, "Accumulation", at.accumulation, at.precision);
});

TEST_P(SuperOffload, UpdatesStandWhereNothingIsClipped) {
  test::run_ranks(world(), [&](comm::Communicator& communicator) {
    const auto calls = [](Script& script) {
      for (int step = 0; step < 5; ++step) script.step();
    };
    const Engine::Speculation speculation = expect_same_training(config(), communicator, calls);
    EXPECT_EQ(speculation.stood, 5);
    EXPECT_EQ(speculation.rolled_back, 0);
  });
}

// The norm is above the limit in every third step.
TEST_P(SuperOffload, ClippedStepsAreDoneAgain) {
  test::run_ranks(world(), [&](comm::Communicator& communicator) {
    ordered_json with = config();
    with["gradient_clipping"] = 1.0;
    const auto calls = [](Script& script) {
      for (int step = 0; step < 7; ++step) script.step(step % 3 == 1 ? 20.0 : 0.01);
    };
    const Engine::Speculation speculation = expect_same_training(with, communicator, calls);
    EXPECT_EQ(speculation.stood, 5);
    EXPECT_EQ(speculation.rolled_back, 2);
  });
}

TEST_P(SuperOffload, SkippedStepsLeaveNoTrace) {
  test::run_ranks(world(), [&](comm::Communicator& communicator) {
    ordered_json with = config();
    if (GetParam().precision == "bf16") with["bf16"]["check_grad_overflow"] = true;
    if (GetParam().precision == "fp32") with["non_finite_gradients"] = "skip";
    const auto calls = [](Script& script) {
      for (int step = 0; step < 6; ++step) {
        // One rank's overflow is everybody's.
        const bool overflow = step % 3 == 1 && script.engine.global_rank() == 0;
        script.step(overflow ? kInfinity : 1.0);
        EXPECT_EQ(script.engine.was_step_applied(), step % 3 != 1);
      }
    };
    const Engine::Speculation speculation = expect_same_training(with, communicator, calls);
    EXPECT_EQ(speculation.stood, 4);
    EXPECT_EQ(speculation.rolled_back, 2);
  });
}

// --- beside the other features ---------------------------------------------------------------------------------------

const Calls kMixed = [](Script& script) {
  for (int step = 0; step < 6; ++step) script.step(step % 3 == 1 ? 20.0 : 0.01);
};

TEST(SuperOffloadBeside, EveryOptimizerThatUpdatesElementByElement) {
  for (const char* type : {"Adam", "AdamW", "Adagrad", "Lion", "SGD"}) {
    test::run_ranks(2, [&](comm::Communicator& communicator) {
      ordered_json config = offloading_config(2, 2);
      config["optimizer"]["type"] = type;
      config["zero_allow_untested_optimizer"] = true;
      config["gradient_clipping"] = 1.0;
      for (const double momentum : {0.0, 0.9}) {
        if (std::string(type) == "SGD") config["optimizer"]["params"]["momentum"] = momentum;
        const Engine::Speculation speculation = expect_same_training(config, communicator, kMixed, type);
        EXPECT_EQ(speculation.stood, 4) << type;
        EXPECT_EQ(speculation.rolled_back, 2) << type;
      }
    });
  }
}

TEST(SuperOffloadBeside, OtherHomesAndKeys) {
  struct Variant {
    const char* name;
    ordered_json optimizer;
    ordered_json parameters;
    ordered_json keys = ordered_json::object();
    int world = 2;
  };
  const std::vector<Variant> variants = {
      {"HalfOnTheHost", on_host({{"ratio", 0.5}}), {}},
      {"NoneOnTheHost", on_host({{"ratio", 0.0}}), {}},
      {"HostParameters", on_host(), on_host()},
      {"HalfWithHostParameters", on_host({{"ratio", 0.5}}), on_host()},
      {"FileParameters", on_host(), on_disk({{"max_in_cpu", 0}, {"buffer_count", 2}})},
      {"SecondarySlices", on_host(), on_host(), {{"zero_hpz_partition_size", 2}}, 4},
      {"QuantizedWeights", on_host(), {}, {{"zero_quantized_weights", true}}},
      {"QuantizedGradients", on_host(), {}, {{"zero_quantized_gradients", true}}},
      {"Persistent", on_host(), on_host(), {{"stage3_param_persistence_threshold", 12}}},
      {"AfterBackward", on_host(), {}, {{"overlap_comm", false}}}};
  for (const Variant& variant : variants) {
    for (const char* precision : {"fp32", "bf16"}) {
      test::run_ranks(variant.world, [&](comm::Communicator& communicator) {
        ordered_json config =
            with_offload(offloading_config(3, 2, precision, variant.optimizer), variant.optimizer, variant.parameters);
        config["zero_optimization"].update(variant.keys);
        config["gradient_clipping"] = 1.0;
        const std::string what = cat(variant.name, precision);
        const Engine::Speculation speculation = expect_same_training(config, communicator, kMixed, what);
        const bool none = variant.optimizer.value("ratio", 1.0) == 0.0;
        EXPECT_EQ(speculation.stood, none ? 0 : 4) << what;
        EXPECT_EQ(speculation.rolled_back, none ? 0 : 2) << what;
      });
    }
  }
}

TEST(SuperOffloadBeside, ClippingByValueKeepsTheGradient) {
  for (const int stage : {1, 2, 3}) {
    for (const char* precision : {"fp32", "bf16", "fp16"}) {
      test::run_ranks(2, [&](comm::Communicator& communicator) {
        ordered_json config = offloading_config(stage, 2, precision);
        config.erase("gradient_clipping");
        config["gradient_clip_by_value"] = 0.05;
        // In fp16 a step is skipped in between: what it has clamped is gone.
        const bool skips = std::string(precision) == "fp16";
        const auto calls = [&](Script& script) {
          for (int step = 0; step < 5; ++step) {
            script.step(skips && step == 2 ? kInfinity : 1.0);
            EXPECT_EQ(script.engine.get_global_grad_norm().has_value(), true);
          }
        };
        const Engine::Speculation speculation = expect_same_training(config, communicator, calls, precision);
        EXPECT_EQ(speculation.rolled_back, skips ? 1 : 0);
        EXPECT_GT(speculation.stood, 3);
      });
    }
  }
}

TEST(SuperOffloadBeside, GradientsInFloat32OfAModelInBFloat16) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    ordered_json config = offloading_config(2, 2, "bf16");
    config["data_types"]["grad_accum_dtype"] = "fp32";
    config["gradient_clipping"] = 1.0;
    const auto calls = [](Script& script) {
      for (int step = 0; step < 4; ++step) script.step(step % 2 == 1 ? 20.0 : 0.01);
    };
    const Engine::Speculation speculation = expect_same_training(config, communicator, calls);
    EXPECT_EQ(speculation.stood, 2);
    EXPECT_EQ(speculation.rolled_back, 2);
  });
}

// Only step() tells that a backward was the last one.
TEST(SuperOffloadBeside, ABoundaryThatIsNotKnownInTime) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    ordered_json config = offloading_config(2, 1);
    config["managed_gradient_accumulation"] = false;
    const auto speculation = expect_same_training(config, communicator, [](Script& script) {
      for (int step = 0; step < 4; ++step) {
        script.backward();
        if (step == 2) script.engine.set_gradient_accumulation_boundary(true);
        script.backward();
        script.engine.step();
        script.engine.set_gradient_accumulation_boundary(std::nullopt);
      }
    });
    EXPECT_EQ(speculation.stood, 1);
    EXPECT_EQ(speculation.without, 3);
  });
}

TEST(SuperOffloadBeside, ASchedule) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    ordered_json config = offloading_config(2, 1);
    config["gradient_clipping"] = 1.0;
    config["scheduler"] = {{"type", "WarmupDecayLR"},
                           {"params", {{"warmup_num_steps", 4}, {"warmup_max_lr", 0.1}, {"total_num_steps", 8}}}};
    EXPECT_EQ(expect_same_training(config, communicator, kMixed).stood, 4);
  });
}

TEST(SuperOffloadBeside, TwoEnginesInOneProgram) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    const auto both = [&](const ordered_json& config) {
      SmallNet a, b;
      const auto first = start(a.ptr(), config, communicator).engine;
      const auto second = start(b.ptr(), config, communicator).engine;
      for (int64_t step = 0; step < 4; ++step) {
        first->backward(a->loss(sample(step, communicator.rank())));
        second->backward(b->loss(sample(step + 5, communicator.rank())));
        first->step();
        second->step();
      }
      return std::pair(copy_of(first->fp32_state_dict()), copy_of(second->fp32_state_dict()));
    };
    const auto plain = both(offloading_config(2, 1));
    const auto speculative = both(with_speculation(offloading_config(2, 1)));
    expect_same_bits(speculative.first, plain.first, "first");
    expect_same_bits(speculative.second, plain.second, "second");
  });
}

}  // namespace
}  // namespace ds::engine
