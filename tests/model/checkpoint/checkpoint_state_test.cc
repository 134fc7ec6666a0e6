// A checkpoint through every kind of engine, bit for bit.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "checkpoint/folder_source.h"
#include "tests/model/checkpoint/checkpoint_run.h"
#include "tests/model/offloaded/offload_run.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using test::run_ranks;

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

// Five steps; in float16 the second and third overflow, so that the scale is halved and one step of a window is done.
void train_before_save(Engine& engine, CarriedNet& model) {
  for (int step = 0; step < 5; ++step) {
    one_step(engine, model, engine.dynamic_loss_scale() && (step == 1 || step == 2));
  }
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

}  // namespace
}  // namespace ds::engine
