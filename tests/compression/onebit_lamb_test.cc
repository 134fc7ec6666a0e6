// OneBitLamb's trust coefficients: of a parameter that nothing uses, and in checkpoints of other layouts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/export.h"
#include "checkpoint/folder_source.h"
#include "compression/compressed_factory.h"
#include "tests/checkpoint/source/memory_source.h"
#include "tests/model/checkpoint/checkpoint_run.h"
#include "tests/pipeline/layered_model.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"
#include "zero/slice_exchange.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using test::run_ranks;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kLambFreeze = 5;
constexpr int64_t kLambSteps = 9;
constexpr int64_t kUsed = 48;
constexpr int64_t kUnused = 16;

struct LambEnd {
  at::Tensor weights;
  std::map<std::string, double> values;  // shared states
};

// A parameter of 48 elements and, behind it, one of 16 zeros without gradients.
LambEnd train_beside_zeros(comm::Communicator& ranks, bool with_zeros, bool deepspeed_semantics) {
  optimizers::OptimizerOptions options;
  options.type = "OneBitLamb";
  options.groups = {{.lr = 0.01, .weight_decay = 0.1, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-6}};
  options.values.freeze_step = kLambFreeze;
  options.values.deepspeed_semantics = deepspeed_semantics;
  const auto optimizer = compression::make_compressed_optimizer(options, ranks);
  const int64_t numel = with_zeros ? kUsed + kUnused : kUsed;
  std::vector<ParameterInfo> infos = {{"used", {kUsed}, kUsed}};
  std::vector<Segment> segments = {{0, 0, 0, kUsed}};
  if (with_zeros) {
    infos.push_back({"unused", {kUnused}, kUnused});
    segments.push_back({1, 0, kUsed, kUnused});
  }
  const at::Tensor master = torch::zeros({numel});
  master.narrow(0, 0, kUsed).copy_(torch::sin(torch::arange(kUsed) * 0.7) * 0.4);
  optimizer->add_slice({.master = master,
                        .segments = segments,
                        .bucket_segments = segments,
                        .parameters = &infos,
                        .exchange = zero::make_whole_exchange()});
  for (int64_t step = 1; step <= 4 * kLambFreeze; ++step) {
    at::Tensor gradient = torch::zeros({numel});
    const double phase = 0.61 * static_cast<double>(step) + (optimizer->wants_local_gradients() ? ranks.rank() : 0);
    gradient.narrow(0, 0, kUsed).copy_(torch::sin(torch::arange(kUsed) * 0.37 + phase) * 0.1);
    optimizer->begin_step();
    optimizer->update(0, gradient, 1.0);
  }
  LambEnd end{.weights = master, .values = {}};
  for (const auto& [name, value] : optimizer->shared_states()) end.values[name] = value.item<double>();
  return end;
}

// DeepSpeed's min(1.0, 0 / 0) is 1.0 in Python: the coefficient of such a parameter has factor 1.
TEST(OneBitLamb, AParameterOfZerosThatNothingUsesStaysAsItIs) {
  for (const bool deepspeed_semantics : {false, true}) {
    for (const int world : {1, 2}) {
      run_ranks(world, [&](comm::Communicator& ranks) {
        const LambEnd end = train_beside_zeros(ranks, true, deepspeed_semantics);
        EXPECT_TRUE(end.weights.isfinite().all().item<bool>());
        EXPECT_TRUE(torch::equal(end.weights.narrow(0, kUsed, kUnused), torch::zeros({kUnused})));
        EXPECT_EQ(end.values.at("lamb_factor/unused"), 1.0);
        EXPECT_EQ(end.values.at("lamb_coefficient/unused"), 0.0);
        EXPECT_GT(end.values.at("lamb_coefficient/used"), 0.0);
        EXPECT_NE(end.values.at("lamb_factor/used"), 1.0);
        if (world > 1) return;  // alone, nothing is compressed
        const LambEnd without = train_beside_zeros(ranks, false, deepspeed_semantics);
        EXPECT_TRUE(torch::equal(end.weights.narrow(0, 0, kUsed), without.weights));
      });
    }
  }
}

void use_lamb(ordered_json& config) {
  config["optimizer"] = {{"type", "OneBitLamb"},
                         {"params", {{"lr", 0.01}, {"weight_decay", 0.1}, {"freeze_step", kLambFreeze}}}};
}

// Weights and states of two checkpoints, the coefficients among them.
void expect_same_coefficients(const std::string& one, const std::string& other) {
  expect_same_state(one, other);
  const auto source = checkpoint::open_folder(one);
  int coefficients = 0;
  for (const auto& [path, info] : source->tensors()) {
    if (!path.starts_with("optimizer/lamb_")) continue;
    ++coefficients;
    EXPECT_NE(source->tensor(path).item<double>(), path.starts_with("optimizer/lamb_factor") ? 1.0 : 0.0) << path;
  }
  EXPECT_GT(coefficients, 4);
}

struct PipelineLayout {
  int stages;
  int data_ranks;
};

// Trains until `steps` are done, after what `from` has, and saves.
void run_pipeline(const PipelineLayout& layout, const std::string& dir, const std::string& from, const std::string& to,
                  int64_t steps) {
  nlohmann::ordered_json config = {{"train_micro_batch_size_per_gpu", 2},
                                   {"gradient_accumulation_steps", 4},
                                   {"log_level", "error"},
                                   {"zero_optimization", {{"stage", 1}}},
                                   {"pipeline", {{"stages", layout.stages}, {"schedule", "1f1b"}}}};
  use_lamb(config);
  run_ranks(layout.stages * layout.data_ranks, [&](comm::Communicator& world) {
    const auto model = std::make_shared<pipeline::PipelineModule>(
        pipeline::layers_of(3, /*tied=*/true), pipeline::PipelineOptions{.loss = pipeline::cross_entropy});
    const auto engine = start(model, config, world).engine;
    if (!from.empty()) engine->load_checkpoint(dir, from);
    while (engine->global_steps() < steps) {
      int64_t next = engine->global_steps() * engine->gradient_accumulation_steps();
      engine->train_batch([&] { return pipeline::tokens_of(next++, engine->communicator().rank()); });
    }
    engine->save_checkpoint(dir, to);
  });
}

TEST(OneBitLambCheckpoint, StagesAndRanksOfAPipelineTakeTheirCoefficientsFromAnyOther) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  run_pipeline({2, 2}, dir, "", "saved", kLambSteps);
  const std::vector<PipelineLayout> others = {{1, 1}, {2, 1}, {1, 2}, {3, 1}, {2, 2}};
  std::string last = "saved";
  for (const PipelineLayout& other : others) {
    const std::string tag = cat("stages", other.stages, "_ranks", other.data_ranks);
    SCOPED_TRACE(tag);
    run_pipeline(other, dir, last, tag, kLambSteps);
    expect_same_coefficients(dir + "/saved", dir + "/" + tag);
    last = tag;
  }
  run_pipeline({1, 1}, dir, last, "on", kLambSteps + 3);  // it goes on
  EXPECT_EQ(checkpoint::open_folder(dir + "/on")->state().global_steps, kLambSteps + 3);
}

// Of CarriedNet on `world` ranks.
void run_carried(int world, const std::string& dir, const std::string& from, const std::string& to) {
  ordered_json config = carried_config(1, world);
  use_lamb(config);
  run_ranks(world, [&](comm::Communicator& communicator) {
    CarriedNet model;
    const auto engine = start(model.ptr(), config, communicator).engine;
    if (!from.empty()) engine->load_checkpoint(dir, from);
    train_until(*engine, model, kLambSteps);
    engine->save_checkpoint(dir, to);
  });
}

TEST(OneBitLambCheckpoint, AnotherNumberOfRanksKeepsTheCoefficients) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  run_carried(2, dir, "", "saved");
  run_carried(1, dir, "saved", "one");
  run_carried(3, dir, "one", "three");
  expect_same_coefficients(dir + "/saved", dir + "/one");
  expect_same_coefficients(dir + "/saved", dir + "/three");
}

// As checkpoints were before: an array for each part of the model, in the order of its parameters.
void save_by_rank(const std::string& from, const std::string& to, int first_of_part,
                  const std::vector<std::string>& parameters) {
  const auto source = checkpoint::open_folder(from);
  checkpoint::MemorySource old;
  for (const auto& [path, info] : source->tensors()) {
    if (!path.starts_with("optimizer/lamb_")) old.add(path, source->tensor(path), info.frozen);
  }
  for (const auto& [name, stored] : source->aliases()) old.add_alias(name, stored);
  for (const std::string state : {"lamb_coefficient", "lamb_factor"}) {
    std::vector<at::Tensor> values;
    for (const std::string& name : parameters) values.push_back(source->tensor(checkpoint::state_path(state, name)));
    old.add(checkpoint::rank_path(first_of_part, "optimizer." + state), torch::cat(values));
  }
  old.mutable_state() = source->state();
  checkpoint::rewrite(old, to);
}

TEST(OneBitLambCheckpoint, AnOlderOneLoadsWhereItsPartsOfTheModelAreTheSame) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  run_carried(2, dir, "", "saved");
  std::vector<std::string> names;
  for (const auto& item : CarriedNet()->named_parameters()) {
    if (item.value().requires_grad() && item.key() != "tied.weight") names.push_back(item.key());
  }
  save_by_rank(dir + "/saved", dir + "/old", 0, names);
  run_carried(2, dir, "old", "again");
  expect_same_coefficients(dir + "/saved", dir + "/again");
  run_carried(1, dir, "old", "alone");
  expect_same_coefficients(dir + "/saved", dir + "/alone");
}

TEST(OneBitLambCheckpoint, AnOlderOneOfOtherStagesSaysWhatItHasNot) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  run_pipeline({1, 1}, dir, "", "saved", kLambSteps);
  std::vector<std::string> names;
  const auto saved = checkpoint::open_folder(dir + "/saved");
  for (const auto& [path, info] : saved->tensors()) {
    const std::string name = checkpoint::name_in("optimizer/exp_avg/", path);
    if (!name.empty()) names.push_back(name);
  }
  save_by_rank(dir + "/saved", dir + "/old", 0, names);
  ::testing::internal::CaptureStderr();
  run_ranks(2, [&](comm::Communicator& world) {
    const auto model = std::make_shared<pipeline::PipelineModule>(
        pipeline::layers_of(3, /*tied=*/true), pipeline::PipelineOptions{.loss = pipeline::cross_entropy});
    ordered_json config = {{"train_micro_batch_size_per_gpu", 2},
                           {"gradient_accumulation_steps", 4},
                           {"log_level", "warning"},
                           {"pipeline", {{"stages", 2}}}};
    use_lamb(config);
    start(model, config, world).engine->load_checkpoint(dir, "old");
  });
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              AllOf(HasSubstr("has no \"optimizer/lamb_coefficient/embed.weight\" and"), HasSubstr("OneBitLamb"),
                    HasSubstr("into the 1 ranks and 1 pipeline stages that wrote it")));
}

}  // namespace
}  // namespace ds::engine
