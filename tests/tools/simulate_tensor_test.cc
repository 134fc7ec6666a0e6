// ds-tool simulate with ranks that share layers. Numbers are worked out by hand.
#include <gmock/gmock.h>

#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "tests/tools/simulated_case.h"
#include "tools/collective_cost.h"
#include "tools/model_cost.h"
#include "tools/simulate_command.h"

namespace ds::tool {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

constexpr double kPrecision = 1e-9;

// Two layers of 2 and 2 operations for a micro-batch, an operation and a byte take a second.
SimulateOptions shared_layers(int64_t ranks) {
  SimulateOptions options = in_seconds(ranks);
  options.layers = 2;
  options.flops = 4;
  options.message_bytes = 3;
  options.tflops = 1e-12;
  options.ranks_per_node = ranks;
  return options;
}

Case two_ranks_a_layer(json section = json::object()) {
  section["autotp_size"] = 2;
  return Case(json::object({{"tensor_parallel", std::move(section)}}));
}

std::string text_of(const SimulateOptions& options) {
  const Outcome outcome = two_ranks_a_layer().run(options);
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  return outcome.out;
}

TEST(TensorCost, OfAGpt) {
  const GptShape shape{.layers = 2, .hidden = 8, .heads = 2, .seq_len = 16, .vocab = 33};
  const std::vector<LayerCost> whole = gpt_layers(shape, 3, 2);
  const std::vector<LayerCost> split = gpt_layers(shape, 3, 2, {.count = 2});
  const double tokens = 48;
  EXPECT_EQ(split[0].parameters, 33 * 8 / 2);
  EXPECT_EQ(split[1].parameters, 16 * 8);
  // Weights and the biases of columns are cut; two biases of rows and two norms are whole.
  EXPECT_EQ(split[2].parameters, (12 * 64 + 7 * 8) / 2 + 6 * 8);
  EXPECT_EQ(split[2].forward_flops, whole[2].forward_flops / 2);
  // arXiv:2205.05198, equation 2: s b h (10 + 24 / t + 5 a s / (h t)); equation 4: s b h / t (34 + 5 a s / h).
  const double scores = 5.0 * 2 * 16 / 8;
  EXPECT_NEAR(split[2].kept_bytes, tokens * 8 * (10 + 24.0 / 2 + scores / 2), kPrecision);
  EXPECT_NEAR(gpt_layers(shape, 3, 2, {.count = 2, .sequence_parallel = true})[2].kept_bytes,
              tokens * 8 / 2 * (34 + scores), kPrecision);
  EXPECT_EQ(split[5].kept_bytes, 2 * tokens * 8 + 4 * tokens * 33 / 2);
  // Megatron's four sums a layer, one for the embedding, one for the head.
  int sums = 0;
  for (const LayerCost& layer : split) sums += layer.forward_sums + layer.backward_sums;
  EXPECT_EQ(sums, 4 * 2 + 2);
  EXPECT_EQ(split[2].summed_bytes, 2 * tokens * 8);
  for (const LayerCost& layer : whole) EXPECT_EQ(layer.forward_sums + layer.backward_sums, 0);
}

TEST(TensorCost, SumsAreRingsOfNeighbours) {
  const Machine machine{.ranks = 8, .ranks_per_node = 4, .flops = 1, .node_rate = 10, .link_rate = 4, .latency = 0.5};
  EXPECT_EQ(tensor_rate(machine, 4), 10);
  EXPECT_EQ(tensor_rate(machine, 8), 4);  // one rank of each node sends to the other
  const std::vector<LayerCost> layers = {
      {.name = "a", .type = "", .tied = "", .summed_bytes = 20, .forward_sums = 2, .backward_sums = 1}};
  const StageSums sums = sums_of(layers.begin(), layers.end(), 4, /*recomputed=*/false);
  EXPECT_EQ(sums.forward_bytes, 2 * 2 * 20 * 0.75);
  EXPECT_EQ(sums.backward_count, 1);
  EXPECT_EQ(sums_of(layers.begin(), layers.end(), 4, true).backward_bytes, 3 * 2 * 20 * 0.75);
  const pipeline::StageTimes times = seconds_of(sums, machine, 4, 0);
  EXPECT_NEAR(times.forward, 60 / 10.0 + 2 * 6 * 0.5, kPrecision);
  EXPECT_NEAR(times.backward_input, 30 / 10.0 + 6 * 0.5, kPrecision);
  EXPECT_EQ(times.backward_weight, 0);
}

TEST(SimulateTensor, SharesLayersAndWaitsForSums) {
  const json report = two_ranks_a_layer().report(shared_layers(2));
  EXPECT_EQ(report["tensor"], 2);
  EXPECT_EQ(report["data_parallel"], 1);
  EXPECT_EQ(report["parameters"], 2000);
  EXPECT_EQ(report["fullest"]["parameters"], 1000);
  // Forward 2 s and backward 4 s on half of the operations; of each layer 4 sums of 3 bytes, 2 (T - 1) / T of them.
  EXPECT_NEAR(report["step_seconds"]["compute"].get<double>(), 6, kPrecision);
  EXPECT_NEAR(report["step_seconds"]["tensor"].get<double>(), 2 * 4 * 3, kPrecision);
  EXPECT_EQ(report["fullest"]["sent_per_step"]["tensor"], 24);
  EXPECT_EQ(report["sent_by_a_node_per_step"], 0);
}

TEST(SimulateTensor, OverlapHidesSumsOfBackward) {
  const json report = two_ranks_a_layer({{"tp_overlap_comm", true}}).report(shared_layers(2));
  // Backward's 12 s in 4 sums, beside 2 s of weights' products: 12 - 2 x 3 / 4.
  EXPECT_NEAR(report["step_seconds"]["tensor"].get<double>(), 12 + 12 - 1.5, kPrecision);
}

TEST(SimulateTensor, DataParallelRingsGoOverEveryTensorRank) {
  SimulateOptions options = shared_layers(4);
  options.ranks_per_node = 2;  // ranks 0 and 1 share layers, 0 and 2 gradients
  options.link_gbps = 8e-9;
  const json report = two_ranks_a_layer().report(options);
  const auto sent = report["fullest"]["sent_per_step"]["data_parallel"].get<int64_t>();
  EXPECT_GT(sent, 0);
  EXPECT_EQ(report["sent_by_a_node_per_step"], 2 * sent);
  EXPECT_EQ(report["fullest"]["ranks"], (std::vector<int>{0, 3}));
  // Both ranks of a node send to the other node at once.
  EXPECT_NEAR(report["step_seconds"]["data_parallel"].get<double>(), 2.0 * static_cast<double>(sent), kPrecision);
}

TEST(SimulateTensor, PrintsTheAxis) {
  const std::string text = text_of(shared_layers(4));
  EXPECT_THAT(text, ::testing::AllOf(HasSubstr("x data parallel 2 x tensor 2 (each inside a node)"),
                                     HasSubstr("share layers"), HasSubstr("a rank, to those that share its layers")));
}

TEST(SimulateTensor, SaysWhetherTheAxisLiesInsideANode) {
  const auto inside = [](int64_t ranks_per_node) {
    SimulateOptions options = shared_layers(6);
    options.ranks_per_node = ranks_per_node;
    options.link_gbps = 8e-9;
    EXPECT_THAT(text_of(options), HasSubstr(ranks_per_node % 2 == 0 ? "(each inside a node)" : "(across nodes)"));
    return two_ranks_a_layer().report(options)["tensor_inside_node"].get<bool>();
  };
  EXPECT_TRUE(inside(2));
  EXPECT_TRUE(inside(6));
  EXPECT_FALSE(inside(1));
  EXPECT_FALSE(inside(3)) << "the second axis";
}

// Two stages of a layer each, two data-parallel ranks, two ranks that share a layer; messages of 8 bytes.
SimulateOptions three_axes(int64_t ranks_per_node) {
  SimulateOptions options = shared_layers(8);
  options.message_bytes = 8;
  options.ranks_per_node = ranks_per_node;
  options.link_gbps = 8e-9;
  return options;
}

Case two_of_each(const json& section = json::object(), const json& messages = json::object()) {
  json config = {{"pipeline", {{"stages", 2}, {"schedule", "gpipe"}}},
                 {"tensor_parallel", {{"autotp_size", 2}}},
                 {"gradient_accumulation_steps", 2}};
  config["tensor_parallel"].update(section);
  config["pipeline"].update(messages);
  return Case(config);
}

TEST(SimulateThreeAxes, BytesOfEachKindAndTheirLinks) {
  const json report = two_of_each().report(three_axes(4));
  EXPECT_EQ(report["pipeline"], 2);
  EXPECT_EQ(report["data_parallel"], 2);
  EXPECT_EQ(report["tensor"], 2);
  // A rank's half of the layer's 2 operations takes 1 s forward, 2 s backward; (p - 1) times both are idle.
  EXPECT_NEAR(report["step_seconds"]["compute"].get<double>(), 2 * 3, kPrecision);
  EXPECT_NEAR(report["step_seconds"]["bubble"].get<double>(), 3, kPrecision);
  for (const json& rank : report["per_rank"]) {
    // Each sends half of two messages, and to its neighbour on the tensor axis half of the two that it gets; four sums
    // of 8 bytes in each micro-batch.
    EXPECT_EQ(rank["sent_per_step"]["pipeline"], 2 * 4);
    EXPECT_EQ(rank["sent_per_step"]["tensor"], 2 * 4 * 8 + 2 * 4);
    EXPECT_EQ(rank["bytes"]["messages"], 4 + 8);
  }
  EXPECT_EQ(report["per_rank"][1]["ranks"], (std::vector<int>{4, 7}));
  // A node has a stage: nothing but messages leaves it, from four ranks.
  EXPECT_EQ(report["sent_by_a_node_along"], (json{{"pipeline", 4 * 2 * 4}, {"data_parallel", 0}, {"tensor", 0}}));
  EXPECT_EQ(report["sent_by_a_node_per_step"], 4 * 2 * 4);
}

TEST(SimulateThreeAxes, MessagesOfSequencesThatAreCutAndWholeOnes) {
  const json cut = two_of_each({{"sequence_parallel", true}}).report(three_axes(4))["fullest"];
  EXPECT_EQ(cut["sent_per_step"]["pipeline"], 2 * 4);
  EXPECT_EQ(cut["sent_per_step"]["tensor"], 2 * 4 * 8);
  EXPECT_EQ(cut["bytes"]["messages"], 4);
  const Case job = two_of_each(json::object(), {{"pipe_partitioned", false}, {"grad_partitioned", false}});
  const json whole = job.report(three_axes(4))["fullest"];
  EXPECT_EQ(whole["sent_per_step"]["pipeline"], 2 * 8);
  EXPECT_EQ(whole["sent_per_step"]["tensor"], 2 * 4 * 8);
  EXPECT_EQ(whole["bytes"]["messages"], 8);
  // By default also where pipelines lie inside a node.
  EXPECT_EQ(two_of_each().report(three_axes(8))["fullest"]["sent_per_step"]["pipeline"], 2 * 8);
}

TEST(SimulateThreeAxes, PrintsTheMeshAndWhereEachKindOfBytesGoes) {
  SimulateOptions options = three_axes(4);
  options.per_rank = true;
  const std::string text = two_of_each().run(options).out;
  EXPECT_THAT(
      text, ::testing::AllOf(
                HasSubstr("8 = pipeline 2 x data parallel 2 x tensor 2 (each inside a node), on 2 nodes"),
                HasSubstr("pipe 2 x data 2 x tensor 2, the last innermost: ranks 0 and 4 are a pipeline, 0 and 2 train "
                          "the same parameters on other batches, 0 and 1 have parts of the same layers"),
                HasSubstr("32 B leave a node"), HasSubstr("inside nodes"), HasSubstr("ranks  stage  state"),
                HasSubstr("\n  4-7    1      ")));
}

TEST(SimulateThreeAxes, WarnsOfATensorAxisThatLeavesANode) {
  const auto warnings = [](int64_t ranks_per_node) {
    return two_of_each().report(three_axes(ranks_per_node))["warnings"];
  };
  EXPECT_EQ(warnings(2), json::array());
  EXPECT_THAT(warnings(3).at(0).get<std::string>(), HasSubstr("(ranks 2 (node 0) and 3 (node 1))"));
  const Outcome outcome = two_of_each().run(three_axes(1));
  EXPECT_THAT(outcome.out, ::testing::AllOf(HasSubstr("(across nodes)"), HasSubstr("ranks 0 (node 0) and 1 (node 1)")));
}

}  // namespace
}  // namespace ds::tool
