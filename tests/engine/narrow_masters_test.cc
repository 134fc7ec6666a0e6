// Masters, gradients and optimizer states of 16 bits: the same training at every stage and in every memory, in as many
// bytes as predicted, exactly resumed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "checkpoint/folder_source.h"
#include "config/plan/plan.h"
#include "core/check.h"
#include "optim/shard_optimizer.h"
#include "tests/model/offloaded/offload_run.h"
#include "tests/model/small_run.h"
#include "tests/optim/plain_adamw.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using test::run_ranks;
using ::testing::AllOf;
using ::testing::HasSubstr;

ordered_json all_bf16(int stage, int accumulation = 1) {
  ordered_json config = small_config(stage, accumulation);
  config["bf16"] = {{"enabled", true}, {"bf16_master_weights_and_grads", true}, {"bf16_optimizer_states", true}};
  return config;
}

// Masters bfloat16, moments float32: what DeepSpeed has with CPU Adam.
ordered_json bf16_masters_on_host(int stage) {
  ordered_json config = with_offload(all_bf16(stage), on_host());
  config["bf16"]["bf16_optimizer_states"] = false;
  return config;
}

ordered_json fp16_masters_on_host(int stage) {
  ordered_json config = with_offload(small_config(stage, 1), on_host());
  config["fp16"] = {{"enabled", true}, {"fp16_master_weights_and_grads", true}, {"initial_scale_power", 8}};
  return config;
}

ordered_json bf16_moments(int stage) {
  ordered_json config = small_config(stage, 1);
  config["bf16"]["enabled"] = true;
  config["optimizer"]["params"]["fp32_optimizer_states"] = false;
  return config;
}

State run(const ordered_json& config, int world, int steps = 6) {
  State result;
  run_ranks(world, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), config, communicator).engine;
    const State weights = train(*engine, model, steps);
    if (communicator.rank() == 0) result = weights;
  });
  return result;
}

void expect_dtypes(Engine& engine, at::ScalarType master, at::ScalarType state) {
  auto& optimizer = dynamic_cast<optimizers::SliceOptimizer&>(*engine.optimizer());
  for (int64_t b = 0; b < optimizer.slice_count(); ++b) {
    EXPECT_EQ(optimizer.slice(b).master.scalar_type(), master);
    for (const auto& [name, values] : optimizer.states(b)) EXPECT_EQ(values.scalar_type(), state) << name;
  }
}

TEST(NarrowMasters, AStepOfAllBfloat16IsTheFormulaRounded) {
  SmallNet reference;
  reference->to(torch::kBFloat16);
  const optimizers::PlainAdamW plain{.lr = 0.02, .weight_decay = 0.1};
  std::vector<at::Tensor> means;
  std::vector<at::Tensor> squares;
  for (const at::Tensor& parameter : reference->parameters()) {
    means.push_back(torch::zeros_like(parameter));
    squares.push_back(torch::zeros_like(parameter));
  }
  constexpr int kSteps = 8;
  for (int64_t step = 1; step <= kSteps; ++step) {
    reference->zero_grad();
    reference->loss(sample(step - 1, 0)).backward();
    const torch::NoGradGuard no_grad;
    size_t p = 0;
    for (at::Tensor& parameter : reference->parameters()) {
      auto* const w = parameter.mutable_data_ptr<c10::BFloat16>();
      auto* const m = means[p].mutable_data_ptr<c10::BFloat16>();
      auto* const v = squares[p++].mutable_data_ptr<c10::BFloat16>();
      const auto* const g = parameter.grad().const_data_ptr<c10::BFloat16>();
      for (int64_t i = 0; i < parameter.numel(); ++i) {
        float weight = w[i];
        float mean = m[i];
        float square = v[i];
        plain.step(step, g[i], weight, mean, square);
        w[i] = weight;
        m[i] = mean;
        v[i] = square;
      }
    }
  }
  for (const int stage : {1, 2, 3}) {
    EXPECT_EQ(largest_difference(run(all_bf16(stage), 1, kSteps), parameters_of(*reference)), 0.0) << stage;
  }
}

TEST(NarrowMasters, TrainAlikeAtEveryStage) {
  for (const int world : {1, 2}) {
    for (const double clip : {0.0, 0.5}) {
      for (const char* type : {"AdamW", "Lion", "Adagrad", "SGD", "Lamb", "RMSprop"}) {
        const auto trained = [&](int stage) {
          ordered_json config = all_bf16(stage);
          config["gradient_clipping"] = clip;
          config["optimizer"] = {{"type", type}, {"params", {{"lr", 0.01}}}};
          config["zero_allow_untested_optimizer"] = true;
          return run(config, world);
        };
        const State first = trained(1);
        EXPECT_EQ(largest_difference(trained(2), first), 0.0) << type << world;
        // Other buckets: a norm adds its squares in another order.
        EXPECT_LE(largest_difference(trained(3), first), clip > 0 || type == std::string("Lamb") ? 2e-2 : 0.0)
            << type << world;
      }
    }
  }
}

// No master beside the parameters, and none of float32 anywhere.
TEST(NarrowMasters, TheParametersAreTheMasters) {
  for (const int stage : {1, 2, 3}) {
    run_ranks(2, [&](comm::Communicator& communicator) {
      SmallNet model;
      const auto engine = start(model.ptr(), all_bf16(stage), communicator).engine;
      const State weights = train(*engine, model, 3);
      expect_dtypes(*engine, at::kBFloat16, at::kBFloat16);
      EXPECT_EQ(engine->model_state_bytes().master, 0);
      for (const auto& [name, values] : weights) EXPECT_EQ(values.scalar_type(), at::kFloat) << name;
      const auto whole = engine->gathered_parameters(model->parameters());
      EXPECT_EQ(largest_difference(parameters_of(*model), weights), 0.0);
    });
  }
}

TEST(NarrowMasters, BytesAreThosePredicted) {
  struct Case {
    ordered_json config;
    int64_t master;  // bytes of an element that is updated
    int64_t state;
  };
  for (const int stage : {1, 2, 3}) {
    for (const Case& one :
         {Case{all_bf16(stage), 0, 4}, Case{bf16_moments(stage), 4, 4}, Case{bf16_masters_on_host(stage), 2, 8},
          Case{fp16_masters_on_host(stage), 2, 8}, Case{with_offload(all_bf16(stage), on_host()), 2, 4},
          Case{with_offload(all_bf16(stage), on_disk()), 2, 4},
          Case{with_offload(bf16_moments(stage), on_disk()), 4, 4},
          Case{with_offload(bf16_moments(stage), on_host({{"super_offload", true}})), 4, 4}}) {
      ordered_json config = one.config;
      config["zero_optimization"]["reduce_bucket_size"] = 100;
      run_ranks(2, [&](comm::Communicator& communicator) {
        SmallNet model;
        const auto engine = start(model.ptr(), config, communicator).engine;
        train(*engine, model, 2);
        const Engine::ModelStateBytes held = engine->model_state_bytes();
        const zero::ModelStateBytes& predicted = *engine->plan().bytes;
        EXPECT_EQ(held.parameters, predicted.parameters) << config.dump();
        EXPECT_EQ(held.gradients, predicted.gradients) << config.dump();
        EXPECT_EQ(held.master, predicted.master) << config.dump();
        EXPECT_EQ(held.optimizer, predicted.optimizer) << config.dump();
        EXPECT_EQ(engine->offloaded_state_bytes(), engine->plan().offloaded_bytes) << config.dump();
        if (config["zero_optimization"].contains("offload_optimizer")) return;
        int64_t elements = 0;
        const auto& optimizer = dynamic_cast<const optimizers::SliceOptimizer&>(*engine->optimizer());
        for (int64_t b = 0; b < optimizer.slice_count(); ++b) elements += optimizer.slice(b).master.numel();
        EXPECT_EQ(held.master, one.master * elements);
        EXPECT_EQ(held.optimizer, one.state * elements);
        if (stage == 3) EXPECT_EQ(held.parameters, 2 * elements);
      });
    }
  }
}

TEST(NarrowMasters, MemoryOnTheHostAndInFilesChangesNothing) {
  for (const int stage : {1, 3}) {
    const State plain = run(all_bf16(stage), 2);
    for (const ordered_json& place :
         {on_host(), on_disk(), on_host({{"ratio", 0.5}}), on_host({{"super_offload", true}})}) {
      EXPECT_EQ(largest_difference(run(with_offload(all_bf16(stage), place), 2), plain), 0.0) << stage << place;
    }
    if (stage == 3) {
      EXPECT_EQ(largest_difference(run(with_offload(all_bf16(stage), on_host(), on_host()), 2), plain), 0.0);
    }
  }
}

// Masters that are rounded to 8 bits of mantissa after each step drift; with moments of float32 they stay near.
TEST(NarrowMasters, StayNearFloat32) {
  const State exact = TorchRun{.world = 2, .steps = 6}.train_adamw();
  for (const int stage : {1, 2, 3}) {
    EXPECT_LT(largest_difference(run(bf16_masters_on_host(stage), 2), exact), 0.06) << stage;
    EXPECT_LT(largest_difference(run(fp16_masters_on_host(stage), 2), exact), 0.05) << stage;
    EXPECT_LT(largest_difference(run(bf16_moments(stage), 2), exact), 0.06) << stage;
    EXPECT_GT(largest_difference(run(bf16_masters_on_host(stage), 2), exact), 1e-4) << stage;
  }
}

TEST(NarrowMasters, DtypesAreThoseThatTheKeysName) {
  run_ranks(1, [&](comm::Communicator& communicator) {
    const auto expect = [&](const ordered_json& config, at::ScalarType master, at::ScalarType state) {
      SmallNet model;
      const auto engine = start(model.ptr(), config, communicator).engine;
      expect_dtypes(*engine, master, state);
    };
    expect(all_bf16(1), at::kBFloat16, at::kBFloat16);
    expect(bf16_masters_on_host(1), at::kBFloat16, at::kFloat);
    expect(fp16_masters_on_host(1), at::kHalf, at::kFloat);
    expect(bf16_moments(1), at::kFloat, at::kBFloat16);
    expect(bf16_moments(0), at::kFloat, at::kBFloat16);
    ordered_json fp32 = small_config(1, 1);
    fp32["optimizer"]["params"]["fp32_optimizer_states"] = false;  // the parameters are float32
    expect(fp32, at::kFloat, at::kFloat);
  });
}

TEST(NarrowMasters, AnOverflowLeavesThemAsTheyAre) {
  run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), fp16_masters_on_host(2), communicator).engine;
    const State before = train(*engine, model, 2);
    const at::Tensor loss = model->loss(sample(7, communicator.rank()));
    engine->backward(communicator.rank() == 1 ? loss * std::numeric_limits<float>::infinity() : loss);
    engine->step();
    EXPECT_FALSE(engine->was_step_applied());
    EXPECT_EQ(largest_difference(copy_of(engine->fp32_state_dict()), before), 0.0);
  });
}

TEST(NarrowMasters, ACheckpointGoesOnBitByBitAndNamesTheirDtype) {
  for (const ordered_json& config :
       {all_bf16(2), all_bf16(3), bf16_masters_on_host(1), bf16_moments(1), with_offload(all_bf16(3), on_disk())}) {
    const test::ScratchFolder folder;
    const std::string dir = folder.path().string();
    run_ranks(2, [&](comm::Communicator& communicator) {
      SmallNet model;
      const auto engine = start(model.ptr(), config, communicator).engine;
      train(*engine, model, 3);
      engine->save_checkpoint(dir, "tag");
      const State expected = train(*engine, model, 3);
      const auto source = checkpoint::open_folder(dir + "/tag");
      const bool masters = config["bf16"].value("bf16_master_weights_and_grads", false);
      EXPECT_EQ(source->info(checkpoint::weight_path("first.weight")).dtype, masters ? at::kBFloat16 : at::kFloat);
      SmallNet other;
      {
        const torch::NoGradGuard no_grad;
        for (at::Tensor& parameter : other->parameters()) parameter.fill_(0.125);  // what comes is the checkpoint's
      }
      const auto resumed = start(other.ptr(), config, communicator).engine;
      resumed->load_checkpoint(dir, "tag");
      EXPECT_EQ(largest_difference(train(*resumed, other, 3), expected), 0.0) << config.dump();
    });
  }
}

// What ranks hold twice, and what travels in few bits.
TEST(NarrowMasters, SecondarySlicesAreTheSame) {
  ordered_json config = all_bf16(3);
  config["zero_optimization"]["stage3_param_persistence_threshold"] = 0;
  const State plain = run(config, 4);
  config["zero_optimization"]["zero_hpz_partition_size"] = 2;
  EXPECT_EQ(largest_difference(run(config, 4), plain), 0.0);
}

TEST(NarrowMasters, CopiesOfTheModelStateStayTheSame) {
  for (const int stage : {1, 2, 3}) {
    for (ordered_json config : {all_bf16(stage), bf16_masters_on_host(stage)}) {
      config["zero_optimization"]["mics_shard_size"] = 2;
      std::vector<State> weights(4);
      run_ranks(4, [&](comm::Communicator& communicator) {
        SmallNet model;
        const auto engine = start(model.ptr(), config, communicator).engine;
        train(*engine, model, 4);
        const auto whole = engine->gathered_parameters(model->parameters());
        weights[static_cast<size_t>(communicator.rank())] = parameters_of(*model);
        EXPECT_EQ(engine->model_state_bytes().master, engine->plan().bytes->master);
        EXPECT_EQ(engine->model_state_bytes().optimizer, engine->plan().bytes->optimizer);
      });
      for (const State& other : weights) EXPECT_EQ(largest_difference(other, weights.front()), 0.0) << config.dump();
      const State exact = TorchRun{.world = 4, .steps = 4}.train_adamw();
      EXPECT_LT(largest_difference(weights.front(), exact), 0.06) << config.dump();
    }
  }
}

TEST(NarrowMasters, TrainWithGathersAndReductionsOfFewBits) {
  for (const ordered_json& keys :
       {ordered_json{{"zero_quantized_weights", true}}, ordered_json{{"zero_quantized_gradients", true}},
        ordered_json{{"zero_quantized_weights", true}, {"zero_quantized_gradients", true}}}) {
    for (ordered_json config : {all_bf16(3), bf16_masters_on_host(3)}) {
      config["zero_optimization"].update(keys);
      config["zero_optimization"]["stage3_param_persistence_threshold"] = 0;
      const State trained = run(config, 2, 4);
      const State exact = TorchRun{.world = 2, .steps = 4}.train_adamw();
      EXPECT_LT(largest_difference(trained, exact), 0.12) << config.dump();
      EXPECT_GT(largest_difference(trained, exact), 1e-4) << config.dump();
    }
  }
}

// On ranks and stages that differ, values of the same dtype are moved as they are.
TEST(NarrowMasters, ACheckpointMovesToOtherRanksAndToFloat32Masters) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  State saved;
  run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), all_bf16(2), communicator).engine;
    const State weights = train(*engine, model, 3);
    engine->save_checkpoint(dir, "tag");
    if (communicator.rank() == 0) saved = weights;
  });
  ordered_json wide = small_config(1, 1);
  wide["bf16"]["enabled"] = true;
  for (const ordered_json& config : {all_bf16(3), all_bf16(1), bf16_masters_on_host(3), wide, small_config(0, 1)}) {
    run_ranks(3, [&](comm::Communicator& communicator) {
      SmallNet model;
      const auto engine = start(model.ptr(), config, communicator).engine;
      engine->load_checkpoint(dir, "tag");
      EXPECT_EQ(largest_difference(copy_of(engine->fp32_state_dict()), saved), 0.0) << config.dump();
      train(*engine, model, 1);
      EXPECT_TRUE(engine->was_step_applied());
    });
  }
}

TEST(NarrowMasters, OneParameterIsReadAndWrittenInFloat32) {
  run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), all_bf16(3), communicator).engine;
    train(*engine, model, 2);
    const at::Tensor& weight = model->first->weight;
    const at::Tensor master = engine->safe_get_full_fp32_param(weight);
    EXPECT_EQ(master.scalar_type(), at::kFloat);
    EXPECT_EQ(engine->safe_get_full_optimizer_state(weight, "exp_avg").scalar_type(), at::kFloat);
    engine->safe_set_full_fp32_param(weight, torch::full({11, 6}, 1.001F));
    EXPECT_TRUE(at::equal(engine->safe_get_full_fp32_param(weight), torch::full({11, 6}, 1.0F)));  // rounded
  });
}

TEST(NarrowMasters, AnOptimizerOfTheProgramIsRefused) {
  run_ranks(1, [&](comm::Communicator& communicator) {
    SmallNet model;
    ordered_json config = all_bf16(1);
    config.erase("optimizer");
    auto client = std::make_shared<torch::optim::AdamW>(model->parameters(), torch::optim::AdamWOptions(1e-3));
    EXPECT_THAT(
        [&] {
          initialize(
              {.model = model.ptr(), .config = config, .optimizer = client, .communicator = borrowed(communicator)});
        },
        ThrowsMessage<ConfigError>(AllOf(HasSubstr("bf16.bf16_master_weights_and_grads"), HasSubstr("AdamW"))));
  });
}

TEST(NarrowMasters, ThePlanSaysTheDtypes) {
  const auto precision = [](const ordered_json& config) {
    const Plan plan = make_plan(config::parse(config, {.dp_world_size = 1}), {});
    for (const PlanRow& row : plan.rows) {
      if (row.what == "precision") return row.choice + " <- " + row.reason;
    }
    return std::string();
  };
  EXPECT_THAT(precision(all_bf16(1)), AllOf(HasSubstr("bf16 parameters, gradients and master weights"),
                                            HasSubstr("bf16.bf16_master_weights_and_grads: true")));
  EXPECT_THAT(precision(bf16_masters_on_host(1)), HasSubstr("optimizer states in fp32"));
  EXPECT_THAT(precision(bf16_moments(1)), HasSubstr("fp32 master weights, optimizer states in bf16"));
  const auto warnings = [](const ordered_json& config) {
    return make_plan(config::parse(config, {.dp_world_size = 1}), {}).warnings;
  };
  ordered_json slow = all_bf16(1);
  EXPECT_THAT(warnings(slow), ::testing::Contains(HasSubstr("betas[1]: 0.999")));
  slow["optimizer"]["params"]["betas"] = {0.9, 0.95};
  EXPECT_THAT(warnings(slow), ::testing::IsEmpty());
  ordered_json fp16 = fp16_masters_on_host(1);
  fp16["optimizer"]["params"]["fp32_optimizer_states"] = false;
  EXPECT_THAT(warnings(fp16), ::testing::Contains(HasSubstr("fp32_optimizer_states")));
}

}  // namespace
}  // namespace ds::engine
