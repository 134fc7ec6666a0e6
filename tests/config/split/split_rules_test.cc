// What the section tensor_parallel cuts of models, against what DeepSpeed documents of its keys.
#include "config/split/split_rules.h"

#include <gmock/gmock.h>

#include <map>

#include "config/split/logical_cut.h"
#include "tests/config/parse_text.h"
#include "tests/support/thrown.h"

namespace ds::engine {
namespace {

using config::parse_text;
using parallel::NamedShape;
using parallel::ParameterSplit;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

using Shapes = std::vector<NamedShape>;

// Attention of 4 heads of 8 with two groups, and what stands around it, by the names of Hugging Face's Llama.
const Shapes kLlama = {
    {.name = "model.embed_tokens.weight", .sizes = {96, 32}},
    {.name = "model.layers.0.self_attn.q_proj.weight", .sizes = {32, 32}},
    {.name = "model.layers.0.self_attn.k_proj.weight", .sizes = {16, 32}},
    {.name = "model.layers.0.self_attn.v_proj.weight", .sizes = {16, 32}},
    {.name = "model.layers.0.self_attn.o_proj.weight", .sizes = {32, 32}},
    {.name = "model.layers.0.mlp.gate_proj.weight", .sizes = {48, 32}},
    {.name = "model.layers.0.mlp.up_proj.weight", .sizes = {48, 32}},
    {.name = "model.layers.0.mlp.down_proj.weight", .sizes = {32, 48}},
    {.name = "model.layers.0.input_layernorm.weight", .sizes = {32}},
    {.name = "lm_head.weight", .sizes = {96, 32}},
};

config::TensorParallelSection section_of(const std::string& keys) {
  return parse_text("{tensor_parallel: {autotp_size: 2" + (keys.empty() ? "" : ", " + keys) + "}}").tensor_parallel;
}

std::map<std::string, ParameterSplit> splits_of(const std::string& keys, const Shapes& shapes, int ranks = 2) {
  std::map<std::string, ParameterSplit> result;
  const SplitRules split = split_rules(section_of(keys), shapes);
  for (ParameterSplit& entry : parallel::plan_splits(shapes, split.rules, ranks)) {
    const std::string name = entry.name;
    result.emplace(name, std::move(entry));
  }
  return result;
}

// -1 for what stays whole.
std::vector<int64_t> dims_of(const std::string& keys, const Shapes& shapes) {
  const auto splits = splits_of(keys, shapes);
  std::vector<int64_t> dims;
  for (const NamedShape& shape : shapes) dims.push_back(splits.at(shape.name).dim);
  return dims;
}

std::string refusal_of(const std::string& keys, const Shapes& shapes = kLlama) {
  return test::thrown_by<ConfigError>([&] { split_rules(section_of(keys), shapes); }, "");
}

TEST(SplitRules, ByNamesOfHuggingFacesLlama) {
  const auto dims = ElementsAre(0, 0, 0, 0, 1, 0, 0, 1, -1, 0);
  EXPECT_THAT(dims_of("", kLlama), dims);
  EXPECT_THAT(dims_of("preset_model: 'llama'", kLlama), dims);
  EXPECT_THAT(dims_of("preset_model: 'qwen2'", kLlama), dims);
}

TEST(SplitRules, OneRuleForAllLayersThatAreAlike) {
  Shapes shapes;
  for (int layer = 0; layer < 12; ++layer) {
    shapes.push_back({.name = "h." + std::to_string(layer) + ".mlp.fc.weight", .sizes = {64, 16}});
  }
  EXPECT_THAT(split_rules(section_of(""), shapes).rules, ::testing::SizeIs(1));
  shapes[5].sizes = {32, 16};
  const SplitRules split = split_rules(section_of("partition_config: {layer_specs: [{patterns: ['h.5.*'], "
                                                  "partition_type: 'skip'}, {patterns: ['.*fc']}]}"),
                                       shapes);
  EXPECT_THAT(split.rules, ::testing::SizeIs(12));
  EXPECT_FALSE(parallel::plan_splits(shapes, split.rules, 2)[5].is_split());
  EXPECT_TRUE(parallel::plan_splits(shapes, split.rules, 2)[4].is_split());
}

TEST(SplitRules, FusedWeightsBySizes) {
  const Shapes shapes = {
      {.name = "h.0.attn.qkv.weight", .sizes = {64, 32}},         {.name = "h.0.attn.qkv.bias", .sizes = {64}},
      {.name = "h.0.attn.proj.weight", .sizes = {32, 32}},        {.name = "h.0.attn.proj.bias", .sizes = {32}},
      {.name = "h.0.mlp.gate_up_proj.weight", .sizes = {96, 32}}, {.name = "h.0.ln.weight", .sizes = {32}}};
  const auto splits = splits_of("", shapes);
  EXPECT_THAT(splits.at("h.0.attn.qkv.weight").blocks, ElementsAre(32, 16, 16));
  EXPECT_THAT(splits.at("h.0.attn.qkv.bias").blocks, ElementsAre(32, 16, 16));
  EXPECT_EQ(splits.at("h.0.attn.proj.weight").dim, 1);
  EXPECT_FALSE(splits.at("h.0.attn.proj.bias").is_split());
  EXPECT_THAT(splits.at("h.0.attn.proj.bias").reason, HasSubstr("added once"));
  EXPECT_THAT(splits.at("h.0.mlp.gate_up_proj.weight").blocks, ElementsAre(48, 48));
  EXPECT_FALSE(splits.at("h.0.ln.weight").is_split());
}

TEST(SplitRules, Gpt2StoresInputsFirst) {
  const Shapes shapes = {
      {.name = "h.0.attn.c_attn.weight", .sizes = {32, 96}}, {.name = "h.0.attn.c_attn.bias", .sizes = {96}},
      {.name = "h.0.attn.c_proj.weight", .sizes = {32, 32}}, {.name = "h.0.attn.c_proj.bias", .sizes = {32}},
      {.name = "h.0.mlp.c_fc.weight", .sizes = {32, 128}},   {.name = "h.0.mlp.c_fc.bias", .sizes = {128}},
      {.name = "h.0.mlp.c_proj.weight", .sizes = {128, 32}}, {.name = "h.0.mlp.c_proj.bias", .sizes = {32}}};
  EXPECT_THAT(dims_of("", shapes), ElementsAre(1, 0, 0, -1, 1, 0, 0, -1));
  EXPECT_THAT(splits_of("", shapes).at("h.0.attn.c_attn.weight").blocks, ElementsAre(32, 32, 32));
  // nanoGPT's, without biases: [out, in].
  const Shapes other = {{.name = "h.0.attn.c_attn.weight", .sizes = {96, 32}},
                        {.name = "h.0.attn.c_proj.weight", .sizes = {32, 32}},
                        {.name = "h.0.mlp.c_fc.weight", .sizes = {128, 32}},
                        {.name = "h.0.mlp.c_proj.weight", .sizes = {32, 128}}};
  EXPECT_THAT(dims_of("", other), ElementsAre(0, 1, 0, 1));
}

TEST(SplitRules, TorchsTransformerEncoder) {
  const Shapes shapes = {{.name = "layers.0.self_attn.in_proj_weight", .sizes = {96, 32}},
                         {.name = "layers.0.self_attn.in_proj_bias", .sizes = {96}},
                         {.name = "layers.0.self_attn.out_proj.weight", .sizes = {32, 32}},
                         {.name = "layers.0.self_attn.out_proj.bias", .sizes = {32}},
                         {.name = "layers.0.linear1.weight", .sizes = {128, 32}},
                         {.name = "layers.0.linear1.bias", .sizes = {128}},
                         {.name = "layers.0.linear2.weight", .sizes = {32, 128}},
                         {.name = "layers.0.linear2.bias", .sizes = {32}},
                         {.name = "layers.0.norm1.weight", .sizes = {32}}};
  EXPECT_THAT(dims_of("", shapes), ElementsAre(0, 0, 1, -1, 0, 0, 1, -1, -1));
  EXPECT_THAT(splits_of("", shapes).at("layers.0.self_attn.in_proj_bias").blocks, ElementsAre(32, 32, 32));
}

TEST(SplitRules, HeadsStayTogetherWhereTheirSizeIsKnown) {
  Shapes shapes = {{.name = "l.0.q_proj.weight", .sizes = {56, 56}},
                   {.name = "l.0.k_proj.weight", .sizes = {56, 56}},
                   {.name = "l.0.o_proj.weight", .sizes = {56, 56}},
                   {.name = "l.0.q_norm.weight", .sizes = {8}}};
  const auto splits = splits_of("", shapes, 3);
  EXPECT_EQ(splits.at("l.0.q_proj.weight").grain, 8);
  EXPECT_EQ(splits.at("l.0.o_proj.weight").grain, 8);
  shapes.pop_back();
  EXPECT_EQ(splits_of("tp: {tp_grain_size: 8}", shapes, 3).at("l.0.o_proj.weight").grain, 8);
  config::TensorParallelSection three = section_of("");
  three.autotp_size = 3;
  EXPECT_THAT(split_rules(three, shapes).warnings,
              ElementsAre(AllOf(HasSubstr("l.0.q_proj.weight and 2 more"), HasSubstr("tp_grain_size"))));
  // A group of queries goes with its key.
  shapes = {{.name = "l.0.q_proj.weight", .sizes = {48, 48}},
            {.name = "l.0.k_proj.weight", .sizes = {24, 48}},
            {.name = "l.0.q_norm.weight", .sizes = {8}}};
  EXPECT_EQ(splits_of("", shapes, 2).at("l.0.q_proj.weight").grain, 16);
  EXPECT_EQ(splits_of("", shapes, 2).at("l.0.k_proj.weight").grain, 8);
}

TEST(SplitRules, LayerSpecsDecideAndTheRestStaysWhole) {
  const std::string keys =
      "partition_config: {layer_specs: [{patterns: ['.*\\\\.o_proj\\\\.weight$', '.*\\\\.down_proj\\\\.weight$'], "
      "partition_type: 'ROW'}, {patterns: ['.*\\\\.[qk]_proj\\\\.weight$'], gather_output: true}]}";
  EXPECT_THAT(dims_of(keys, kLlama), ElementsAre(0, 0, 0, -1, 1, -1, -1, 1, -1, 0));
  const auto splits = splits_of(keys, kLlama);
  EXPECT_THAT(splits.at("model.layers.0.self_attn.o_proj.weight").reason,
              AllOf(HasSubstr("row, by partition_config.layer_specs.0"), HasSubstr("o_proj")));
  EXPECT_THAT(splits.at("model.layers.0.mlp.up_proj.weight").reason, HasSubstr("no rule matches"));
  EXPECT_TRUE(splits.at("model.layers.0.self_attn.q_proj.weight").join_output);
  EXPECT_FALSE(splits.at("model.layers.0.self_attn.o_proj.weight").join_output);
}

TEST(SplitRules, ThePresetFollowsLayerSpecs) {
  const std::string skip = "layer_specs: [{patterns: ['.*q_proj'], partition_type: 'skip'}]";
  EXPECT_THAT(dims_of("preset_model: 'llama', partition_config: {" + skip + "}", kLlama),
              ElementsAre(0, -1, 0, 0, 1, 0, 0, 1, -1, 0));
  EXPECT_THAT(dims_of("preset_model: 'llama', partition_config: {use_default_specs: false, " + skip + "}", kLlama),
              ElementsAre(0, -1, -1, -1, -1, -1, -1, -1, -1, 0));
}

TEST(SplitRules, TheFirstSpecWinsWithAWarning) {
  const SplitRules split =
      split_rules(section_of("partition_config: {layer_specs: [{patterns: ['.*o_proj'], partition_type: 'row'}, "
                             "{patterns: ['model.*']}, {patterns: ['nobody']}]}"),
                  kLlama);
  EXPECT_THAT(split.warnings, Contains(AllOf(HasSubstr("layer_specs.1: model.layers.0.self_attn.o_proj.weight"),
                                             HasSubstr("layer_specs.0"))));
  EXPECT_THAT(split.warnings, Contains(AllOf(HasSubstr("layer_specs.2"), HasSubstr("names no parameter"))));
}

TEST(SplitRules, PatternsMatchFromTheStart) {
  // As Python's re.match: 'lm_head' is the start of a name, 'q_proj' of none.
  EXPECT_THAT(split_rules(section_of("partition_config: {layer_specs: [{patterns: ['q_proj']}]}"), kLlama).warnings,
              Contains(HasSubstr("names no parameter")));
  EXPECT_EQ(splits_of("partition_config: {layer_specs: [{patterns: ['lm_head'], partition_type: 'skip'}]}", kLlama)
                .at("lm_head.weight")
                .dim,
            -1);
}

TEST(SplitRules, ModelTypesAreComparedWithThePreset) {
  const std::string specs =
      "partition_config: {layer_specs: [{patterns: ['.*q_proj'], partition_type: 'skip', "
      "model_types: ['bert', 'Llama']}]}";
  EXPECT_EQ(splits_of("preset_model: 'llama', " + specs, kLlama).at(kLlama[1].name).dim, -1);
  EXPECT_EQ(splits_of("preset_model: 'qwen2', " + specs, kLlama).at(kLlama[1].name).dim, 0);
  EXPECT_THAT(split_rules(section_of(specs), kLlama).warnings, Contains(HasSubstr("model_types")));
}

TEST(SplitRules, StrictModeWantsEveryMatrixNamed) {
  EXPECT_THAT(refusal_of("preset_model: 'llama', partition_config: {strict_mode: true}"), IsEmpty());
  EXPECT_THAT(refusal_of("partition_config: {strict_mode: true, layer_specs: [{patterns: ['.*(q|k|v|o)_proj']}]}"),
              AllOf(HasSubstr("tensor_parallel.partition_config.strict_mode"), HasSubstr("3 matrices"),
                    HasSubstr("mlp.gate_proj.weight")));
}

TEST(SplitRules, MixtralsExpertsAndItsGate) {
  const Shapes shapes = {{.name = "l.0.block_sparse_moe.gate.weight", .sizes = {8, 32}},
                         {.name = "l.0.block_sparse_moe.experts.0.w1.weight", .sizes = {48, 32}},
                         {.name = "l.0.block_sparse_moe.experts.0.w2.weight", .sizes = {32, 48}},
                         {.name = "l.0.block_sparse_moe.experts.1.w3.weight", .sizes = {48, 32}}};
  EXPECT_THAT(dims_of("preset_model: 'mixtral'", shapes), ElementsAre(-1, 0, 1, 0));
  EXPECT_THAT(dims_of("", shapes), ElementsAre(-1, 0, 1, 0));
  // A number in a layer's name tells layers apart: a rule for all first matrices, one for all second ones, ...
  Shapes many;
  for (int expert = 0; expert < 50; ++expert) {
    for (const char* matrix : {"w1", "w2", "w3"}) {
      const bool row = std::string(matrix) == "w2";
      many.push_back({.name = cat("l.0.block_sparse_moe.experts.", expert, ".", matrix, ".weight"),
                      .sizes = row ? std::vector<int64_t>{32, 48} : std::vector<int64_t>{48, 32}});
    }
  }
  EXPECT_EQ(split_rules(section_of(""), many).rules.size(), 3U);
}

TEST(SplitRules, OtherPresets) {
  const Shapes glm = {{.name = "l.0.self_attention.query_key_value.weight", .sizes = {48, 32}},
                      {.name = "l.0.self_attention.dense.weight", .sizes = {32, 32}},
                      {.name = "l.0.mlp.dense_h_to_4h.weight", .sizes = {96, 32}},
                      {.name = "l.0.mlp.dense_4h_to_h.weight", .sizes = {32, 48}}};
  const auto chatglm = splits_of("preset_model: 'chatglm'", glm);
  EXPECT_THAT(chatglm.at(glm[0].name).blocks, ElementsAre(32, 8, 8));
  EXPECT_THAT(chatglm.at(glm[2].name).blocks, ElementsAre(48, 48));
  EXPECT_THAT(splits_of("preset_model: 'bloom'", glm).at(glm[0].name).blocks, IsEmpty());
  EXPECT_THAT(dims_of("preset_model: 'bloom'", glm), ElementsAre(0, 1, 0, 1));
  const Shapes latent = {{.name = "l.0.self_attn.q_a_proj.weight", .sizes = {16, 32}},
                         {.name = "l.0.self_attn.q_b_proj.weight", .sizes = {64, 16}},
                         {.name = "l.0.self_attn.kv_a_proj_with_mqa.weight", .sizes = {20, 32}},
                         {.name = "l.0.self_attn.kv_b_proj.weight", .sizes = {64, 16}},
                         {.name = "l.0.mlp.shared_experts.down_proj.weight", .sizes = {32, 48}},
                         {.name = "l.0.mlp.gate.weight", .sizes = {8, 32}}};
  EXPECT_THAT(dims_of("preset_model: 'deepseek_v2'", latent), ElementsAre(-1, 0, -1, 0, 1, -1));
  const Shapes phi = {{.name = "l.0.self_attn.qkv_proj.weight", .sizes = {96, 32}},
                      {.name = "l.0.self_attn.o_proj.weight", .sizes = {32, 32}},
                      {.name = "l.0.mlp.gate_up_proj.weight", .sizes = {96, 32}}};
  EXPECT_THAT(splits_of("preset_model: 'phi3'", phi).at(phi[0].name).blocks, ElementsAre(32, 32, 32));
  EXPECT_THAT(splits_of("preset_model: 'phi3'", phi).at(phi[2].name).blocks, ElementsAre(48, 48));
}

TEST(SplitRules, AHuggingFaceModelsTpPlan) {
  const std::string plan =
      "partition_config: {tp_plan: {'layers.*.self_attn.q_proj': 'colwise', "
      "'layers.*.self_attn.o_proj': 'rowwise', 'embed_tokens': 'embedding_rowwise', "
      "'lm_head': 'colwise_rep', 'layers.*.mlp.up_proj': 'replicate'}}";
  EXPECT_THAT(dims_of(plan, kLlama), ElementsAre(0, 0, -1, -1, 1, -1, -1, -1, -1, 0));
  EXPECT_THAT(refusal_of("partition_config: {tp_plan: {'a': 'moe_tp_experts'}}"),
              AllOf(HasSubstr("tp_plan: 'a'"), HasSubstr("colwise"), HasSubstr("moe_tp_experts")));
}

TEST(SplitRules, InjectionNamesRowsAndTheirBlocksAreColumns) {
  const Shapes shapes = {{.name = "encoder.layer.0.attention.self.query.weight", .sizes = {32, 32}},
                         {.name = "encoder.layer.0.attention.self.query.bias", .sizes = {32}},
                         {.name = "encoder.layer.0.attention.output.dense.weight", .sizes = {32, 32}},
                         {.name = "encoder.layer.0.attention.output.dense.bias", .sizes = {32}},
                         {.name = "encoder.layer.0.wide.weight", .sizes = {128, 32}},
                         {.name = "encoder.layer.0.output.dense.weight", .sizes = {32, 128}},
                         {.name = "pooler.dense.weight", .sizes = {32, 32}}};
  const std::string keys = "injection_policy_tuple: ['attention.output.dense', 'output.dense']";
  EXPECT_THAT(dims_of(keys, shapes), ElementsAre(0, 0, 1, -1, 0, 1, -1));
  EXPECT_THAT(split_rules(section_of("injection_policy_tuple: ['nobody']"), shapes).warnings,
              Contains(HasSubstr("'nobody' names no layer")));
}

TEST(SplitRules, TheVocabulary) {
  EXPECT_THAT(dims_of("vocab_parallel_lm_head: false", kLlama), ElementsAre(-1, 0, 0, 0, 1, 0, 0, 1, -1, -1));
  EXPECT_THAT(dims_of("partition_config: {embedding_partition_dim: 1}", kLlama),
              ElementsAre(1, 0, 0, 0, 1, 0, 0, 1, -1, 1));
  const Shapes tied = {{.name = "wte.weight", .sizes = {50257, 32}}, {.name = "wpe.weight", .sizes = {64, 32}}};
  EXPECT_THAT(dims_of("", tied), ElementsAre(0, -1));
  EXPECT_THAT(dims_of("vocab_parallel_lm_head: true", tied), ElementsAre(0, -1));
  EXPECT_THAT(dims_of("vocab_parallel_lm_head: false", tied), ElementsAre(-1, -1));
  const Shapes unknown = {{.name = "scores.weight", .sizes = {96, 32}}};
  EXPECT_THAT(refusal_of("vocab_parallel_lm_head: true", unknown), HasSubstr("lm_head_patterns"));
  EXPECT_THAT(dims_of("partition_config: {lm_head_patterns: ['scores']}", unknown), ElementsAre(0));
  EXPECT_THAT(split_rules(section_of(""), unknown).rules, IsEmpty());
  // What stands inside a head is not the vocabulary.
  const Shapes roberta = {{.name = "lm_head.transform.weight", .sizes = {32, 32}},
                          {.name = "lm_head.weight", .sizes = {96, 32}}};
  EXPECT_THAT(dims_of("", roberta), ElementsAre(-1, 0));
}

struct Viewed {
  const char* spec;
  std::vector<int64_t> sizes;
  int64_t dim;
  std::vector<int64_t> blocks;
  int64_t grain;
};

class LogicalShape : public ::testing::TestWithParam<Viewed> {};

TEST_P(LogicalShape, IsDeepSpeeds) {
  const Viewed& wanted = GetParam();
  const config::TensorParallelSection section =
      section_of(std::string("partition_config: {layer_specs: [{patterns: ['.*'], ") + wanted.spec + "}]}");
  const auto config = config::read_partition_config(
      section.partition_config, [](const std::string& where, const std::string& what) { FAIL() << where << what; });
  const LogicalCut cut = logical_cut(config.layer_specs.at(0), wanted.sizes, "a.weight", "here");
  EXPECT_EQ(cut.dim, wanted.dim);
  EXPECT_EQ(cut.blocks, wanted.blocks);
  EXPECT_EQ(cut.grain, wanted.grain);
}

const Viewed kViewed[] = {
    {"partition_type: 'column'", {96, 32}, 0, {}, 1},
    {"partition_type: 'row'", {96, 32}, 1, {}, 1},
    {"partition_dim: 1", {96, 32}, 1, {}, 1},
    {"shape: [3, -1]", {96, 32}, 0, {32, 32, 32}, 1},
    {"shape: [2, -1], partition_dim: 0", {96, 32}, 0, {48, 48}, 1},
    {"shape: [[64, 16, 16], -1]", {96, 32}, 0, {64, 16, 16}, 1},
    {"shape: [4, -1, 32], partition_dim: 1", {96, 32}, 0, {24, 24, 24, 24}, 1},
    {"shape: [-1, 8, 32], partition_dim: 0", {96, 32}, 0, {}, 8},
    {"shape: [4, [16, 8], 32], partition_dim: 1", {96, 32}, 0, {16, 8, 16, 8, 16, 8, 16, 8}, 1},
    {"shape: [-1, 2], partition_type: 'row'", {96, 32}, 1, {16, 16}, 1},
    {"shape: [4, -1, 32], partition_dim: 1", {4, 24, 32}, 1, {}, 1},
    {"shape: [4, [16, 8], 32], partition_dim: 1", {4, 24, 32}, 1, {16, 8}, 1},
};

INSTANTIATE_TEST_SUITE_P(Each, LogicalShape, ::testing::ValuesIn(kViewed));

TEST(SplitRules, ShapesThatAWeightDoesNotHave) {
  const auto with = [](const std::string& spec) {
    return refusal_of("partition_config: {layer_specs: [{patterns: ['.*q_proj'], " + spec + "}]}");
  };
  EXPECT_THAT(with("shape: [3, -1]"), AllOf(HasSubstr("tensor_parallel.partition_config.layer_specs.0.shape"),
                                            HasSubstr("q_proj.weight [32, 32]"), HasSubstr("32 does not divide by 3")));
  EXPECT_THAT(with("shape: [[30, 1], -1]"), HasSubstr("numbers of elements differ"));
  EXPECT_THAT(with("shape: [8, 16, 8], partition_dim: 1"), HasSubstr("whose last is 32"));
  EXPECT_THAT(with("shape: [1099511627776, -1]"), HasSubstr("blocks, found 1099511627776"));
  EXPECT_THAT(with("partition_dim: 2"), AllOf(HasSubstr("partition_dim: 2"), HasSubstr("no dimension")));
}

}  // namespace
}  // namespace ds::engine
