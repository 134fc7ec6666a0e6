// offload_optimizer and offload_param after something went wrong, and beside the other features of stages 1 to 3.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <string>
#include <vector>

#include "core/check.h"
#include "core/text.h"
#include "dsengine/engine.h"
#include "tests/model/offloaded/offload_run.h"
#include "tests/model/small_run.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

struct OffloadVariant {
  const char* name;
  ordered_json optimizer;
  ordered_json parameters;
};

std::vector<OffloadVariant> offload_variants() {
  return {{"HostOptimizer", on_host(), {}},
          {"HostParameters", {}, on_host()},
          {"HostBoth", on_host(), on_host()},
          {"HalfOnTheHost", on_host({{"ratio", 0.5}}), on_host()},
          {"FileParameters", on_host(), on_disk({{"max_in_cpu", 0}, {"buffer_count", 2}})},
          {"FileBoth", on_disk({{"pipeline_read", true}, {"pipeline_write", true}}),
           on_disk({{"max_in_cpu", 70}, {"buffer_count", 3}})}};
}

// --- beside other features: the same training as without offload -----------------------------------------------------

struct Feature {
  const char* name;
  int world;
  ordered_json keys;  // of zero_optimization
  const char* precision = "fp32";
};

std::vector<Feature> features() {
  return {{"Plain", 2, ordered_json::object()},
          {"OneRank", 1, ordered_json::object()},
          {"Mics", 4, {{"mics_shard_size", 2}}},
          {"MicsBf16", 4, {{"mics_shard_size", 2}}, "bf16"},
          {"SecondarySlices", 4, {{"zero_hpz_partition_size", 2}}},
          {"QuantizedWeights", 2, {{"zero_quantized_weights", true}}},
          {"QuantizedWeightsInNodes", 4, {{"zero_quantized_weights", true}, {"zero_hpz_partition_size", 2}}},
          {"QuantizedGradients", 2, {{"zero_quantized_gradients", true}}},
          {"QuantizedFrozen", 2, {{"zero_quantized_nontrainable_weights", true}}},
          {"Persistent", 2, {{"stage3_param_persistence_threshold", 12}}, "bf16"},
          {"PersistentFp32", 2, {{"stage3_param_persistence_threshold", 12}}},
          {"AfterBackward", 2, {{"overlap_comm", false}}},
          {"Sequential", 2, {{"stage3_allgather_sequential", true}}}};
}

class OffloadBeside : public ::testing::TestWithParam<std::tuple<Feature, OffloadVariant>> {
 protected:
  const Feature& feature() const { return std::get<0>(GetParam()); }
  const OffloadVariant& offload() const { return std::get<1>(GetParam()); }
  ordered_json plain_config() const {
    ordered_json config = small_config(3, 2);
    config["gradient_clipping"] = 0.5;
    config["zero_optimization"].update(feature().keys);
    if (std::string(feature().precision) != "fp32") config[feature().precision]["enabled"] = true;
    return config;
  }
};

INSTANTIATE_TEST_SUITE_P(Grid, OffloadBeside,
                         ::testing::Combine(::testing::ValuesIn(features()), ::testing::ValuesIn(offload_variants())),
                         [](const auto& cell) {
                           return cat(std::get<0>(cell.param).name, std::get<1>(cell.param).name);
                         });

// Two parameters are frozen.
TEST_P(OffloadBeside, TrainsAsWithoutOffload) {
  test::run_ranks(feature().world, [&](comm::Communicator& communicator) {
    const auto run = [&](const ordered_json& config) {
      SmallNet model;
      model->first->bias.set_requires_grad(false);
      model->last->bias.set_requires_grad(false);
      const auto engine = start(model.ptr(), config, communicator).engine;
      const State weights = train(*engine, model, 4);
      EXPECT_EQ(engine->offloaded_state_bytes(), engine->plan().offloaded_bytes);
      EXPECT_EQ(engine->model_state_bytes().parameters, engine->plan().bytes->parameters);
      EXPECT_EQ(engine->model_state_bytes().master, engine->plan().bytes->master);
      EXPECT_EQ(engine->model_state_bytes().optimizer, engine->plan().bytes->optimizer);
      return weights;
    };
    const State plain = run(plain_config());
    const State offloaded = run(with_offload(plain_config(), offload().optimizer, offload().parameters));
    EXPECT_EQ(largest_difference(offloaded, plain), 0.0);
  });
}

// Calls beside forward, backward and step that change what is reduced when.
State train_unevenly(Engine& engine, SmallNet& model) {
  const int rank = engine.global_rank();
  const auto backward = [&](int64_t micro) { engine.backward(model->loss(sample(micro, rank))); };
  backward(0);
  engine.zero_grad();  // in the middle of an accumulation
  {
    const auto guard = engine.no_sync();
    backward(1);
  }
  backward(2);
  backward(3);
  engine.step();
  backward(4);
  engine.step();
  engine.set_train_batch_size(engine.train_batch_size() / 2);
  for (int64_t micro = 5; micro < 8; ++micro) {
    backward(micro);
    engine.backward(model->first(sample(micro, rank)).pow(2).mean());
    engine.step();
  }
  engine.set_gradient_accumulation_boundary(false);
  backward(8);
  engine.step();
  backward(9);
  engine.set_gradient_accumulation_boundary(true);  // declared when its backward is over
  engine.step();
  return copy_of(engine.fp32_state_dict());
}

TEST(OffloadRecovery, UnevenPassesAddUpAsWithoutOffload) {
  for (const int world : {1, 2}) {
    for (const int stage : {1, 2, 3}) {
      test::run_ranks(world, [&](comm::Communicator& communicator) {
        ordered_json config = small_config(stage, 2);
        config["zero_optimization"]["reduce_bucket_size"] = 40;
        const auto run = [&](const ordered_json& with) {
          SmallNet model;
          const auto engine = start(model.ptr(), with, communicator).engine;
          return train_unevenly(*engine, model);
        };
        const State plain = run(config);
        for (const OffloadVariant& offload : offload_variants()) {
          if (stage < 3 && offload.optimizer.is_null()) continue;
          EXPECT_EQ(largest_difference(run(with_offload(config, offload.optimizer, offload.parameters)), plain), 0.0)
              << offload.name << " stage " << stage << " ranks " << world;
        }
      });
    }
  }
}

TEST(OffloadRecovery, ModelsBuiltInSlicesTrainAsOthers) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    const ordered_json config = small_config(3, 1);
    for (const OffloadVariant& offload : offload_variants()) {
      const ordered_json with = with_offload(config, offload.optimizer, offload.parameters);
      SmallNet whole;
      const State expected = train(*start(whole.ptr(), with, communicator).engine, whole, 3);
      zero::Init init(borrowed(communicator), {.max_live = 0, .smallest = 8});
      SmallNet model;
      const auto engine = initialize({.model = model.ptr(), .config = with, .init = &init}).engine;
      EXPECT_EQ(largest_difference(train(*engine, model, 3), expected), 0.0) << offload.name;
    }
  });
}

// --- shares, sizes and ranks at their ends ---------------------------------------------------------------------------

TEST(OffloadRecovery, ARatioOfZeroOffloadsNothing) {
  for (const int world : {1, 2}) {
    test::run_ranks(world, [&](comm::Communicator& communicator) {
      const auto run = [&](const ordered_json& config) {
        SmallNet model;
        const auto engine = start(model.ptr(), config, communicator).engine;
        const State weights = train(*engine, model, 3);
        EXPECT_EQ(engine->offloaded_state_bytes(), zero::OffloadedBytes());
        EXPECT_EQ(engine->plan().offloaded_bytes, zero::OffloadedBytes());
        EXPECT_EQ(engine->model_state_bytes().gradients, engine->plan().bytes->gradients);
        return weights;
      };
      ordered_json plain = small_config(2, 1);
      plain["zero_optimization"]["reduce_bucket_size"] = 100;
      const State expected = run(plain);
      for (const bool delayed : {false, true}) {
        const ordered_json none = {{"ratio", 0.0}, {"delayed_update", delayed}, {"delayed_update_start", 1}};
        EXPECT_EQ(largest_difference(run(with_offload(plain, on_host(none))), expected), 0.0);
        EXPECT_EQ(largest_difference(run(with_offload(plain, on_disk(none))), expected), 0.0);
      }
    });
  }
}

TEST(OffloadRecovery, OneRankWithOffloadTakesTheConfigOfMany) {
  test::run_ranks(1, [&](comm::Communicator& communicator) {
    const auto run = [&](const ordered_json& config) {
      SmallNet model;
      return train(*start(model.ptr(), config, communicator).engine, model, 3);
    };
    ordered_json config = small_config(3, 1);
    const State plain = run(config);
    // Nothing is sent: nothing has to lose precision for it.
    config["zero_optimization"]["zero_quantized_weights"] = true;
    config["zero_optimization"]["zero_quantized_gradients"] = true;
    config["zero_optimization"]["zero_hpz_partition_size"] = 4;
    EXPECT_EQ(largest_difference(run(with_offload(config, on_host(), on_host())), plain), 0.0);
  });
}

TEST(OffloadRecovery, ParametersWithoutElementsHaveAPlace) {
  struct Hollow : torch::nn::Module {
    Hollow() {
      weight = register_parameter("weight", torch::full({64}, 0.5));
      none = register_parameter("none", torch::zeros({0}));
      other = register_parameter("other", torch::full({32}, 0.25));
    }
    at::Tensor loss() { return weight.pow(2).sum() + none.sum() + other.sum(); }
    at::Tensor weight, none, other;
  };
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    const auto run = [&](const ordered_json& config) {
      const auto model = std::make_shared<Hollow>();
      const auto engine = start(model, config, communicator).engine;
      for (int step = 0; step < 3; ++step) {
        engine->backward(model->loss());
        engine->step();
      }
      return copy_of(engine->fp32_state_dict()).at("weight");
    };
    ordered_json config = small_config(3, 1);
    config["zero_optimization"]["stage3_allgather_sequential"] = true;
    const at::Tensor expected = run(config);
    for (const OffloadVariant& offload : offload_variants()) {
      EXPECT_TRUE(run(with_offload(config, offload.optimizer, offload.parameters)).equal(expected)) << offload.name;
    }
  });
}

TEST(OffloadRecovery, WhatOtherRanksOfTheHostNeedCounts) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    const auto config = config::parse(with_offload(small_config(2, 1), on_host()), {.dp_world_size = 1});
    const int64_t elements = communicator.rank() == 1 ? int64_t{1} << 50 : 64;  // as stages of a pipeline differ
    const auto buckets = zero::lay_out({{"a", elements, 0, 0, false}}, {.max_bucket_elements = elements});
    const auto begin = [&] {
      OffloadedState(make_plan(config, {}), config, {.buckets = buckets, .frozen = {}, .states = {2}}, communicator);
    };
    EXPECT_THAT(begin, ThrowsMessage<ConfigError>(
                           AllOf(HasSubstr("zero_optimization.offload_optimizer, "),
                                 HasSubstr(communicator.rank() == 1 ? "GiB on this rank" : "KiB on this rank"),
                                 HasSubstr("on all ranks of this host (2)"))));
  });
}

TEST(OffloadRecovery, OptimizersThatTalkStayOnAccelerators) {
  const auto plan_on = [](const char* type, bool accelerator, int64_t ranks) {
    ordered_json config = with_offload(small_config(2, 1), on_host());
    config["optimizer"]["type"] = type;
    config["zero_allow_untested_optimizer"] = true;
    return make_plan(config::parse(config, {.dp_world_size = ranks}), {.world_size = ranks, .dp = ranks},
                     {.accelerator = accelerator});
  };
  for (const char* type : {"Lamb", "Muon"}) {
    EXPECT_THAT([&] { plan_on(type, true, 2); },
                ThrowsMessage<ConfigError>(HasSubstr(cat("expected \"none\" with the optimizer ", type))));
    EXPECT_NO_THROW(plan_on(type, true, 1));
    EXPECT_NO_THROW(plan_on(type, false, 2));
  }
  EXPECT_NO_THROW(plan_on("AdamW", true, 2));
}

TEST(OffloadRecovery, WhatTravelsToAnAcceleratorIsPredicted) {
  const auto staging = [](bool accelerator) {
    const ordered_json config = with_offload(small_config(2, 1), on_host());
    return make_plan(config::parse(config, {.dp_world_size = 2}), {.world_size = 2, .dp = 2},
                     {.parameters = 8192, .accelerator = accelerator})
        .offloaded_bytes.staging;
  };
  EXPECT_EQ(staging(false), 0);
  EXPECT_EQ(staging(true), 4 * 4096 * 4);  // two slices of weights and two of gradients, one bucket on two ranks
}

// --- after a failure -------------------------------------------------------------------------------------------------

TEST(OffloadRecovery, AStepThatThrowsLeavesAnEngineThatGoesOn) {
  const State expected = TorchRun{.world = 2, .steps = 3}.train_adamw();
  for (const OffloadVariant& offload : offload_variants()) {
    test::run_ranks(2, [&](comm::Communicator& communicator) {
      SmallNet model;
      const auto engine =
          start(model.ptr(), with_offload(small_config(3, 1), offload.optimizer, offload.parameters), communicator)
              .engine;
      for (int failure = 0; failure < 4; ++failure) expect_failing_step(*engine, model);  // more than there are buffers
      EXPECT_LT(largest_difference(train(*engine, model, 3), expected), 2e-6) << offload.name;
    });
  }
}

TEST(OffloadRecovery, APassThatEndsEarlyGivesBackWhatWasGatheredAhead) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    const auto run = [&](const ordered_json& config) {
      SmallNet model;
      const auto engine = start(model.ptr(), config, communicator).engine;
      train(*engine, model, 2);
      for (int64_t step = 2; step < 4; ++step) {
        engine->backward(model->first(sample(step, communicator.rank())).pow(2).mean());
        engine->step();
      }
      return train(*engine, model, 2);
    };
    const ordered_json config = small_config(3, 1);
    const State plain = run(config);
    const ordered_json few = with_offload(config, on_host(), on_disk({{"max_in_cpu", 0}, {"buffer_count", 2}}));
    EXPECT_EQ(largest_difference(run(few), plain), 0.0);
  });
}

// While it lives, this process writes no further than so many bytes into a file.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) {
    std::signal(SIGXFSZ, SIG_IGN);
    ::getrlimit(RLIMIT_FSIZE, &before_);
    rlimit limit = before_;
    limit.rlim_cur = bytes;
    EXPECT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  }
  ~FileSizeLimit() { ::setrlimit(RLIMIT_FSIZE, &before_); }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

 private:
  rlimit before_{};
};

TEST(OffloadRecovery, WeightsThatWereNotWrittenAreNeverUsed) {
  test::run_ranks(1, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine =
        start(model.ptr(), with_offload(small_config(3, 1), {}, on_disk({{"max_in_cpu", 0}, {"buffer_count", 2}})),
              communicator)
            .engine;
    train(*engine, model, 2);
    const auto step = [&] {
      engine->backward(model->loss(sample(2, 0)));
      engine->step();
      engine->synchronize_parameters();
    };
    {
      const FileSizeLimit limit(4096);
      EXPECT_THAT(step, ThrowsMessage<IoError>(HasSubstr("could not be written")));
    }
    // The disk is well again, but the weights of the last update are gone: the operator that reads them throws.
    for (int attempt = 0; attempt < 3; ++attempt) {
      engine->zero_grad();
      EXPECT_THAT(
          step, ThrowsMessage<std::exception>(AnyOf(HasSubstr("could not be written"), HasSubstr("step() had failed"))))
          << attempt;
    }
    EXPECT_THAT([&] { engine->fp32_state_dict(); }, ::testing::Not(::testing::Throws<InternalError>()));
  });
}

}  // namespace
}  // namespace ds::engine
