// super_offload: updates on the host that begin before the gradient is judged leave no trace when they are undone.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/text.h"
#include "dsengine/engine.h"
#include "engine/offloaded/offloaded_state.h"
#include "engine/offloaded/speculation_gate.h"
#include "offload/undo_copy.h"
#include "tests/engine/offloaded/offload_run.h"
#include "tests/engine/small_run.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// --- the same run with and without it --------------------------------------------------------------------------------

struct Outcome {
  State weights;    // float32
  State module;     // in the model's dtype
  State optimizer;  // of this rank
  std::vector<double> losses;
  int64_t step_count = 0;
  int64_t skipped = 0;
  Engine::Speculation speculation;
};

State optimizer_states(optimizers::ShardOptimizer& optimizer) {
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

Outcome train_by(const ordered_json& config, comm::Communicator& communicator, const Calls& calls) {
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

void expect_same_bits(const State& a, const State& b, const std::string& what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  for (const auto& [name, tensor] : a) {
    ASSERT_TRUE(b.count(name)) << what << name;
    EXPECT_TRUE(tensor.equal(b.at(name))) << what << ": " << name;
  }
}

ordered_json with_speculation(ordered_json config) {
  config["zero_optimization"]["offload_optimizer"]["super_offload"] = true;
  return config;
}

// `config`: with offload_optimizer. Returns what became of the speculative updates.
Engine::Speculation expect_same_training(const ordered_json& config, comm::Communicator& communicator,
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
ordered_json offloading_config(int stage, int accumulation, const std::string& precision = "fp32",
                               const ordered_json& optimizer = on_host()) {
  ordered_json config = with_offload(small_config(stage, accumulation), optimizer);
  config["zero_optimization"]["reduce_bucket_size"] = 40;
  if (precision != "fp32") config[precision]["enabled"] = true;
  if (precision == "fp16") config["fp16"].update({{"initial_scale_power", 8}, {"hysteresis", 1}});
  return config;
}

struct SuperOffloadCell {
  int stage;
  int world;
  int accumulation;
  std::string precision;
};

std::vector<SuperOffloadCell> super_offload_cells() {
  std::vector<SuperOffloadCell> cells;
  for (const int stage : {1, 2, 3}) {
    for (const int world : {1, 2, 3}) {
      for (const int accumulation : {1, 3}) {
        for (const char* precision : {"fp32", "bf16", "fp16"}) cells.push_back({stage, world, accumulation, precision});
      }
    }
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

// --- calls between backward and step ---------------------------------------------------------------------------------

class SuperOffloadCalls : public ::testing::TestWithParam<int> {
 protected:
  // Returns the sum of what happened, with one and two ranks, in and without an accumulation.
  Engine::Speculation expect_same(int accumulation, const Calls& calls) const {
    Engine::Speculation last;
    for (const int world : {1, 2}) {
      test::run_ranks(world, [&](comm::Communicator& communicator) {
        const auto found = expect_same_training(offloading_config(GetParam(), accumulation), communicator, calls);
        if (communicator.rank() == 0) last = found;
      });
    }
    return last;
  }
};

INSTANTIATE_TEST_SUITE_P(Stages, SuperOffloadCalls, ::testing::Values(1, 2, 3));

TEST_P(SuperOffloadCalls, DroppedGradients) {
  const auto speculation = expect_same(2, [](Script& script) {
    for (int step = 0; step < 4; ++step) {
      script.backward();
      script.engine.step();
      script.backward(7.0);
      if (step % 2 == 0) {  // the accumulation starts anew
        script.engine.zero_grad();
        script.backward(3.0);
        script.engine.step();
        script.backward(2.0);
      }
      script.engine.step();
    }
  });
  EXPECT_EQ(speculation.stood, 4);
}

TEST_P(SuperOffloadCalls, SeveralBackwardsAddUp) {
  const auto speculation = expect_same(1, [](Script& script) {
    for (int step = 0; step < 6; ++step) {
      script.backward();
      if (step % 2 == 0) {
        script.engine.backward(script.model->first(sample(step, script.engine.global_rank())).pow(2).mean());
      }
      if (step == 4) {
        const auto guard = script.engine.no_sync();
        script.backward(2.0);
      }
      script.engine.step();
    }
  });
  EXPECT_EQ(speculation.stood, 5);  // of the last backward, where that is reduced
  EXPECT_EQ(speculation.rolled_back, 1);
}

TEST_P(SuperOffloadCalls, WithoutSynchronization) {
  const auto speculation = expect_same(2, [](Script& script) {
    for (int step = 0; step < 4; ++step) {
      {
        const auto guard = script.engine.no_sync();
        script.backward();
        script.engine.backward(script.model->loss(sample(step, script.engine.global_rank())));
      }
      script.backward();
      script.engine.set_gradient_accumulation_boundary(true);
      script.engine.step();
      script.engine.set_gradient_accumulation_boundary(std::nullopt);
    }
  });
  EXPECT_EQ(speculation.stood, 0);  // the boundary was declared late
  EXPECT_EQ(speculation.without, 4);
}

TEST_P(SuperOffloadCalls, ADeclaredBoundary) {
  const auto speculation = expect_same(1, [](Script& script) {
    for (int step = 0; step < 3; ++step) {
      script.engine.set_gradient_accumulation_boundary(false);
      script.backward();
      script.engine.step();
      script.engine.set_gradient_accumulation_boundary(true);
      script.backward();
      if (step == 1) {  // taken back: the accumulation goes on
        script.engine.set_gradient_accumulation_boundary(false);
        script.engine.step();
        script.engine.set_gradient_accumulation_boundary(true);
        script.backward();
      }
      script.engine.step();
    }
  });
  EXPECT_EQ(speculation.stood, 3);
}

struct Bursting : torch::autograd::Function<Bursting> {
  static at::Tensor forward(torch::autograd::AutogradContext* /*context*/, const at::Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* /*context*/,
                                                 torch::autograd::variable_list /*gradients*/) {
    throw std::runtime_error("the gradient burst");
  }
};

// The last layer's buckets are updated when the first layer's gradient throws.
TEST_P(SuperOffloadCalls, ABackwardThatThrows) {
  const auto speculation = expect_same(1, [](Script& script) {
    for (int step = 0; step < 4; ++step) {
      if (step % 2 == 1) {
        const at::Tensor x = sample(step, script.engine.global_rank());
        const at::Tensor hidden = Bursting::apply(script.model->first(x));
        const at::Tensor out = script.model->last(torch::tanh(script.model->norm(hidden)));
        EXPECT_THROW(script.engine.backward(out.pow(2).mean()), std::exception);
        script.engine.zero_grad();
      }
      script.backward();
      script.engine.step();
    }
  });
  EXPECT_EQ(speculation.stood, 4);
}

TEST_P(SuperOffloadCalls, ReadsSeeTheStateBeforeTheStep) {
  const auto speculation = expect_same(1, [](Script& script) {
    for (int step = 0; step < 6; ++step) {
      const State before = copy_of(script.engine.fp32_state_dict());
      const State module = copy_of(script.engine.module_state_dict());
      const State states = optimizer_states(*script.engine.optimizer());
      const int64_t count = script.engine.optimizer()->step_count();
      script.backward();
      if (step == 1) script.engine.synchronize_parameters();
      if (step == 3) expect_same_bits(copy_of(script.engine.fp32_state_dict()), before, "masters");
      if (step == 5) expect_same_bits(copy_of(script.engine.module_state_dict()), module, "module");
      if (step % 2 == 1) {
        EXPECT_EQ(script.engine.optimizer()->step_count(), count);
        expect_same_bits(optimizer_states(*script.engine.optimizer()), states, "states");
      }
      script.engine.step();
      EXPECT_EQ(script.engine.optimizer()->step_count(), count + 1);
    }
  });
  EXPECT_EQ(speculation.stood, 3);
  EXPECT_EQ(speculation.rolled_back, 3);
}

TEST_P(SuperOffloadCalls, ChangesByTheProgram) {
  const auto speculation = expect_same(1, [](Script& script) {
    const auto halve = [&] {
      const torch::NoGradGuard no_grad;
      if (script.engine.global_rank() == 0) script.model->last->weight.mul_(0.5);
    };
    script.step();
    script.backward();
    {
      const auto whole = script.engine.gathered_parameters({script.model->last->weight}, 0);
      halve();
    }
    script.engine.step();
    {
      const auto whole = script.engine.gathered_parameters({script.model->last->weight}, 0);
      script.backward();
      halve();
    }
    script.engine.step();
    script.backward();
    script.engine.optimizer()->groups()[0].lr *= 0.5;  // of the step that follows
    script.engine.step();
    script.step();
  });
  EXPECT_EQ(speculation.stood, 2);
  EXPECT_EQ(speculation.rolled_back, 2);
  EXPECT_EQ(speculation.without, 1);
}

TEST_P(SuperOffloadCalls, UnusedParametersThatAreAnError) {
  for (const int world : {1, 2}) {
    test::run_ranks(world, [&](comm::Communicator& communicator) {
      ordered_json config = offloading_config(GetParam(), 1);
      config["zero_optimization"]["ignore_unused_parameters"] = false;
      expect_same_training(config, communicator, [](Script& script) {
        script.step();
        script.engine.backward(script.model->first(sample(1, script.engine.global_rank())).pow(2).mean());
        EXPECT_THROW(script.engine.step(), UsageError);
        script.step();
      });
    });
  }
}

TEST_P(SuperOffloadCalls, AStepThatThrows) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    expect_same_training(offloading_config(GetParam(), 1), communicator, [](Script& script) {
      script.step();
      for (int failure = 0; failure < 3; ++failure) expect_failing_step(script.engine, script.model);
      script.step();
      script.step();
    });
  });
}

TEST_P(SuperOffloadCalls, ParametersDoNotChangeBeforeTheStep) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), with_speculation(offloading_config(GetParam(), 1)), communicator).engine;
    train(*engine, model, 2);
    const auto forward = [&] {
      const torch::NoGradGuard no_grad;
      return model->forward(sample(9, communicator.rank())).clone();
    };
    const at::Tensor before = forward();
    engine->backward(model->loss(sample(3, communicator.rank())));
    EXPECT_TRUE(forward().equal(before));
    engine->step();
    EXPECT_FALSE(forward().equal(before));
    EXPECT_EQ(engine->speculation().stood, 3);
  });
}

TEST_P(SuperOffloadCalls, AnEngineThatEndsBeforeTheStep) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    auto engine = start(model.ptr(), with_speculation(offloading_config(GetParam(), 1)), communicator).engine;
    train(*engine, model, 2);
    const auto optimizer = engine->optimizer();  // lives longer
    const State states = optimizer_states(*optimizer);
    std::vector<at::Tensor> masters;
    for (int64_t slice = 0; slice < optimizer->slice_count(); ++slice)
      masters.push_back(optimizer->slice(slice).master.clone());
    engine->backward(model->loss(sample(3, communicator.rank())));
    engine.reset();
    EXPECT_EQ(optimizer->step_count(), 2);
    expect_same_bits(optimizer_states(*optimizer), states, "states");
    for (int64_t slice = 0; slice < optimizer->slice_count(); ++slice) {
      EXPECT_TRUE(optimizer->slice(slice).master.equal(masters[static_cast<size_t>(slice)])) << slice;
    }
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

// --- where it does not pay -------------------------------------------------------------------------------------------

TEST(SuperOffloadGate, PausesAfterFailuresInARowAndLongerEachTime) {
  SpeculationGate gate;
  EXPECT_EQ(gate.step(SpeculationOutcome::kRolledBack), 0);
  EXPECT_EQ(gate.step(SpeculationOutcome::kRolledBack), 0);
  EXPECT_EQ(gate.step(SpeculationOutcome::kStood), 0);  // begins anew
  for (int64_t failure = 1; failure < SpeculationGate::kFailures; ++failure) {
    EXPECT_EQ(gate.step(SpeculationOutcome::kRolledBack), 0);
  }
  int64_t pause = gate.step(SpeculationOutcome::kRolledBack);
  EXPECT_EQ(pause, SpeculationGate::kPause);
  int64_t longest = 0;
  for (int round = 0; round < 8; ++round) {
    for (int64_t step = 0; step < pause; ++step) {
      EXPECT_FALSE(gate.open());
      gate.step(SpeculationOutcome::kNone);
    }
    EXPECT_TRUE(gate.open());
    const int64_t next = gate.step(SpeculationOutcome::kRolledBack);
    EXPECT_EQ(next, std::min(2 * pause, SpeculationGate::kLongestPause));
    pause = next;
    longest = std::max(longest, next);
  }
  EXPECT_EQ(longest, SpeculationGate::kLongestPause);
  for (; !gate.open();) gate.step(SpeculationOutcome::kNone);
  EXPECT_EQ(gate.step(SpeculationOutcome::kStood), 0);
  EXPECT_TRUE(gate.open());
  EXPECT_EQ(gate.stood(), 2);
}

TEST(SuperOffloadGate, AnEngineThatClipsEveryStepStopsForAWhile) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    ordered_json config = offloading_config(2, 1);
    config["gradient_clipping"] = 1e-3;
    const int64_t steps = SpeculationGate::kFailures + SpeculationGate::kPause + 2;
    const auto speculation = expect_same_training(config, communicator, [&](Script& script) {
      for (int64_t step = 0; step < steps; ++step) script.step();
    });
    EXPECT_EQ(speculation.stood, 0);
    EXPECT_EQ(speculation.rolled_back, SpeculationGate::kFailures + 1);
    EXPECT_EQ(speculation.without, SpeculationGate::kPause + 1);
  });
}

// --- an update that fails --------------------------------------------------------------------------------------------

TEST(SuperOffloadParts, AnUpdateThatThrowsIsUndone) {
  test::run_ranks(1, [&](comm::Communicator& communicator) {
    TwoBuckets two(with_speculation(with_offload(small_config(2, 1), on_host())), communicator);
    const std::vector<zero::BucketLayout>& buckets = two.buckets;
    OffloadedState& state = two.state;
    const auto& optimizer = two.optimizer;
    SpeculativeUpdate& speculation = *state.speculation();
    const auto arrive = [&](size_t last) {
      for (size_t b = buckets.size(); b-- > last;) state.gradients()->add(b, two.ones(b));
    };
    const auto expect_start = [&] {
      for (size_t b = 0; b < buckets.size(); ++b) {
        const auto index = static_cast<int64_t>(b);
        EXPECT_TRUE(optimizer->slice(index).master.equal(two.ones(b))) << b;
        EXPECT_EQ(optimizer->states(index)[0].second.count_nonzero().item<int64_t>(), 0) << b;
      }
    };
    size_t published = 0;
    const auto publish = [&](size_t bucket, const at::Tensor& weights) {
      EXPECT_TRUE(weights.equal(optimizer->slice(static_cast<int64_t>(bucket)).master));
      EXPECT_LT(weights.max().item<double>(), 1.0);
      ++published;
    };
    // One of the updates throws.
    speculation.begin(*optimizer, 1.0, [&](const at::Tensor& gradient) {
      if (gradient.numel() == buckets[0].slice_numel) throw IoError("out of luck");
    });
    arrive(0);
    speculation.end_arrivals();
    EXPECT_TRUE(speculation.fits(1.0));
    EXPECT_FALSE(speculation.fits(0.5));
    EXPECT_FALSE(speculation.accept(publish));
    EXPECT_EQ(optimizer->step_count(), 1);  // the step goes on
    expect_start();
    optimizer->set_step_count(0);
    state.gradients()->clear();
    // A bucket is missing.
    speculation.begin(*optimizer, 1.0, {});
    arrive(1);
    EXPECT_FALSE(speculation.accept(publish));
    expect_start();
    optimizer->set_step_count(0);
    state.gradients()->clear();
    // All is well, and dropped.
    speculation.begin(*optimizer, 1.0, {});
    arrive(0);
    state.gradients()->clear();
    EXPECT_EQ(optimizer->step_count(), 0);
    EXPECT_FALSE(speculation.begun());
    expect_start();
    // All is well.
    speculation.begin(*optimizer, 1.0, {});
    arrive(0);
    EXPECT_EQ(published, 0);
    EXPECT_TRUE(speculation.accept(publish));
    EXPECT_EQ(published, buckets.size());
    EXPECT_EQ(optimizer->step_count(), 1);
  });
}

TEST(SuperOffloadParts, AnUndoCopyHasEveryBit) {
  const at::Tensor values = torch::tensor({1.5F, -0.0F, std::numeric_limits<float>::quiet_NaN(), 1e-42F});
  const at::Tensor changed = values.clone();
  offload::UndoCopy copy({torch::empty({4})});
  EXPECT_FALSE(copy.holds());
  copy.restore();
  copy.keep({changed});
  changed.fill_(7);
  copy.restore();
  EXPECT_FALSE(copy.holds());
  EXPECT_TRUE(changed.view(torch::kInt).equal(values.view(torch::kInt)));
  copy.keep({changed});
  changed.fill_(7);
  copy.forget();
  copy.restore();
  EXPECT_EQ(changed[0].item<float>(), 7);
  EXPECT_THROW(copy.keep({torch::empty({5})}), InternalError);
}

// --- the plan --------------------------------------------------------------------------------------------------------

Plan speculative_plan(ordered_json config, int64_t ranks = 2) {
  return make_plan(config::parse(with_speculation(std::move(config)), {.dp_world_size = ranks}),
                   {.world_size = ranks, .dp = ranks}, {.parameters = 8192});
}

TEST(SuperOffloadPlan, SaysWhatHappensAndWhatItCosts) {
  const ordered_json config = with_offload(small_config(2, 1), on_host());
  const Plan plan = speculative_plan(config);
  EXPECT_THAT(to_table(plan), HasSubstr("offload_optimizer.super_offload: true"));
  EXPECT_TRUE(plan.offload.speculative);
  EXPECT_EQ(plan.offloaded_bytes.staging, 4096 * 4 * 4);  // master, two states, new weights of one bucket on two ranks
  ordered_json by_value = config;
  by_value.erase("gradient_clipping");
  by_value["gradient_clip_by_value"] = 1.0;
  EXPECT_EQ(speculative_plan(by_value).offloaded_bytes.staging, 4096 * 4 * 5);  // and a gradient
}

TEST(SuperOffloadPlan, RefusesWhatCannotWork) {
  const auto expect_refusal = [](const ordered_json& config, const char* expected) {
    EXPECT_THAT([&] { speculative_plan(config, 4); },
                ThrowsMessage<ConfigError>(::testing::AllOf(
                    HasSubstr("zero_optimization.offload_optimizer.super_offload: true needs"), HasSubstr(expected))));
  };
  expect_refusal(with_offload(small_config(0, 1), on_host()), "zero_optimization.stage 1, 2 or 3, found 0");
  expect_refusal(with_offload(small_config(2, 1), on_disk()), "found \"nvme\"");
  expect_refusal(with_offload(small_config(2, 1), {{"device", "none"}}), "found \"none\"");
  expect_refusal(with_offload(small_config(2, 1), on_host({{"delayed_update", true}})), "delayed_update false");
  for (const char* type : {"Lamb", "Muon"}) {
    ordered_json config = with_offload(small_config(2, 1), on_host());
    config["optimizer"]["type"] = type;
    config["zero_allow_untested_optimizer"] = true;
    expect_refusal(config, type);
  }
  ordered_json mics = with_offload(small_config(3, 1), on_host());
  mics["zero_optimization"]["mics_shard_size"] = 2;
  expect_refusal(mics, "mics_shard_size: 2 of 4");
  EXPECT_NO_THROW(speculative_plan(with_offload(small_config(3, 1), on_host(), on_disk())));
}

}  // namespace
}  // namespace ds::engine
