// Exported models train as eager Python trains them, at every stage, and go back to Python.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/files/safetensors.h"
#include "core/files/stored_zip.h"
#include "dsengine/engine.h"
#include "dsengine/exported_model.h"
#include "dsengine/module_checkpointing.h"
#include "tests/exported/golden_model.h"
#include "tests/support/borrowed.h"
#include "tests/support/grid.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"

namespace ds {
namespace {

using nlohmann::ordered_json;
using test::GoldenModel;
using test::run_ranks;
using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr double kLossTolerance = 1e-6;
constexpr int kSteps = 20;

ordered_json config_of(const GoldenModel& golden, int stage) {
  ordered_json config = {{"train_micro_batch_size_per_gpu", 8},
                         {"gradient_clipping", 0.0},
                         {"seed", 7},
                         {"optimizer", golden.optimizer()},
                         {"zero_optimization", {{"stage", stage}}}};
  if (golden.optimizer().at("type") == "SGD") config["zero_allow_untested_optimizer"] = true;
  if (stage == 3) {
    config["zero_optimization"]["stage3_release_always"] = true;  // as a large model: gathered when it is used
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = true;
  }
  return config;
}

engine::Initialized start(const std::shared_ptr<ExportedModule>& model, const ordered_json& config,
                          comm::Communicator& communicator) {
  return engine::initialize({.model = model, .config = config, .communicator = test::borrowed(communicator)});
}

// Trains on the rank's part of each batch; returns the loss of the whole batch, step by step.
std::vector<double> train(engine::Engine& engine, ExportedModule& model, const GoldenModel& golden, int steps) {
  std::vector<double> losses;
  const auto ranks = static_cast<int>(engine.dp_world_size());
  const int rank = engine.global_rank() % ranks;
  for (int step = 0; step < steps; ++step) {
    const at::Tensor loss = golden.loss(model, step, rank, ranks);
    engine.backward(loss);
    engine.step();
    at::Tensor sum = loss.detach().to(at::kDouble).clone();
    if (ranks > 1) engine.communicator().all_reduce(sum).wait();
    losses.push_back(sum.item<double>() / ranks);
  }
  return losses;
}

void expect_near(const std::vector<double>& found, const std::vector<double>& expected, double tolerance) {
  ASSERT_LE(found.size(), expected.size());
  ASSERT_FALSE(found.empty());
  for (size_t i = 0; i < found.size(); ++i) EXPECT_NEAR(found[i], expected[i], tolerance) << "at " << i;
}

std::map<std::string, at::Tensor> tensors_of(const ExportedModule& model) {
  std::map<std::string, at::Tensor> result;
  for (const auto& item : model.named_parameters()) result[item.key()] = item.value();
  for (const auto& item : model.named_buffers()) result[item.key()] = item.value();
  return result;
}

double norm_of(const at::Tensor& tensor) { return tensor.detach().to(at::kDouble).norm().item<double>(); }

// The bias of an attention's keys has a gradient of rounding alone, which Adam makes as large as any other: 5e-5.
void expect_norms(const std::map<std::string, at::Tensor>& found, const std::map<std::string, double>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (const auto& [name, norm] : expected) {
    ASSERT_TRUE(found.contains(name)) << name;
    EXPECT_NEAR(norm_of(found.at(name)), norm, 1e-4 * (1 + norm)) << name;
  }
}

class GoldenModelsTest : public testing::TestWithParam<std::string> {};

TEST_P(GoldenModelsTest, ForwardAndNamesArePythons) {
  const GoldenModel golden(GetParam());
  const auto model = load_exported(golden.path());
  expect_near(golden.evaluate(*model), golden.eval(), 1e-6);
  const auto tensors = tensors_of(*model);
  const auto norms = golden.norms();
  EXPECT_EQ(tensors.size(), norms.size());
  for (const auto& [name, norm] : norms) EXPECT_TRUE(tensors.contains(name)) << name;
}

TEST_P(GoldenModelsTest, TheFirstGradientsArePythons) {
  const GoldenModel golden(GetParam());
  const auto model = load_exported(golden.path());
  torch::manual_seed(7);
  golden.loss(*model, 0).backward();
  std::map<std::string, at::Tensor> gradients;
  for (const auto& item : model->named_parameters()) gradients[item.key()] = item.value().grad();
  for (const auto& [name, norm] : golden.first_gradients()) {
    ASSERT_TRUE(gradients.contains(name) && gradients.at(name).defined()) << name;
    EXPECT_NEAR(norm_of(gradients.at(name)), norm, 1e-6 * (1 + norm)) << name;
  }
}

// Dropout draws what Python draws; BatchNorm counts and averages as Python's.
TEST_P(GoldenModelsTest, TwentyStepsOfOneRankArePythons) {
  const GoldenModel golden(GetParam());
  run_ranks(1, [&](comm::Communicator& communicator) {
    const auto model = load_exported(golden.path());
    const engine::Initialized parts = start(model, config_of(golden, 0), communicator);
    expect_near(train(*parts.engine, *model, golden, kSteps), golden.losses(), kLossTolerance);
    expect_norms(tensors_of(*model), golden.norms());
    expect_near(golden.evaluate(*model), golden.eval_after(), 1e-5);
  });
}

INSTANTIATE_TEST_SUITE_P(Models, GoldenModelsTest,
                         testing::Values("mlp", "gpt", "lstm", "resnet", "encoder", "vit", "unet", "gru_attention",
                                         "graph", "pinn", "hf_gpt2", "hf_llama"),
                         [](const auto& info) { return info.param; });

// Files of other versions of torch: the same models, initialised alike, so that they train to the same numbers.
class TorchVersionTest : public testing::TestWithParam<std::string> {};

TEST_P(TorchVersionTest, TrainsAsTheFileOfTheTorchThatWeBuildWith) {
  for (const char* name : {"mlp", "gpt"}) {
    SCOPED_TRACE(name);
    const GoldenModel golden(name, cat("torch", GetParam(), "/"));
    run_ranks(1, [&](comm::Communicator& communicator) {
      const auto model = load_exported(golden.path());
      EXPECT_TRUE(model->torch_version().starts_with(GetParam())) << model->torch_version();
      expect_near(golden.evaluate(*model), golden.eval(), 1e-6);
      const engine::Initialized parts = start(model, config_of(golden, 2), communicator);
      expect_near(train(*parts.engine, *model, golden, kSteps), golden.losses(), kLossTolerance);
      expect_norms(tensors_of(*model), golden.norms());
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Versions, TorchVersionTest, testing::Values("2.9", "2.13", "2.15"),
                         [](const auto& info) { return "torch_" + info.param.substr(2); });

// Models without dropout and BatchNorm, whose ranks together compute what one process computes.
class DividedBatchTest : public testing::TestWithParam<std::string> {};

TEST_P(DividedBatchTest, TwoRanksAtEveryStageTrainAsPython) {
  const GoldenModel golden(GetParam());
  for (const int stage : {0, 1, 2, 3}) {
    SCOPED_TRACE(cat("stage ", stage));
    run_ranks(2, [&](comm::Communicator& communicator) {
      const auto model = load_exported(golden.path());
      const engine::Initialized parts = start(model, config_of(golden, stage), communicator);
      expect_near(train(*parts.engine, *model, golden, kSteps), golden.losses(), kLossTolerance);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Models, DividedBatchTest,
                         testing::Values("encoder", "vit", "unet", "gru_attention", "graph", "pinn", "hf_gpt2",
                                         "hf_llama"),
                         [](const auto& info) { return info.param; });

// Each rank has two samples of the batch.
TEST(ExportedTraining, FourRanksAtEveryStageTrainAsPython) {
  const std::vector<std::string> models = {"encoder", "vit",  "unet",    "gru_attention",
                                           "graph",   "pinn", "hf_gpt2", "hf_llama"};
  const int steps = test::whole_grid_wanted() ? kSteps : 8;
  for (const auto& [name, stage] : test::grid_sample(1, models, std::vector<int>{0, 1, 2, 3})) {
    SCOPED_TRACE(cat(name, ", stage ", stage));
    const GoldenModel golden(name);
    run_ranks(4, [&golden, stage = stage, steps](comm::Communicator& communicator) {
      const auto model = load_exported(golden.path());
      const engine::Initialized parts = start(model, config_of(golden, stage), communicator);
      expect_near(train(*parts.engine, *model, golden, steps), golden.losses(), kLossTolerance);
    });
  }
}

TEST(ExportedTraining, RecomputesBlocksByTheirNamesInPython) {
  const GoldenModel golden("hf_llama");
  for (const int stage : {0, 3}) {
    SCOPED_TRACE(cat("stage ", stage));
    run_ranks(2, [&](comm::Communicator& communicator) {
      take_module_checkpoint_statistics();
      const auto model = load_exported(golden.path());
      ordered_json config = config_of(golden, stage);
      config["activation_checkpointing"] = {{"modules", {"model\\.layers\\.\\d+"}}};
      const engine::Initialized parts = start(model, config, communicator);
      expect_near(train(*parts.engine, *model, golden, kSteps), golden.losses(), kLossTolerance);
      const ModuleCheckpointStatistics statistics = take_module_checkpoint_statistics();
      EXPECT_EQ(statistics.regions, 2 * kSteps);
      EXPECT_GT(statistics.dropped_tensors, 0);
    });
  }
}

TEST(ExportedTraining, SplitsLayersOverATensorAxis) {
  const GoldenModel golden("hf_llama");
  run_ranks(2, [&](comm::Communicator& communicator) {
    const auto model = load_exported(golden.path());
    ordered_json config = config_of(golden, 2);
    config["tensor_parallel"] = {{"autotp_size", 2}};
    const engine::Initialized parts = start(model, config, communicator);
    ASSERT_EQ(parts.engine->dp_world_size(), 1);
    expect_near(train(*parts.engine, *model, golden, kSteps), golden.losses(), 2 * kLossTolerance);
    EXPECT_TRUE(parts.engine->joined_operators().empty());
  });
}

TEST(ExportedTraining, Bfloat16StaysNearFloat32) {
  const GoldenModel golden("vit");
  run_ranks(2, [&](comm::Communicator& communicator) {
    const auto model = load_exported(golden.path());
    ordered_json config = config_of(golden, 3);
    config["torch_autocast"] = {{"enabled", true}, {"dtype", "bfloat16"}};
    const engine::Initialized parts = start(model, config, communicator);
    expect_near(train(*parts.engine, *model, golden, kSteps), golden.losses(), 0.05);
  });
  const GoldenModel gpt("gpt");  // its graph has no cast, so that it trains in bfloat16 as it is
  run_ranks(1, [&](comm::Communicator& communicator) {
    const auto model = load_exported(gpt.path());
    ordered_json config = config_of(gpt, 2);
    config["bf16"] = {{"enabled", true}};
    const engine::Initialized parts = start(model, config, communicator);
    expect_near(train(*parts.engine, *model, gpt, kSteps), gpt.losses(), 0.05);
    EXPECT_EQ(model->parameters().front().scalar_type(), at::kBFloat16);
  });
}

// What Python's load_state_dict(strict=True) compares: the keys, a tied parameter under both names.
TEST(ExportedTraining, SavesWeightsUnderPythonsKeys) {
  for (const char* name : {"gpt", "resnet"}) {
    SCOPED_TRACE(name);
    const GoldenModel golden(name);
    const test::ScratchFolder folder;
    run_ranks(2, [&](comm::Communicator& communicator) {
      const auto model = load_exported(golden.path());
      const engine::Initialized parts = start(model, config_of(golden, 3), communicator);
      train(*parts.engine, *model, golden, 2);
      parts.engine->save_16bit_model(folder.path());
    });
    const SafetensorsFile saved(folder / "model.safetensors");
    std::vector<std::string> expected, found;
    for (const auto& [key, norm] : golden.norms()) expected.push_back(key);
    for (const auto& entry : saved.entries()) found.push_back(entry.name);
    EXPECT_THAT(found, testing::UnorderedElementsAreArray(expected));
  }
}

TEST(ExportedTraining, ACheckpointOfStage3GoesOnAtStage0) {
  const GoldenModel golden("hf_gpt2");
  const test::ScratchFolder folder;
  run_ranks(2, [&](comm::Communicator& communicator) {
    const auto model = load_exported(golden.path());
    const engine::Initialized parts = start(model, config_of(golden, 3), communicator);
    train(*parts.engine, *model, golden, kSteps);
    parts.engine->save_checkpoint(folder.path(), "last");
  });
  run_ranks(1, [&](comm::Communicator& communicator) {
    const auto model = load_exported(golden.path());
    const engine::Initialized parts = start(model, config_of(golden, 0), communicator);
    parts.engine->load_checkpoint(folder.path(), "last");
    EXPECT_EQ(parts.engine->global_steps(), kSteps);
    expect_norms(tensors_of(*model), golden.norms());
  });
}

// All but the bytes of weights and their checksums stays: the program, constants and what Python put beside it.
TEST(SaveExported, WritesTheSameProgramWithTrainedWeights) {
  const test::ScratchFolder folder;
  for (const char* name : {"gpt", "resnet"}) {
    SCOPED_TRACE(name);
    const GoldenModel golden(name);
    run_ranks(1, [&](comm::Communicator& communicator) {
      const auto model = load_exported(golden.path());
      const engine::Initialized parts = start(model, config_of(golden, 2), communicator);
      train(*parts.engine, *model, golden, kSteps);
      save_exported(folder / "trained.pt2", golden.path(), parts.engine->module_state_dict());
      const auto again = load_exported(folder / "trained.pt2");
      EXPECT_EQ(golden.evaluate(*again), golden.evaluate(*model));
      expect_norms(tensors_of(*again), golden.norms());
    });
    const StoredZip before(golden.path()), after(folder / "trained.pt2");
    EXPECT_EQ(after.bytes().size(), before.bytes().size());
    EXPECT_EQ(after.names(), before.names());
    for (const std::string& record : before.names()) {
      after.check_sum(record);
      if (record.find("/weights/weight_") != std::string::npos) continue;
      EXPECT_TRUE(std::ranges::equal(after.record(record), before.record(record))) << record;
    }
  }
}

// A file of several programs has a tensor of its own for each.
TEST(SaveExported, WritesOneProgramOrAllThatHaveTheName) {
  const std::string path = test::kExportedData + "two_programs.pt2";
  const test::ScratchFolder folder;
  const auto bias_in = [](const std::string& file, const char* program) {
    return load_exported(file, {.program = program})->named_parameters()["encoder.bias"].detach().clone();
  };
  const at::Tensor before = bias_in(path, "model");
  EXPECT_TRUE(bias_in(path, "encode").equal(before));
  const at::Tensor after = torch::full({4}, 2.5);
  save_exported(folder / "all.pt2", path, {{"encoder.bias", after}});
  EXPECT_TRUE(bias_in(folder / "all.pt2", "model").equal(after));
  EXPECT_TRUE(bias_in(folder / "all.pt2", "encode").equal(after));
  save_exported(folder / "one.pt2", path, {{"encoder.bias", after}}, "encode");
  EXPECT_TRUE(bias_in(folder / "one.pt2", "model").equal(before));
  EXPECT_TRUE(bias_in(folder / "one.pt2", "encode").equal(after));
  EXPECT_THAT(
      [&] {
        save_exported(folder / "none.pt2", path, {{"head.bias", torch::zeros({2})}}, "encode");
      },
      ThrowsMessage<UsageError>(HasSubstr("\"head.bias\" is no parameter or persistent buffer")));
  EXPECT_THAT([&] { save_exported(folder / "none.pt2", path, {}, "other"); },
              ThrowsMessage<IoError>(HasSubstr("no program \"other\"; it has encode, model")));
}

TEST(SaveExported, RefusesWhatTheFileDoesNotHave) {
  const GoldenModel golden("gpt");
  const test::ScratchFolder folder;
  const std::string path = folder / "trained.pt2";
  const auto refuses = [&](const std::vector<std::pair<std::string, at::Tensor>>& tensors, const auto&... texts) {
    EXPECT_THAT([&] { save_exported(path, golden.path(), tensors); },
                ThrowsMessage<UsageError>(testing::AllOf(HasSubstr(texts)...)));
    EXPECT_FALSE(std::filesystem::exists(path));
  };
  refuses({{"h.9.fc.weight", torch::zeros({1})}}, "\"h.9.fc.weight\" is no parameter or persistent buffer", "h.0.attn");
  refuses({{"ln_f.weight", torch::zeros({8})}}, "\"ln_f.weight\" is [8]", "has [16]", "the full tensor");
  refuses({{"ln_f.weight", torch::zeros({16}, torch::kLong)}}, "is Long", "has Float", "of the same kind");
  refuses({{"wte.weight", torch::zeros({32, 16})}, {"head.weight", torch::ones({32, 16})}},
          "wte.weight, head.weight share memory", "different values");
  save_exported(path, golden.path(), {{"head.weight", torch::ones({32, 16}, torch::kBFloat16)}});
  EXPECT_TRUE(load_exported(path)->named_parameters()["wte.weight"].eq(1).all().item<bool>());
}

}  // namespace
}  // namespace ds
