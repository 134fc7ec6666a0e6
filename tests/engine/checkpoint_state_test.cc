// What a checkpoint carries: every kind of state, through every kind of engine, bit for bit.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/folder_source.h"
#include "checkpoint/verify.h"
#include "core/check.h"
#include "core/text.h"
#include "tests/engine/checkpoint_run.h"
#include "tests/engine/offload_run.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using test::run_ranks;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

void forget(torch::nn::Module& module) {
  const torch::NoGradGuard no_grad;
  for (at::Tensor& parameter : module.parameters()) parameter.fill_(0.125);
}

// --- layouts ---------------------------------------------------------------------------------------------------------

struct Variant {
  const char* name;
  int stage;
  int world;
  ordered_json zero = ordered_json::object();  // further keys of zero_optimization
  ordered_json top = ordered_json::object();   // of the config

  ordered_json config() const {
    ordered_json all = carried_config(stage, world);
    if (!zero.is_null()) all["zero_optimization"].update(zero);
    if (!top.is_null()) all.update(top);
    return all;
  }
  std::string precision() const { return top.contains("bf16") ? "bf16" : top.contains("fp16") ? "fp16" : "fp32"; }
};

ordered_json keys(const char* text) { return ordered_json::parse(text); }

std::vector<Variant> all_variants() {
  const ordered_json bf16 = keys(R"({"bf16": {"enabled": true}})");
  const ordered_json fp16 =
      keys(R"({"fp16": {"enabled": true, "initial_scale_power": 10, "loss_scale_window": 2, "hysteresis": 2}})");
  const ordered_json optimizer_file = {{"offload_optimizer", on_disk()}};
  const ordered_json optimizer_host = {{"offload_optimizer", on_host()}};
  const ordered_json all_files = {{"offload_optimizer", on_disk()}, {"offload_param", on_disk({{"max_in_cpu", 0}})}};
  const ordered_json delayed = {
      {"offload_optimizer", on_host({{"delayed_update", true}, {"delayed_update_start", 1}})}};
  return {
      {"whole", 0, 1},
      {"stage3", 3, 2},
      {"bf16_stage1", 1, 2, {}, bf16},
      {"bf16_stage2", 2, 3, {}, bf16},
      {"bf16_stage3", 3, 1, {}, bf16},
      {"fp16_stage1", 1, 2, {}, fp16},
      {"fp16_stage2", 2, 1, {}, fp16},
      {"fp16_stage3", 3, 3, {}, fp16},
      {"host_optimizer", 1, 2, optimizer_host},
      {"host_optimizer_bf16", 2, 3, optimizer_host, bf16},
      {"half_on_host", 2, 2, {{"offload_optimizer", on_host({{"ratio", 0.5}})}}},
      {"file_optimizer", 1, 3, optimizer_file},
      {"host_parameters", 3, 2, {{"offload_param", on_host()}}},
      {"all_in_files", 3, 2, all_files},
      {"all_in_files_fp16", 3, 2, all_files, fp16},
      {"delayed", 2, 2, delayed},
      {"super_offload", 2, 2, {{"offload_optimizer", on_host({{"super_offload", true}})}}},
      {"mics_stage1", 1, 4, {{"mics_shard_size", 2}}},
      {"mics_stage3", 3, 4, {{"mics_shard_size", 2}}},
      {"secondary_slices", 3, 4, {{"zero_hpz_partition_size", 2}}},
      {"persistent", 3, 3, {{"stage3_param_persistence_threshold", 20}}},
      {"reused", 3, 2, {{"stage3_max_reuse_distance", 1000000}, {"stage3_prefetch_bucket_size", 1000000}}},
  };
}

Variant variant_named(const std::string& name) {
  for (const Variant& variant : all_variants()) {
    if (name == variant.name) return variant;
  }
  throw std::runtime_error("no variant " + name);
}

void one_step(Engine& engine, CarriedNet& model, bool overflow = false) {
  const int64_t step = engine.global_steps();
  for (int64_t micro = 0; micro < engine.gradient_accumulation_steps(); ++micro) {
    at::Tensor loss = model->loss(rows_of(step * 8 + micro, engine.global_rank(), engine.world_size()));
    if (overflow && engine.global_rank() == engine.world_size() - 1) {
      loss = loss * std::numeric_limits<float>::infinity();
    }
    engine.backward(loss);
    engine.step();
  }
}

// Five steps; in float16 the second and third overflow, so that the scale is halved and one step of a window is done.
void train_before_save(Engine& engine, CarriedNet& model) {
  for (int step = 0; step < 5; ++step) {
    one_step(engine, model, engine.dynamic_loss_scale() && (step == 1 || step == 2));
  }
}

// Weights and states of two checkpoints.
void expect_same_state(const std::string& one, const std::string& other, bool frozen_too = true) {
  const auto a = checkpoint::open_folder(one);
  const auto b = checkpoint::open_folder(other);
  int compared = 0;
  for (const auto& [path, info] : a->tensors()) {
    if (path.starts_with("ranks/") || (info.frozen && !frozen_too)) continue;
    ASSERT_TRUE(b->contains(path)) << path;
    EXPECT_EQ(info, b->info(path)) << path;
    EXPECT_TRUE(torch::equal(a->tensor(path), b->tensor(path))) << path;
    ++compared;
  }
  EXPECT_GT(compared, 4);
  for (const auto& [path, info] : b->tensors()) EXPECT_TRUE(path.starts_with("ranks/") || a->contains(path)) << path;
  EXPECT_EQ(a->aliases(), b->aliases());
  const checkpoint::TrainingState& s = a->state();
  const checkpoint::TrainingState& t = b->state();
  EXPECT_EQ(s.global_steps, t.global_steps);
  EXPECT_EQ(s.global_samples, t.global_samples);
  EXPECT_EQ(s.skipped_steps, t.skipped_steps);
  EXPECT_EQ(s.optimizer->step_count, t.optimizer->step_count);
  EXPECT_EQ(s.optimizer->groups, t.optimizer->groups);
  EXPECT_EQ(s.lr_iteration, t.lr_iteration);
  if (s.loss_scaler && t.loss_scaler) EXPECT_EQ(*s.loss_scaler, *t.loss_scaler);
}

class CheckpointState : public ::testing::TestWithParam<std::string> {
 protected:
  // Trains and saves `tag`; returns the weights of later steps.
  void save(const Variant& variant, const std::string& tag) {
    run_ranks(variant.world, [&](comm::Communicator& communicator) {
      CarriedNet model;
      const auto parts = start(model.ptr(), variant.config(), communicator);
      train_before_save(*parts.engine, model);
      parts.engine->save_checkpoint(dir(), tag);
    });
    EXPECT_EQ(checkpoint::verify(dir() + "/" + tag).size(), 0U);
  }
  void load_and_save(const Variant& variant, const std::string& tag, const std::string& again) {
    run_ranks(variant.world, [&](comm::Communicator& communicator) {
      CarriedNet model;
      forget(*model);
      const auto parts = start(model.ptr(), variant.config(), communicator);
      EXPECT_TRUE(parts.engine->load_checkpoint(dir(), tag));
      parts.engine->save_checkpoint(dir(), again);
      // It can be trained.
      one_step(*parts.engine, model);
      one_step(*parts.engine, model);
      const State weights = copy_of(parts.engine->fp32_state_dict());
      for (const auto& [name, values] : weights) EXPECT_TRUE(values.isfinite().all().item<bool>()) << name;
    });
  }
  std::string dir() const { return folder_.path().string(); }

  test::ScratchFolder folder_;
};

std::vector<std::string> variant_names() {
  std::vector<std::string> names;
  for (const Variant& variant : all_variants()) names.emplace_back(variant.name);
  return names;
}

INSTANTIATE_TEST_SUITE_P(Variants, CheckpointState, ::testing::ValuesIn(variant_names()),
                         [](const auto& variant) { return variant.param; });

// To layouts of other stages, ranks, memory and precision, and back into its own.
TEST_P(CheckpointState, GoesThroughOtherEnginesUnchanged) {
  const Variant variant = variant_named(GetParam());
  save(variant, "saved");
  for (const char* other_name : {"whole", "stage3", "bf16_stage2", "fp16_stage3", "all_in_files"}) {
    SCOPED_TRACE(other_name);
    const Variant other = variant_named(other_name);
    const bool same_precision = variant.precision() == other.precision();
    load_and_save(other, "saved", "other");
    // What is not trained has the precision of the model.
    if (same_precision) expect_same_state(dir() + "/saved", dir() + "/other");
    load_and_save(variant, "other", "back");
    const auto saved = checkpoint::open_folder(dir() + "/saved");
    const auto back = checkpoint::open_folder(dir() + "/back");
    for (const auto& [path, info] : saved->tensors()) {
      if (path.starts_with("ranks/")) continue;
      const at::Tensor wanted = saved->tensor(path);
      const at::Tensor found = back->tensor(path);
      if (info.frozen && !same_precision) {
        EXPECT_TRUE(torch::allclose(wanted.to(torch::kFloat), found.to(torch::kFloat), 0.01, 0.01)) << path;
      } else {
        EXPECT_TRUE(torch::equal(wanted, found)) << path;
      }
    }
  }
}

TEST_P(CheckpointState, GoesOnBitExactly) {
  const Variant variant = variant_named(GetParam());
  std::map<int, State> ends;
  std::vector<double> scales;
  run_ranks(variant.world, [&](comm::Communicator& communicator) {
    CarriedNet model;
    const auto parts = start(model.ptr(), variant.config(), communicator);
    Engine& engine = *parts.engine;
    train_before_save(engine, model);
    engine.save_checkpoint(dir(), "saved");
    for (int step = 0; step < 4; ++step) one_step(engine, model);
    const State end = copy_of(engine.fp32_state_dict());
    if (communicator.rank() == 0) ends[0] = end;
    if (communicator.rank() == 0) scales = {engine.loss_scale(), engine.get_lr()[0]};
  });
  run_ranks(variant.world, [&](comm::Communicator& communicator) {
    CarriedNet model;
    forget(*model);
    const auto parts = start(model.ptr(), variant.config(), communicator);
    Engine& engine = *parts.engine;
    one_step(engine, model);  // what was trained before goes
    engine.load_checkpoint(dir(), "saved");
    EXPECT_EQ(engine.global_steps(), 5);
    EXPECT_EQ(engine.skipped_steps(), variant.precision() == "fp16" ? 2 : 0);
    for (int step = 0; step < 4; ++step) one_step(engine, model);
    const State end = copy_of(engine.fp32_state_dict());
    if (communicator.rank() == 0) ends[1] = end;
    EXPECT_EQ(scales, (std::vector<double>{engine.loss_scale(), engine.get_lr()[0]}));
  });
  EXPECT_EQ(largest_difference(ends[0], ends[1]), 0.0);
}

// --- frozen parameters -----------------------------------------------------------------------------------------------

// Frozen weights in 8 bits: what is read is what operators see, and stays so however often it is saved and loaded.
TEST(CheckpointFrozen, InEightBits) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  ordered_json config = carried_config(3, 2);
  config["zero_optimization"]["zero_quantized_nontrainable_weights"] = true;
  const auto go = [&](const ordered_json& with, const std::string& from, const std::string& to) {
    run_ranks(2, [&](comm::Communicator& communicator) {
      CarriedNet model;
      if (!from.empty()) forget(*model);
      const auto engine = start(model.ptr(), with, communicator).engine;
      if (!from.empty()) engine->load_checkpoint(dir, from);
      engine->save_checkpoint(dir, to);
    });
  };
  go(carried_config(3, 2), "", "exact");
  go(config, "exact", "rounded");
  go(config, "rounded", "again");
  go(carried_config(3, 2), "again", "plain");
  const auto frozen = [&](const std::string& tag) {
    return checkpoint::open_folder(dir + "/" + tag)->tensor("weights/frozen");
  };
  EXPECT_FALSE(torch::equal(frozen("exact"), frozen("rounded")));
  EXPECT_TRUE(torch::allclose(frozen("exact"), frozen("rounded"), 0.0, 0.01));
  EXPECT_TRUE(torch::allclose(frozen("rounded"), frozen("again"), 1e-6, 1e-7));
  EXPECT_TRUE(torch::equal(frozen("again"), frozen("plain")));
}

// The slices that ranks of a node keep of frozen parameters are of the values before.
TEST(CheckpointFrozen, SecondarySlicesFollow) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  ordered_json config = carried_config(3, 4);
  config["zero_optimization"]["zero_hpz_partition_size"] = 2;
  std::map<int, double> losses;
  run_ranks(4, [&](comm::Communicator& communicator) {
    CarriedNet model;
    const auto engine = start(model.ptr(), config, communicator).engine;
    engine->save_checkpoint(dir, "saved");
    const double loss = model->loss(rows_of(0, communicator.rank(), 4)).item<double>();
    if (communicator.rank() == 0) losses[0] = loss;
  });
  run_ranks(4, [&](comm::Communicator& communicator) {
    CarriedNet model;
    forget(*model);
    const auto engine = start(model.ptr(), config, communicator).engine;
    engine->backward(model->loss(rows_of(0, communicator.rank(), 4)));
    engine->step();
    engine->load_checkpoint(dir, "saved");
    const double loss = model->loss(rows_of(0, communicator.rank(), 4)).item<double>();
    if (communicator.rank() == 0) losses[1] = loss;
  });
  EXPECT_EQ(losses[0], losses[1]);
}

TEST(CheckpointFrozen, MayBeLeftOut) {
  for (const int stage : {1, 3}) {
    const test::ScratchFolder folder;
    const std::string dir = folder.path().string();
    run_ranks(2, [&](comm::Communicator& communicator) {
      CarriedNet model;
      const auto engine = start(model.ptr(), carried_config(stage, 2), communicator).engine;
      engine->save_checkpoint(dir, "tag", {.exclude_frozen_parameters = true});
      EXPECT_THAT([&] { engine->load_checkpoint(dir, "tag"); },
                  ThrowsMessage<UsageError>(AllOf(HasSubstr("weights/frozen"), HasSubstr("load_module_strict"))));
      EXPECT_TRUE(engine->load_checkpoint(dir, "tag", {.load_module_strict = false}));
      const State weights = copy_of(engine->fp32_state_dict());
      CarriedNet fresh;
      EXPECT_TRUE(torch::equal(weights.at("frozen"), fresh->frozen));
    });
    EXPECT_FALSE(checkpoint::open_folder(dir + "/tag")->contains("weights/frozen"));
  }
}

struct HollowNet : SmallNetImpl {
  HollowNet() {
    register_parameter("none", torch::empty({0, 3}));
    register_parameter("frozen_none", torch::empty({2, 0}), /*requires_grad=*/false);
    register_buffer("empty_buffer", torch::empty({0}));
  }
};

TEST(CheckpointFrozen, ParametersWithoutElements) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  for (const int stage : {0, 2, 3}) {
    run_ranks(2, [&](comm::Communicator& communicator) {
      const auto model = std::make_shared<HollowNet>();
      const auto engine = start(model, small_config(stage, 1), communicator).engine;
      engine->save_checkpoint(dir, cat("stage", stage));
    });
  }
  for (const int stage : {0, 2, 3}) {
    for (const int from : {0, 2, 3}) {
      run_ranks(1, [&](comm::Communicator& communicator) {
        const auto model = std::make_shared<HollowNet>();
        const auto engine = start(model, small_config(stage, 1), communicator).engine;
        EXPECT_TRUE(engine->load_checkpoint(dir, cat("stage", from)));
      });
    }
  }
}

// --- optimizers ------------------------------------------------------------------------------------------------------

ordered_json with_optimizer(int stage, const std::string& type) {
  ordered_json config = small_config(stage, 1);
  config["optimizer"] = {{"type", type}, {"params", {{"lr", 0.01}}}};
  config["zero_allow_untested_optimizer"] = true;
  if (type == "SGD") config["optimizer"]["params"]["momentum"] = 0.9;
  return config;
}

class CheckpointOptimizer : public ::testing::TestWithParam<const char*> {};

INSTANTIATE_TEST_SUITE_P(Types, CheckpointOptimizer,
                         ::testing::Values("Adam", "AdamW", "SGD", "Lion", "Adagrad", "Lamb", "Muon"),
                         [](const auto& type) { return std::string(type.param); });

TEST_P(CheckpointOptimizer, GoesOnAlsoInAnotherLayout) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  State end;
  const auto steps = [](Engine& engine, SmallNet& model, int64_t first, int64_t last) {
    for (int64_t step = first; step < last; ++step) {
      engine.backward(model->loss(sample(step, engine.global_rank())));
      engine.step();
    }
    return copy_of(engine.fp32_state_dict());
  };
  run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), with_optimizer(1, GetParam()), communicator).engine;
    steps(*engine, model, 0, 3);
    engine->save_checkpoint(dir, "tag");
    const State own = steps(*engine, model, 3, 6);
    if (communicator.rank() == 0) end = own;
  });
  for (const int stage : {1, 2, 3}) {
    run_ranks(2, [&](comm::Communicator& communicator) {
      SmallNet model;
      forget(*model);
      const auto engine = start(model.ptr(), with_optimizer(stage, GetParam()), communicator).engine;
      engine->load_checkpoint(dir, "tag");
      const State own = steps(*engine, model, 3, 6);
      const double difference = largest_difference(own, end);
      if (stage == 1) EXPECT_EQ(difference, 0.0);
      EXPECT_LT(difference, 1e-4) << stage;
    });
  }
  run_ranks(3, [&](comm::Communicator& communicator) {
    SmallNet model;
    forget(*model);
    const auto engine = start(model.ptr(), with_optimizer(3, GetParam()), communicator).engine;
    engine->load_checkpoint(dir, "tag");
    engine->save_checkpoint(dir, "again");
  });
  expect_same_state(dir + "/tag", dir + "/again");
}

// Before anything is changed.
TEST(CheckpointOptimizers, OneThatKeepsOtherStatesIsAnError) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  const std::vector<std::string> types = {"AdamW", "SGD", "Lion", "Adagrad", "Muon"};
  for (const std::string& type : types) {
    run_ranks(1, [&](comm::Communicator& communicator) {
      SmallNet model;
      const auto engine = start(model.ptr(), with_optimizer(1, type), communicator).engine;
      train(*engine, model, 2);
      engine->save_checkpoint(dir, type);
    });
  }
  for (const std::string& type : types) {
    for (const std::string& other : types) {
      if (type == other) continue;
      SCOPED_TRACE(other + " -> " + type);
      run_ranks(2, [&](comm::Communicator& communicator) {
        SmallNet model;
        const auto engine = start(model.ptr(), with_optimizer(2, type), communicator).engine;
        const State before = copy_of(engine->fp32_state_dict());
        EXPECT_THAT([&] { engine->load_checkpoint(dir, other); },
                    ThrowsMessage<UsageError>(
                        AllOf(HasSubstr(other), HasSubstr(type), HasSubstr("load_optimizer_states = false"))));
        EXPECT_EQ(largest_difference(copy_of(engine->fp32_state_dict()), before), 0.0);
        EXPECT_EQ(engine->global_steps(), 0);
        train(*engine, model, 1);
        EXPECT_TRUE(engine->load_checkpoint(dir, other, {.load_optimizer_states = false}));
        EXPECT_EQ(engine->global_steps(), 2);
        train(*engine, model, 1);
      });
    }
  }
}

// Adam's states mean the same to Lamb; the program may want that.
TEST(CheckpointOptimizers, OneThatKeepsTheSameStatesIsSaid) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  run_ranks(1, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), with_optimizer(1, "AdamW"), communicator).engine;
    train(*engine, model, 2);
    engine->save_checkpoint(dir, "tag");
    SmallNet other;
    const auto loaded = start(other.ptr(), with_optimizer(1, "Lamb"), communicator).engine;
    testing::internal::CaptureStderr();
    testing::internal::CaptureStdout();
    loaded->load_checkpoint(dir, "tag");
    EXPECT_THAT(testing::internal::GetCapturedStdout() + testing::internal::GetCapturedStderr(),
                AllOf(HasSubstr("written by AdamW"), HasSubstr("goes on with Lamb")));
  });
}

TEST(CheckpointOptimizers, OneOfTheProgram) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  const auto make = [](SmallNet& model, comm::Communicator& communicator, bool adam) {
    std::shared_ptr<torch::optim::Optimizer> optimizer;
    if (adam) optimizer = std::make_shared<torch::optim::AdamW>(model->parameters(), torch::optim::AdamWOptions(0.03));
    if (!adam) optimizer = std::make_shared<torch::optim::SGD>(model->parameters(), torch::optim::SGDOptions(0.1));
    ordered_json config = small_config(0, 1);
    config.erase("optimizer");
    return initialize(
        {.model = model.ptr(), .config = config, .optimizer = optimizer, .communicator = borrowed(communicator)});
  };
  State end;
  run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = make(model, communicator, true).engine;
    train(*engine, model, 3);
    engine->save_checkpoint(dir, "client");
    const State own = train(*engine, model, 3);
    if (communicator.rank() == 0) end = own;
    SmallNet other;
    const auto configured = start(other.ptr(), small_config(0, 1), communicator).engine;
    configured->save_checkpoint(dir, "configured");
  });
  for (const int world : {2, 1}) {
    run_ranks(world, [&](comm::Communicator& communicator) {
      SmallNet model;
      forget(*model);
      const auto engine = make(model, communicator, true).engine;
      engine->load_checkpoint(dir, "client");
      if (world == 2) EXPECT_EQ(largest_difference(train(*engine, model, 3), end), 0.0);
      // The configured one has no such state, and the other way round.
      const State before = copy_of(engine->fp32_state_dict());
      EXPECT_THAT([&] { engine->load_checkpoint(dir, "configured"); },
                  ThrowsMessage<UsageError>(HasSubstr("client optimizer")));
      EXPECT_EQ(largest_difference(copy_of(engine->fp32_state_dict()), before), 0.0);
      train(*engine, model, 1);
      SmallNet other;
      const auto configured = start(other.ptr(), small_config(0, 1), communicator).engine;
      EXPECT_THAT([&] { configured->load_checkpoint(dir, "client"); },
                  ThrowsMessage<UsageError>(HasSubstr("load_optimizer_states = false")));
      train(*configured, other, 1);
    });
  }
}

TEST(CheckpointOptimizers, ParameterGroups) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  const auto grouped = [](SmallNet& model, comm::Communicator& communicator, bool groups, double lr) {
    ordered_json config = small_config(2, 1);
    config["optimizer"]["params"]["lr"] = lr;
    InitializeOptions options{.model = model.ptr(), .config = config, .communicator = borrowed(communicator)};
    if (groups) options.parameter_groups = {{.parameters = {"*bias"}, .lr = 0.001, .weight_decay = 0.0}};
    return initialize(options);
  };
  run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto parts = grouped(model, communicator, true, 0.02);
    parts.optimizer->groups()[1].lr = 0.0005;  // by the program
    train(*parts.engine, model, 2);
    parts.engine->save_checkpoint(dir, "tag");
  });
  run_ranks(1, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = grouped(model, communicator, true, 0.7).engine;
    engine->load_checkpoint(dir, "tag");
    EXPECT_EQ(engine->get_lr(), (std::vector<double>{0.02, 0.0005}));
    SmallNet other;
    const auto without = grouped(other, communicator, false, 0.7).engine;
    without->load_checkpoint(dir, "tag");
    EXPECT_EQ(without->get_lr(), std::vector<double>{0.7});  // other groups: its own
    EXPECT_EQ(largest_difference(copy_of(without->fp32_state_dict()), copy_of(engine->fp32_state_dict())), 0.0);
  });
}

// --- schedule, data, generators, buffers -----------------------------------------------------------------------------

TEST(CheckpointSchedule, ComesBackOrBeginsAgain) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  run_ranks(1, [&](comm::Communicator& communicator) {
    CarriedNet model;
    const auto engine = start(model.ptr(), carried_config(1, 1), communicator).engine;
    std::vector<double> rates;
    for (int step = 0; step < 6; ++step) {
      one_step(*engine, model);
      rates.push_back(engine->get_lr()[0]);
      if (step == 2) engine->save_checkpoint(dir, "tag");
    }
    engine->load_checkpoint(dir, "tag");
    EXPECT_EQ(engine->get_lr()[0], rates[2]);
    one_step(*engine, model);
    EXPECT_EQ(engine->get_lr()[0], rates[3]);

    CarriedNet other;
    const auto fresh = start(other.ptr(), carried_config(1, 1), communicator).engine;
    const double first = fresh->get_lr()[0];
    fresh->load_checkpoint(dir, "tag", {.load_lr_scheduler_states = false});
    EXPECT_EQ(fresh->global_steps(), 3);
    EXPECT_EQ(fresh->lr_scheduler()->last_batch_iteration(), -1);
    EXPECT_EQ(fresh->get_lr()[0], first);
    one_step(*fresh, other);
    EXPECT_EQ(fresh->get_lr()[0], rates[0]);
  });
}

struct Numbers {
  torch::data::Example<> get(size_t index) const {
    return {torch::full({6}, static_cast<double>(index)), torch::zeros({1})};
  }
  size_t size() const { return 60; }
};

// Samples of the next batches, over all ranks, in the order of the global position.
std::vector<int64_t> seen_in(DataLoader& loader, int batches, comm::Communicator& communicator) {
  std::vector<int64_t> all;
  auto next = loader.begin();
  for (int batch = 0; batch < batches; ++batch) {
    if (batch > 0) ++next;
    if (next == loader.end()) next = loader.begin();
    const at::Tensor own = next->data.select(1, 0).to(torch::kLong).contiguous();
    std::vector<at::Tensor> parts;
    for (int rank = 0; rank < communicator.size(); ++rank) {
      at::Tensor part = own.clone();
      if (communicator.size() > 1) communicator.broadcast(part, rank, "samples").wait();
      parts.push_back(part);
    }
    const at::Tensor dealt = torch::stack(parts, 1).view({-1});  // position p goes to rank p mod W
    for (int64_t i = 0; i < dealt.numel(); ++i) all.push_back(dealt[i].item<int64_t>());
  }
  return all;
}

TEST(CheckpointData, GoesOnAtTheSameSample) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  const auto with_data = [](SmallNet& model, comm::Communicator& communicator, int64_t batch) {
    ordered_json config = small_config(1, 1);
    config["train_micro_batch_size_per_gpu"] = batch;
    return initialize(
        {.model = model.ptr(), .config = config, .training_data = Numbers{}, .communicator = borrowed(communicator)});
  };
  std::vector<int64_t> wanted;
  run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto parts = with_data(model, communicator, 3);
    seen_in(*parts.loader, 14, communicator);  // 84: in the second epoch
    parts.engine->save_checkpoint(dir, "tag");
    const std::vector<int64_t> own = seen_in(*parts.loader, 6, communicator);
    if (communicator.rank() == 0) wanted = own;
  });
  EXPECT_EQ(wanted.size(), 36U);
  EXPECT_EQ(std::set<int64_t>(wanted.begin(), wanted.end()).size(), 36U);  // the rest of the epoch
  for (const auto& [world, batch] : std::vector<std::pair<int, int64_t>>{{2, 3}, {1, 6}, {3, 2}, {1, 4}, {4, 3}}) {
    run_ranks(world, [&, world = world, batch = batch](comm::Communicator& communicator) {
      SmallNet model;
      const auto parts = with_data(model, communicator, batch);
      parts.engine->load_checkpoint(dir, "tag");
      EXPECT_EQ(parts.loader->epoch(), 1);
      const auto own = seen_in(*parts.loader, static_cast<int>(36 / (world * batch)), communicator);
      EXPECT_EQ(own, wanted) << world << " ranks, batches of " << batch;
    });
  }
}

// Not torch::manual_seed(), whose inline code ThreadSanitizer would then see and LibTorch's half of it not.
void seed_generator(uint64_t seed) {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  generator.set_current_seed(seed);
}

struct DropoutNet : SmallNetImpl {
  at::Tensor noisy_loss(const at::Tensor& x) { return loss(torch::dropout(x, 0.5, /*train=*/true)); }
};

TEST(CheckpointGenerators, DropoutGoesOnBitExactly) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  run_ranks(1, [&](comm::Communicator& communicator) {
    const auto steps = [](Engine& engine, DropoutNet& model) {
      for (int64_t step = 0; step < 3; ++step) {
        engine.backward(model.noisy_loss(sample(step, 0)));
        engine.step();
      }
      return copy_of(engine.fp32_state_dict());
    };
    seed_generator(5);
    const auto model = std::make_shared<DropoutNet>();
    const auto engine = start(model, small_config(1, 1), communicator).engine;
    steps(*engine, *model);
    engine->save_checkpoint(dir, "tag");
    const State end = steps(*engine, *model);
    for (const bool module_only : {false, true}) {
      seed_generator(99);
      const auto other = std::make_shared<DropoutNet>();
      const auto loaded = start(other, small_config(1, 1), communicator).engine;
      const at::Tensor generator = at::detail::getDefaultCPUGenerator().get_state();
      loaded->load_checkpoint(dir, "tag", {.load_module_only = module_only});
      EXPECT_EQ(torch::equal(generator, at::detail::getDefaultCPUGenerator().get_state()), module_only);
      EXPECT_EQ(largest_difference(steps(*loaded, *other), end) == 0.0, !module_only);
    }
  });
}

TEST(CheckpointBuffers, OwnOnesComeBackToTheSameNumberOfRanks) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  const auto with_buffers = [](int64_t value) {
    SmallNet model;
    model->register_buffer("own", torch::full({2}, value, torch::kLong));
    model->register_buffer("common", torch::full({}, 7.5, torch::kDouble));
    model->register_module("norm2",
                           torch::nn::BatchNorm1d(torch::nn::BatchNorm1dOptions(2).track_running_stats(false)));
    return model;
  };
  run_ranks(3, [&](comm::Communicator& communicator) {
    SmallNet model = with_buffers(0);
    const auto engine = start(model.ptr(), small_config(1, 1), communicator).engine;
    model->named_buffers()["own"].fill_(communicator.rank() == 1 ? 100 : 5);
    engine->save_checkpoint(dir, "tag");
  });
  const auto source = checkpoint::open_folder(dir + "/tag");
  EXPECT_TRUE(source->contains("ranks/1/buffers/own"));
  EXPECT_FALSE(source->contains("ranks/2/buffers/own"));
  EXPECT_FALSE(source->contains("ranks/1/buffers/common"));
  for (const int world : {3, 2}) {
    run_ranks(world, [&](comm::Communicator& communicator) {
      SmallNet model = with_buffers(-1);
      const auto engine = start(model.ptr(), small_config(2, 1), communicator).engine;
      engine->load_checkpoint(dir, "tag");
      EXPECT_EQ(model->named_buffers()["own"][0].item<int64_t>(), communicator.rank() == 1 && world == 3 ? 100 : 5);
      EXPECT_EQ(model->named_buffers()["common"].item<double>(), 7.5);
    });
  }
}

// --- options ---------------------------------------------------------------------------------------------------------

TEST(CheckpointOptions, TheModuleAlone) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  for (const int stage : {1, 3}) {
    run_ranks(2, [&](comm::Communicator& communicator) {
      CarriedNet model;
      const auto engine = start(model.ptr(), carried_config(stage, 2), communicator).engine;
      train_until(*engine, model, 4);
      const State saved = copy_of(engine->fp32_state_dict());
      engine->save_checkpoint(dir, "tag", {.client_state = {{"k", 1}}});
      CarriedNet other;
      forget(*other);
      const auto fresh = start(other.ptr(), carried_config(stage, 2), communicator).engine;
      one_step(*fresh, other);
      const double lr = fresh->get_lr()[0];
      const LoadedCheckpoint loaded = fresh->load_checkpoint(dir, "tag", {.load_module_only = true});
      EXPECT_EQ(loaded.client_state.at("k"), 1);
      EXPECT_EQ(fresh->global_steps(), 1);
      EXPECT_EQ(fresh->get_lr()[0], lr);
      EXPECT_EQ(fresh->optimizer()->step_count(), 1);
      EXPECT_EQ(largest_difference(copy_of(fresh->fp32_state_dict()), saved), 0.0);
      EXPECT_EQ(other->seen[0].item<double>(), 4.0);
      // The weights that operators see.
      EXPECT_EQ(other->loss(rows_of(0, 0, 2)).item<double>(), model->loss(rows_of(0, 0, 2)).item<double>());
    });
  }
}

TEST(CheckpointOptions, FreshOptimizerStates) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(1, 1), communicator).engine;
    train(*engine, model, 4);
    engine->save_checkpoint(dir, "tag");
    SmallNet other;
    const auto fresh = start(other.ptr(), small_config(2, 1), communicator).engine;
    fresh->load_checkpoint(dir, "tag", {.load_optimizer_states = false});
    EXPECT_EQ(fresh->optimizer()->step_count(), 0);
    EXPECT_EQ(fresh->global_steps(), 4);
    for (int64_t slice = 0; slice < fresh->optimizer()->slice_count(); ++slice) {
      for (const auto& [name, state] : fresh->optimizer()->states(slice)) {
        EXPECT_EQ(state.abs().sum().item<double>(), 0.0) << name;
      }
    }
    EXPECT_EQ(largest_difference(copy_of(fresh->fp32_state_dict()), copy_of(engine->fp32_state_dict())), 0.0);
  });
}

struct OtherNet : SmallNetImpl {
  explicit OtherNet(const std::string& change) {
    if (change == "renamed") {
      register_parameter("renamed", torch::ones({11}));
    } else if (change == "reshaped") {
      extra = register_parameter("extra", torch::ones({3, 4}));
    } else {
      extra = register_parameter("extra", torch::ones({4, 3}), /*requires_grad=*/change != "frozen");
    }
  }
  at::Tensor extra;
};

TEST(CheckpointOptions, ModelsThatDiffer) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  run_ranks(1, [&](comm::Communicator& communicator) {
    const auto model = std::make_shared<OtherNet>("");
    start(model, small_config(1, 1), communicator).engine->save_checkpoint(dir, "tag");
  });
  for (const int stage : {0, 1, 3}) {
    run_ranks(2, [&](comm::Communicator& communicator) {
      const auto loads = [&](const std::shared_ptr<torch::nn::Module>& model, const LoadOptions& options) {
        const auto engine = start(model, small_config(stage, 1), communicator).engine;
        const State before = copy_of(engine->fp32_state_dict());
        std::string message;
        try {
          engine->load_checkpoint(dir, "tag", options);
        } catch (const UsageError& error) {
          message = error.what();
          EXPECT_EQ(largest_difference(copy_of(engine->fp32_state_dict()), before), 0.0);
        }
        return message;
      };
      EXPECT_EQ(loads(std::make_shared<OtherNet>(""), {}), "");
      EXPECT_THAT(loads(std::make_shared<OtherNet>("renamed"), {}),
                  AllOf(HasSubstr("weights/renamed"), HasSubstr("weights/extra"), HasSubstr("load_module_strict")));
      EXPECT_THAT(loads(SmallNet().ptr(), {}), AllOf(HasSubstr("weights/extra"), HasSubstr("does not have")));
      EXPECT_EQ(loads(SmallNet().ptr(), {.load_module_strict = false}), "");
      EXPECT_EQ(loads(std::make_shared<OtherNet>("renamed"), {.load_module_strict = false}), "");
      EXPECT_THAT(loads(std::make_shared<OtherNet>("reshaped"), {.load_module_strict = false}),
                  AllOf(HasSubstr("weights/extra"), HasSubstr("[3, 4]"), HasSubstr("[4, 3]")));
      EXPECT_EQ(loads(std::make_shared<OtherNet>("frozen"), {}), "");  // its states are left
    });
  }
}

// A parameter that was not trained has no states to go on with.
TEST(CheckpointOptions, FrozenThereAndTrainedHere) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  run_ranks(2, [&](comm::Communicator& communicator) {
    start(std::make_shared<OtherNet>("frozen"), small_config(1, 1), communicator).engine->save_checkpoint(dir, "tag");
    const auto engine = start(std::make_shared<OtherNet>(""), small_config(1, 1), communicator).engine;
    EXPECT_THAT([&] { engine->load_checkpoint(dir, "tag"); },
                ThrowsMessage<UsageError>(AllOf(HasSubstr("extra"), HasSubstr("load_optimizer_states = false"))));
    EXPECT_TRUE(engine->load_checkpoint(dir, "tag", {.load_optimizer_states = false}));
  });
}

struct TiedPair : torch::nn::Module {
  explicit TiedPair(bool tie) {
    first = register_module("one", std::make_shared<torch::nn::Module>())
                ->register_parameter("weight", torch::zeros({6, 6}));
    second = register_module("two", std::make_shared<torch::nn::Module>())
                 ->register_parameter("weight", tie ? first : torch::zeros({6, 6}));
    fill(*this);
  }
  at::Tensor loss(const at::Tensor& x) {
    return torch::matmul(torch::tanh(torch::matmul(x, first)), second).pow(2).mean();
  }
  at::Tensor first, second;
};

TEST(CheckpointOptions, TiedThereAndNotHere) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  for (const int stage : {1, 3}) {
    run_ranks(2, [&](comm::Communicator& communicator) {
      const auto tied = std::make_shared<TiedPair>(true);
      const auto engine = start(tied, small_config(stage, 1), communicator).engine;
      engine->backward(tied->loss(sample(0, communicator.rank())));
      engine->step();
      engine->save_checkpoint(dir, "tied");
      const auto loose = std::make_shared<TiedPair>(false);
      const auto other = start(loose, small_config(stage, 1), communicator).engine;
      other->load_checkpoint(dir, "tied");
      const State weights = copy_of(other->fp32_state_dict());
      EXPECT_TRUE(torch::equal(weights.at("one.weight"), weights.at("two.weight")));
      EXPECT_TRUE(torch::equal(weights.at("one.weight"), copy_of(engine->fp32_state_dict()).at("one.weight")));
      other->backward(loose->loss(sample(1, communicator.rank())));  // now they differ
      other->step();
      other->save_checkpoint(dir, "loose");
      EXPECT_THAT([&] { engine->load_checkpoint(dir, "loose"); },
                  ThrowsMessage<UsageError>(HasSubstr("weights/two.weight")));
      EXPECT_TRUE(engine->load_checkpoint(dir, "loose", {.load_module_strict = false}));
    });
  }
}

// --- calls -----------------------------------------------------------------------------------------------------------

TEST(CheckpointCalls, OutOfPlace) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  for (const int stage : {0, 1, 3}) {
    run_ranks(2, [&](comm::Communicator& communicator) {
      SmallNet model;
      const auto engine = start(model.ptr(), small_config(stage, 2), communicator).engine;
      engine->save_checkpoint(dir, "tag");
      const auto refused = [&](const char* text) {
        EXPECT_THAT([&] { engine->save_checkpoint(dir, "other"); }, ThrowsMessage<UsageError>(HasSubstr(text)));
        EXPECT_THAT([&] { engine->load_checkpoint(dir, "tag"); }, ThrowsMessage<UsageError>(HasSubstr(text)));
      };
      engine->backward(model->loss(sample(0, communicator.rank())));
      refused("accumulation");
      engine->step();
      refused("1 of 2");
      engine->backward(model->loss(sample(1, communicator.rank())));
      engine->step();
      {
        const auto whole = engine->gathered_parameters({model->first->weight});
        refused("gathered_parameters");
      }
      engine->offload_states();
      refused("reload_states");
      engine->reload_states();
      engine->save_checkpoint(dir, "other");
      engine->load_checkpoint(dir, "tag");
      EXPECT_EQ(engine->global_steps(), 0);
      EXPECT_EQ(train(*engine, model, 1).size(), 6U);
    });
    EXPECT_EQ(checkpoint::verify(dir + "/other").size(), 0U);
  }
}

TEST(CheckpointCalls, WhatHasNoPlaceInAFile) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(1, 1), communicator).engine;
    EXPECT_ANY_THROW(engine->save_checkpoint(dir, "tag", {.client_state = {{"text", "\xff\xfe"}}}));
    EXPECT_ANY_THROW(engine->save_checkpoint(dir, "a/b"));
    EXPECT_ANY_THROW(engine->save_checkpoint(dir, ".."));
    EXPECT_ANY_THROW(engine->save_checkpoint(dir, "latest"));
    model->register_buffer("complex", torch::zeros({2}, torch::kComplexFloat));
    EXPECT_ANY_THROW(engine->save_checkpoint(dir, "tag"));
    EXPECT_FALSE(engine->load_checkpoint(dir));
    train(*engine, model, 1);
  });
  EXPECT_TRUE(!std::filesystem::exists(dir) || std::filesystem::is_empty(dir));
}

TEST(CheckpointCalls, TagsThatDiffer) {
  for (const char* mode : {"Ignore", "Warn", "Fail"}) {
    const test::ScratchFolder folder;
    const std::string dir = folder.path().string();
    run_ranks(3, [&](comm::Communicator& communicator) {
      SmallNet model;
      ordered_json config = small_config(1, 1);
      config["checkpoint"] = {{"tag_validation", mode}};
      const auto engine = start(model.ptr(), config, communicator).engine;
      const auto save = [&] { return engine->save_checkpoint(dir, cat("tag", communicator.rank() / 2)); };
      if (mode == std::string("Fail")) {
        EXPECT_THAT(save, ThrowsMessage<ConfigError>(HasSubstr("tag_validation")));
        EXPECT_TRUE(engine->save_checkpoint(dir, "tag0").ends_with("tag0"));
      } else {
        EXPECT_TRUE(save().ends_with("tag0"));
      }
    });
    EXPECT_EQ(checkpoint::verify(dir + "/tag0").size(), 0U);
    EXPECT_FALSE(std::filesystem::exists(dir + "/tag1"));
  }
}

TEST(CheckpointCalls, KeepLastAndLatest) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    ordered_json config = small_config(2, 1);
    config["checkpoint"] = {{"keep_last", 2}};
    const auto engine = start(model.ptr(), config, communicator).engine;
    for (int step = 0; step < 4; ++step) {
      train(*engine, model, 1);
      EXPECT_EQ(engine->save_checkpoint(dir), dir + cat("/global_step", step + 1));
    }
    EXPECT_FALSE(std::filesystem::exists(dir + "/global_step2"));
    EXPECT_TRUE(std::filesystem::exists(dir + "/global_step3"));
    communicator.barrier();
    train(*engine, model, 1);
    engine->save_checkpoint(dir, "side", {.save_latest = false, .keep_last = 0});
    EXPECT_TRUE(std::filesystem::exists(dir + "/global_step3"));
    const LoadedCheckpoint loaded = engine->load_checkpoint(dir);
    EXPECT_EQ(loaded.tag, "global_step4");
    EXPECT_EQ(loaded.path, dir + "/global_step4");
    EXPECT_EQ(engine->global_steps(), 4);
  });
}

}  // namespace
}  // namespace ds::engine
