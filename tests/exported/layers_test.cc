// Layers of exported models as the engine knows them, by Python's classes and names: FP8, compression, batch norms over
// ranks, profiles, reports of NaN.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "dsengine/engine.h"
#include "dsengine/errors.h"
#include "dsengine/exported_model.h"
#include "dsengine/exported_pipeline.h"
#include "dsengine/model_compression.h"
#include "dsengine/profiling.h"
#include "layers/compressed/compressed_model.h"
#include "layers/fp8/linear.h"
#include "tests/exported/golden_model.h"
#include "tests/support/borrowed.h"
#include "tests/support/thread_ranks.h"

namespace ds {
namespace {

using nlohmann::ordered_json;
using test::GoldenModel;
using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;
using testing::UnorderedElementsAre;

struct LayersRun {
  const GoldenModel& golden;
  ordered_json config;
  int ranks = 1;
  int steps = 3;
};

ordered_json config_with(const GoldenModel& golden, const ordered_json& more) {
  ordered_json config = {
      {"train_micro_batch_size_per_gpu", 8}, {"gradient_clipping", 0.0},           {"seed", 7}, {"log_level", "error"},
      {"optimizer", golden.optimizer()},     {"zero_optimization", {{"stage", 2}}}};
  if (golden.optimizer().at("type") == "SGD") config["zero_allow_untested_optimizer"] = true;
  config.update(more);
  return config;
}

using BodyOfRank = std::function<void(engine::Engine& engine, ExportedModule& model)>;

void start(const LayersRun& run, const BodyOfRank& body) {
  test::run_ranks(run.ranks, [&](comm::Communicator& world) {
    const auto model = load_exported(run.golden.path());
    auto parts = engine::initialize({.model = model, .config = run.config, .communicator = test::borrowed(world)});
    body(*parts.engine, *model);
  });
}

// Returns the largest distance of the losses from Python's.
double distance_from_python(engine::Engine& engine, ExportedModule& model, const LayersRun& run) {
  double largest = 0;
  for (int step = 0; step < run.steps; ++step) {
    const at::Tensor loss = run.golden.loss(model, step, engine.global_rank(), run.ranks);
    engine.backward(loss);
    engine.step();
    at::Tensor sum = loss.detach().to(at::kDouble).clone();
    if (run.ranks > 1) engine.communicator().all_reduce(sum).wait();
    largest =
        std::max(largest, std::abs(sum.item<double>() / run.ranks - run.golden.losses()[static_cast<size_t>(step)]));
  }
  return largest;
}

TEST(ExportedLayers, LinearLayersComputeOnFp8) {
  const GoldenModel golden("gpt");
  const LayersRun run{golden, config_with(golden, {{"fp8", {{"enabled", true}, {"emulate", true}}}})};
  start(run, [&](engine::Engine& engine, ExportedModule& model) {
    std::vector<std::string> names;
    for (const fp8::NamedLinear& layer : fp8::linears_of(model)) names.push_back(layer.name());
    EXPECT_THAT(names, UnorderedElementsAre("h.0.attn.qkv", "h.0.attn.proj", "h.0.fc", "h.0.proj", "h.1.attn.qkv",
                                            "h.1.attn.proj", "h.1.fc", "h.1.proj", "head"));
    const double distance = distance_from_python(engine, model, run);
    EXPECT_GT(distance, 1e-5) << "nothing was computed on FP8";
    EXPECT_LT(distance, 0.1);
  });
}

// GPT-2 has its weights as [in, out].
TEST(ExportedLayers, Conv1DOfHuggingFaceComputesOnFp8) {
  const GoldenModel golden("hf_gpt2");
  const LayersRun run{
      golden,
      config_with(golden,
                  {{"fp8", {{"enabled", true}, {"emulate", true}, {"exclude", ordered_json::array({"lm_head"})}}}})};
  start(run, [&](engine::Engine& engine, ExportedModule& model) {
    std::vector<std::string> names;
    for (const fp8::NamedLinear& layer : fp8::linears_of(model)) {
      if (layer.inputs_first) names.push_back(layer.name());
    }
    EXPECT_THAT(names, UnorderedElementsAre("transformer.h.0.attn.c_attn", "transformer.h.0.attn.c_proj",
                                            "transformer.h.0.mlp.c_fc", "transformer.h.0.mlp.c_proj"));
    const double distance = distance_from_python(engine, model, run);
    EXPECT_GT(distance, 1e-5) << "nothing was computed on FP8";
    EXPECT_LT(distance, 0.1);
  });
}

TEST(ExportedLayers, Fp8SaysThatTheProjectionOfMultiheadAttentionStays) {
  const GoldenModel golden("encoder");
  const LayersRun run{
      golden,
      config_with(golden, {{"fp8", {{"enabled", true}, {"emulate", true}, {"exclude", ordered_json::array({"head"})}}},
                           {"log_level", "info"}})};
  testing::internal::CaptureStderr();
  start(run, [](engine::Engine&, ExportedModule&) {});
  EXPECT_THAT(
      testing::internal::GetCapturedStderr(),
      HasSubstr("fp8: encoder.layers.0.self_attn.in_proj_weight, encoder.layers.1.self_attn.in_proj_weight: the "
                "projection of MultiheadAttention's inputs is no Linear layer and stays as it is"));
}

TEST(ExportedLayers, Fp8RefusesAModelWithoutLinearLayers) {
  const GoldenModel golden("unet");
  const LayersRun run{golden, config_with(golden, {{"fp8", {{"enabled", true}, {"emulate", true}}}})};
  EXPECT_THAT([&] { start(run, [](engine::Engine&, ExportedModule&) {}); },
              ThrowsMessage<test::RankFailure>(HasSubstr("expected Linear layers in the model, found none")));
}

TEST(ExportedLayers, LinearLayersAndEmbeddingsAreQuantised) {
  const GoldenModel golden("gpt");
  const ordered_json group = {{"params", {{"start_bits", 8}, {"target_bits", 8}, {"quantization_period", 1}}},
                              {"modules", {"h\\.0\\.fc", "wpe"}}};
  const LayersRun run{golden,
                      config_with(golden, {{"compression_training",
                                            {{"weight_quantization",
                                              {{"shared_parameters", {{"enabled", true}, {"schedule_offset", 0}}},
                                               {"different_groups", {{"g", group}}}}}}}})};
  start(run, [&](engine::Engine& engine, ExportedModule& model) {
    const double distance = distance_from_python(engine, model, run);
    EXPECT_GT(distance, 1e-6) << "nothing was quantised";
    EXPECT_LT(distance, 0.05);
    const auto compressed = model_compression::find_model(model);
    ASSERT_NE(compressed, nullptr);
    std::vector<std::string> used;
    for (const auto& layer : compressed->layers()) {
      if (layer->used()) used.push_back(layer->name());
    }
    EXPECT_THAT(used, UnorderedElementsAre("h.0.fc", "wpe"));
  });
}

// The rows that row_pruning takes away are outputs, which GPT-2 has as columns.
TEST(ExportedLayers, Conv1DOfHuggingFaceLosesOutputs) {
  const GoldenModel golden("hf_gpt2");
  const std::string layer = "transformer.h.0.mlp.c_fc";
  const ordered_json group = {{"params", {{"dense_ratio", 0.5}}}, {"modules", ordered_json::array({"mlp\\.c_fc"})}};
  const ordered_json rules = {{"shared_parameters", {{"enabled", true}, {"schedule_offset", 0}, {"method", "l1"}}},
                              {"different_groups", {{"g", group}}}};
  const LayersRun run{golden, config_with(golden, {{"compression_training", {{"row_pruning", rules}}}})};
  const auto by_hand = load_exported(golden.path());
  by_hand->eval();
  const double whole = golden.loss(*by_hand, 0).item<double>();
  at::Tensor weight = by_hand->named_parameters()[layer + ".weight"];
  at::Tensor bias = by_hand->named_parameters()[layer + ".bias"];
  {
    const at::NoGradGuard no_grad;
    const int64_t outputs = weight.size(1);
    const at::Tensor stays = std::get<1>(weight.abs().sum(0).topk(outputs / 2));
    const at::Tensor mask = at::zeros({outputs}).index_fill_(0, stays, 1);
    weight.mul_(mask);
    bias.fill_(0.1).mul_(mask);
  }
  const double pruned = golden.loss(*by_hand, 0).item<double>();
  EXPECT_GT(std::abs(pruned - whole), 1e-5) << "the outputs do not count";
  test::run_ranks(run.ranks, [&](comm::Communicator& world) {
    const auto model = load_exported(golden.path());
    {
      const at::NoGradGuard no_grad;
      model->named_parameters()[layer + ".bias"].fill_(0.1);
    }
    const auto engine =
        engine::initialize({.model = model, .config = run.config, .communicator = test::borrowed(world)}).engine;
    engine->eval();
    EXPECT_NEAR(golden.loss(*model, 0).item<double>(), pruned, 1e-6);
    for (const auto& [name, values] : engine::redundancy_clean(engine)) {
      if (name == layer + ".weight") EXPECT_TRUE(values.allclose(weight)) << "the weight of the small model";
    }
  });
}

// Two ranks with half of the batch each have the statistics of the whole batch, as Python's one process.
TEST(ExportedLayers, BatchNormsJoinTheBatchesOfAllRanks) {
  const GoldenModel golden("resnet");
  const LayersRun run{golden, config_with(golden, {{"sync_batchnorm", true}}), /*ranks=*/2};
  start(run, [&](engine::Engine& engine, ExportedModule& model) {
    EXPECT_LT(distance_from_python(engine, model, run), 1e-5);
  });
}

TEST(ExportedLayers, AProfileHasPythonsNamesAndClasses) {
  const GoldenModel golden("gpt");
  const auto model = load_exported(golden.path());
  const profiling::FlopsProfile profile = profiling::profile_flops(*model, [&] { golden.loss(*model, 0).backward(); });
  const auto found = std::find_if(profile.modules.begin(), profile.modules.end(),
                                  [](const profiling::ModuleFlops& one) { return one.name == "h.0.fc"; });
  ASSERT_NE(found, profile.modules.end());
  EXPECT_EQ(found->type, "Linear");
  EXPECT_EQ(found->macs, 8 * 8 * 16 * 64);
  EXPECT_EQ(profile.modules[static_cast<size_t>(found->parent)].type, "Block");
}

TEST(ExportedLayers, ANanNamesTheModuleAndPythonsLine) {
  const GoldenModel golden("gpt");
  const LayersRun run{golden, config_with(golden, {{"locate_non_finite", true}})};
  start(run, [&](engine::Engine& engine, ExportedModule& model) {
    engine.backward(golden.loss(model, 0) * std::numeric_limits<double>::quiet_NaN());
    EXPECT_THAT([&] { engine.step(); },
                ThrowsMessage<NonFiniteError>(AllOf(
                    HasSubstr("first in parameter wte.weight (aten.embedding.default in module \"wte\", in Python: "
                              "File \""),
                    HasSubstr("autograd made is that of parameter "), HasSubstr("loss of micro-batch 0"))));
    EXPECT_THAT(model.reader_of("h.1.fc.bias"), HasSubstr("aten.linear.default in module \"h.1.fc\", in Python: File"));
    EXPECT_EQ(model.reader_of("h.9.fc.bias"), "");
  });
  const auto pipeline = load_exported_pipeline(GoldenModel("hf_llama").path(), {.labels = {"labels"}});
  EXPECT_THAT(pipeline->reader_of("model.layers.1.mlp.up_proj.weight"),
              HasSubstr("aten.linear.default in module \"model.layers.1.mlp.up_proj\""));
}

}  // namespace
}  // namespace ds
