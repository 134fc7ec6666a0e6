// Exported models as pipelines: the graph is cut between blocks, and trains as it does in one piece.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/files/safetensors.h"
#include "dsengine/engine.h"
#include "dsengine/exported_pipeline.h"
#include "pipeline/stage_placement.h"
#include "tests/exported/golden_model.h"
#include "tests/support/borrowed.h"
#include "tests/support/grid.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"

namespace ds {
namespace {

using nlohmann::ordered_json;
using test::GoldenModel;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr double kPipelineTolerance = 1e-6;
constexpr int kMicroBatches = 2;

ordered_json pipeline_config(const GoldenModel& golden, int stages, int zero_stage) {
  ordered_json config = {{"train_micro_batch_size_per_gpu", 4},
                         {"gradient_accumulation_steps", kMicroBatches},
                         {"gradient_clipping", 0.0},
                         {"log_level", "error"},
                         {"optimizer", golden.optimizer()},
                         {"zero_optimization", {{"stage", zero_stage}}},
                         {"pipeline", {{"stages", stages}}}};
  if (zero_stage == 3) config["zero_optimization"]["stage3_release_always"] = true;
  return config;
}

struct PipelineRun {
  ordered_json config;
  int ranks = 2;
  int steps = 20;
  ExportedPipelineOptions options{.labels = {"labels"}};
};

using AfterTraining = std::function<void(engine::Engine&, ExportedPipeline&)>;

// Trains on the batches of the golden model, micro-batch by micro-batch; returns the losses of rank 0.
std::vector<double> train(const GoldenModel& golden, const PipelineRun& run, const AfterTraining& after = {}) {
  std::vector<double> losses;
  test::run_ranks(run.ranks, [&](comm::Communicator& world) {
    const auto model = load_exported_pipeline(golden.path(), run.options);
    auto parts = engine::initialize({.model = model, .config = run.config, .communicator = test::borrowed(world)});
    engine::Engine& engine = *parts.engine;
    const auto data = static_cast<int>(engine.dp_world_size());
    const int tensor = run.config.contains("tensor_parallel") ? 2 : 1;
    const int rank = world.rank() / tensor % data;
    for (int step = 0; step < run.steps; ++step) {
      int next = 0;
      const at::Tensor loss = engine.train_batch([&] {
        // The whole batch of the step is divided by data-parallel ranks, then by micro-batches.
        const int place = rank * kMicroBatches + next++;
        const ExportedInputs whole = golden.inputs(step, place, data * kMicroBatches);
        pipeline::MicroBatch batch;
        if (run.options.pipeline.loss) batch.labels.push_back(golden.target(step, place, data * kMicroBatches));
        for (const auto& [name, value] : whole) {
          (name == "labels" && !run.options.labels.empty() ? batch.labels : batch.inputs).push_back(value.toTensor());
        }
        return batch;
      });
      if (world.rank() == 0) losses.push_back(loss.item<double>());
    }
    if (after) after(engine, *model);
  });
  return losses;
}

void expect_losses(const std::vector<double>& found, const std::vector<double>& expected) {
  ASSERT_FALSE(found.empty());
  ASSERT_LE(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) EXPECT_NEAR(found[i], expected[i], kPipelineTolerance) << "step " << i;
}

std::set<std::string> names_of(const torch::nn::Module& module) {
  std::set<std::string> names;
  for (const auto& item : module.named_parameters()) names.insert(item.key());
  return names;
}

TEST(ExportedPipeline, AStageHasTheTensorsOfItsLayersUnderPythonsNames) {
  const GoldenModel golden("hf_llama");
  std::vector<std::set<std::string>> names(2);
  const PipelineRun run{.config = pipeline_config(golden, 2, 0)};
  expect_losses(train(golden, run,
                      [&](engine::Engine& engine, ExportedPipeline& model) {
                        names[static_cast<size_t>(engine.global_rank())] = names_of(model);
                        EXPECT_THAT(model.inputs(), ElementsAre("input_ids"));
                        EXPECT_THAT(model.outputs(), ElementsAre("logits"));
                      }),
                golden.losses());
  EXPECT_TRUE(names[0].contains("model.embed_tokens.weight"));
  EXPECT_TRUE(names[1].contains("lm_head.weight"));
  std::set<std::string> all = names[0];
  all.insert(names[1].begin(), names[1].end());
  EXPECT_EQ(all.size(), names[0].size() + names[1].size()) << "no parameter is on two ranks";
  std::set<std::string> expected;
  for (const auto& [name, norm] : golden.norms()) expected.insert(name);
  EXPECT_EQ(all, expected);
}

TEST(ExportedPipeline, TrainsAsInOnePieceAtEveryStage) {
  const GoldenModel golden("hf_llama");
  for (const auto& [zero_stage, schedule] :
       test::grid_sample(1, std::vector<int>{0, 1, 2, 3}, std::vector<std::string>{"1f1b", "zb_h1", "gpipe"})) {
    SCOPED_TRACE(cat("stage ", zero_stage, ", ", schedule));
    PipelineRun run{.config = pipeline_config(golden, 2, zero_stage), .ranks = 4, .steps = 4};
    run.config["train_micro_batch_size_per_gpu"] = 2;
    run.config["pipeline"]["schedule"] = schedule;
    expect_losses(train(golden, run), golden.losses());
  }
}

TEST(ExportedPipeline, OneStageIsTheModuleInOnePiece) {
  const GoldenModel golden("hf_llama");
  PipelineRun run{.config = pipeline_config(golden, 1, 2), .ranks = 1, .steps = 8};
  expect_losses(train(golden, run), golden.losses());
}

// Labels among the inputs travel to the last stage with them.
TEST(ExportedPipeline, InputsOfLaterStagesTravel) {
  const GoldenModel golden("hf_llama");
  PipelineRun run{.config = pipeline_config(golden, 2, 0), .steps = 4, .options = {.blocks = "model.layers.*"}};
  run.config["pipeline"]["activation_checkpoint_interval"] = 1;
  expect_losses(train(golden, run), golden.losses());
}

TEST(ExportedPipeline, WithATensorAxis) {
  const GoldenModel golden("hf_llama");
  PipelineRun run{.config = pipeline_config(golden, 2, 1), .ranks = 4, .steps = 8};
  run.config["tensor_parallel"] = {{"autotp_size", 2}};
  expect_losses(train(golden, run), golden.losses());
}

// The embedding of the first stage is the head of the last one, under either name. Ranks compare it after every fifth
// step, whatever the program registers beside it.
TEST(ExportedPipeline, TiedWeightsStayEqualAndAreSavedUnderBothNames) {
  const GoldenModel golden("hf_gpt2");
  const test::ScratchFolder folder;
  std::vector<at::Tensor> copies(2);
  PipelineRun run{.config = pipeline_config(golden, 2, 1)};
  run.config["check_replicas"] = 5;
  expect_losses(train(golden, run,
                      [&](engine::Engine& engine, ExportedPipeline& model) {
                        EXPECT_EQ(model.tied().size(), 1U) << "one sum and one comparison for one weight";
                        const auto rank = static_cast<size_t>(engine.global_rank());
                        const auto parameters = model.named_parameters();
                        copies[rank] = parameters["lm_head.weight"].detach().clone();
                        EXPECT_TRUE(parameters["lm_head.weight"].is_same(parameters["transformer.wte.weight"]));
                        engine.save_16bit_model(folder.path());
                        engine.save_checkpoint(folder.path(), "last");
                      }),
                golden.losses());
  EXPECT_TRUE(copies[0].equal(copies[1]));
  const SafetensorsFile saved(folder / "model.safetensors");
  std::vector<std::string> expected, found;
  for (const auto& [key, norm] : golden.norms()) expected.push_back(key);
  for (const auto& entry : saved.entries()) found.push_back(entry.name);
  EXPECT_THAT(found, testing::UnorderedElementsAreArray(expected));
  // The checkpoint fits the module in one piece.
  test::run_ranks(1, [&](comm::Communicator& world) {
    const auto model = load_exported(golden.path());
    ordered_json config = pipeline_config(golden, 1, 0);
    config.erase("pipeline");
    auto parts = engine::initialize({.model = model, .config = config, .communicator = test::borrowed(world)});
    parts.engine->load_checkpoint(folder.path(), "last");
    for (const auto& item : model->named_parameters()) {
      const double norm = golden.norms().at(item.key());
      EXPECT_NEAR(item.value().detach().to(at::kDouble).norm().item<double>(), norm, 1e-4 * (1 + norm)) << item.key();
    }
  });
}

// Layers of an encoder, and parts of a Sequential that a residual goes around; the loss is the program's.
TEST(ExportedPipeline, OtherModelsTrainWithALossOfTheProgram) {
  for (const auto& [name, blocks] : {std::pair("encoder", "encoder.layers.*"), std::pair("vit", "mlp.*")}) {
    SCOPED_TRACE(name);
    const GoldenModel golden(name);
    PipelineRun run{.config = pipeline_config(golden, 2, 1), .options = {.blocks = blocks}};
    run.options.pipeline.loss = [&](const at::Tensor& output, const at::Tensor& target) {
      return golden.loss_of(output, target);
    };
    expect_losses(train(golden, run), golden.losses());
  }
}

// With weights of a file: what Python's forward returns.
void expect_python_in_eval(const GoldenModel& golden, const ExportedPipelineOptions& options) {
  test::run_ranks(2, [&](comm::Communicator& world) {
    const auto model = load_exported_pipeline(golden.path(), options);
    {
      const torch::NoGradGuard no_grad;
      for (at::Tensor& parameter : model->parameters()) parameter.zero_();
    }
    auto parts = engine::initialize({.model = model,
                                     .config = pipeline_config(golden, 2, 0),
                                     .weights = golden.path(),
                                     .communicator = test::borrowed(world)});
    int next = 0;
    const auto source = [&] {
      const ExportedInputs given = golden.inputs(0, next++, kMicroBatches);
      return pipeline::MicroBatch{.inputs = {given.at(0).second.toTensor()}, .labels = {given.at(1).second.toTensor()}};
    };
    const pipeline::Evaluation found =
        parts.engine->eval_batch(source, {.return_logits = true, .broadcast_logits = true});
    EXPECT_NEAR(found.loss.item<double>(), golden.losses().front(), kPipelineTolerance);
    ASSERT_EQ(found.logits.size(), static_cast<size_t>(kMicroBatches));
    const at::Tensor logits = found.logits.front().front().flatten().to(at::kDouble).contiguous();
    const std::vector<double> expected = golden.eval();
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_NEAR(logits[static_cast<int64_t>(i)].item<double>(), expected[i], kPipelineTolerance) << "value " << i;
    }
  });
}

TEST(ExportedPipeline, EvaluatesAsPythonByOneFileOrASecondOne) {
  const GoldenModel golden("hf_llama");
  ExportedPipelineOptions options{.labels = {"labels"}};
  expect_python_in_eval(golden, options);
  options.file.eval = golden.path();
  expect_python_in_eval(golden, options);
}

// A loss of the program's, and layers that FP8 finds by Python's classes on their stages.
TEST(ExportedPipeline, TrainsOnFp8WithALossOfTheProgram) {
  const GoldenModel golden("gpt");
  ExportedPipelineOptions options;
  options.pipeline.loss = [](const at::Tensor& logits, const at::Tensor& labels) {
    return at::cross_entropy_loss(logits.reshape({-1, logits.size(-1)}), labels.reshape({-1}));
  };
  ordered_json config = pipeline_config(golden, 2, 1);
  config["fp8"] = {{"enabled", true}, {"emulate", true}, {"exclude", {"head"}}};
  test::run_ranks(2, [&](comm::Communicator& world) {
    const auto model = load_exported_pipeline(golden.path(), options);
    auto parts = engine::initialize({.model = model, .config = config, .communicator = test::borrowed(world)});
    for (int step = 0; step < 3; ++step) {
      int next = 0;
      const at::Tensor loss = parts.engine->train_batch([&] {
        const at::Tensor tokens = golden.inputs(step, next++, kMicroBatches).at(0).second.toTensor();
        return pipeline::MicroBatch{.inputs = {tokens}, .labels = {tokens.roll(-1, 1)}};
      });
      EXPECT_NEAR(loss.item<double>(), golden.losses().at(static_cast<size_t>(step)), 0.1);
    }
  });
  config["fp8"].erase("exclude");
  EXPECT_THAT(
      [&] {
        test::run_ranks(2, [&](comm::Communicator& world) {
          const auto model = load_exported_pipeline(golden.path(), options);
          engine::initialize({.model = model, .config = config, .communicator = test::borrowed(world)});
        });
      },
      ThrowsMessage<test::RankFailure>(HasSubstr("expected a Linear layer of one stage")));
}

TEST(ExportedPipeline, SaysWhatCannotBeCut) {
  const auto refuses = [](const std::string& name, const ExportedPipelineOptions& options, const auto&... texts) {
    EXPECT_THAT([&] { load_exported_pipeline(GoldenModel(name).path(), options); },
                ThrowsMessage<UsageError>(testing::AllOf(HasSubstr(texts)...)));
  };
  refuses("hf_llama", {.blocks = "model.blocks.*"}, "has no list of modules \"model.blocks.*\"", "model.layers.*");
  refuses("hf_llama", {.labels = {"targets"}}, "has no input \"targets\"", "input_ids, labels");
  refuses("hf_llama", {.labels = {"input_ids"}}, "depends on input_ids and reads a parameter", "in Python: File");
  refuses("hf_llama", {.labels = {"labels"}, .loss = "nll"}, "has no output \"nll\"", "loss, logits");
  refuses("lstm", {}, "has no list of modules");
  ExportedPipelineOptions meta;
  meta.file.meta = true;
  refuses("hf_llama", meta, "file.meta", "remove it");
}

}  // namespace
}  // namespace ds
