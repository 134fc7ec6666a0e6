// tensor_parallel beside the other sections, and what its lists may have.
#include <gmock/gmock.h>

#include "config/plan/plan.h"
#include "config/supported.h"
#include "tests/config/parse_text.h"

namespace ds::engine::config {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(TensorParallelSection, RanksOfALayerAreLeftOutOfDataParallelism) {
  const DsConfig config =
      parse_text("{train_batch_size: 8, tensor_parallel: {autotp_size: 2}, pipeline: {stages: 2}}", {.world_size = 16});
  EXPECT_EQ(config.dp_world_size, 4);
  EXPECT_EQ(config.train_micro_batch_size_per_gpu, 2);
  EXPECT_EQ(config.tensor_parallel.size(), 2);
  EXPECT_THAT(unsupported_features(config), IsEmpty());
  EXPECT_EQ(parse_text("{tensor_parallel: {tp: {tp_size: 4}}}", {.world_size = 8}).dp_world_size, 2);
  EXPECT_EQ(parse_text("{tensor_parallel: {}}", {.world_size = 8}).tensor_parallel.size(), 1);
}

TEST(TensorParallelSection, RanksThatDoNotDivide) {
  EXPECT_THAT(refusal_of("{tensor_parallel: {autotp_size: 3}}", {.world_size = 4}),
              AllOf(HasSubstr("tensor_parallel.autotp_size"), HasSubstr("a divisor of the 4 ranks, found 3")));
  EXPECT_THAT(refusal_of("{tensor_parallel: {tp: {tp_size: 4}}, pipeline: {stages: 2}}", {.world_size = 4}),
              AllOf(HasSubstr("tensor_parallel.autotp_size"), HasSubstr("the 2 ranks of a stage, found 4"),
                    HasSubstr("start a multiple of 8 ranks")));
}

TEST(TensorParallelSection, OneNumberOfRanks) {
  EXPECT_THAT(refusal_of("{tensor_parallel: {autotp_size: 2, tp: {tp_size: 4}}}"),
              AllOf(HasSubstr("tp_size, 4, found 2"), HasSubstr("keep one of them")));
  EXPECT_THAT(refusal_of("{tensor_parallel: {autotp_size: 2, tp: {tp_size: 2}}}"), IsEmpty());
  EXPECT_THAT(refusal_of("{tensor_parallel: {partition_config: {tp_size: 2}}}"),
              AllOf(HasSubstr("partition_config.tp_size"), HasSubstr("expected 1")));
}

// As Hugging Face's examples of tensor parallelism write it, for 8 ranks.
TEST(TensorParallelSection, OfAHuggingFaceTrainer) {
  const DsConfig config = parse_text(
      "{bf16: {enabled: 'auto'}, optimizer: {type: 'AdamW', params: {lr: 'auto', betas: 'auto'}}, "
      "zero_optimization: {stage: 2}, tensor_parallel: {autotp_size: 4}, gradient_accumulation_steps: 'auto', "
      "train_batch_size: 'auto', train_micro_batch_size_per_gpu: 'auto'}",
      {.world_size = 8,
       .auto_values = {.train_micro_batch_size_per_gpu = 2, .gradient_accumulation_steps = 3, .bf16 = true}});
  EXPECT_EQ(config.dp_world_size, 2);
  EXPECT_EQ(config.train_batch_size, 12);
  const Plan plan = make_plan(config, {.world_size = 8, .dp = 2, .tensor = 4}, {.parameters = 1000});
  EXPECT_EQ(plan.shard_ranks, 2);
  // A key of the sub-section at the section's level: refused, as in DeepSpeed.
  EXPECT_THAT(refusal_of("{tensor_parallel: {tp_size: 2}}", {.world_size = 8}), HasSubstr("tensor_parallel.tp_size"));
}

TEST(TensorParallelSection, ElasticBatchesCountDataParallelRanks) {
  const auto text = [](int model_parallel_size) {
    return cat(
        "{elasticity: {enabled: true, max_train_batch_size: 16, micro_batch_sizes: [2], num_gpus_per_node: 4, "
        "model_parallel_size: ",
        model_parallel_size, "}, tensor_parallel: {autotp_size: 2}}");
  };
  EXPECT_EQ(parse(object_of(text(2)), {.world_size = 4}).dp_world_size, 2);
  EXPECT_THAT(refusal_of(text(4), {.world_size = 4}), HasSubstr("expected 1 or 2 ranks of tensor_parallel, found 4"));
}

struct Wrong {
  const char* partition_config;
  const char* path;
  const char* message;
};

class PartitionConfigKey : public ::testing::TestWithParam<Wrong> {};

TEST_P(PartitionConfigKey, IsRefusedWithItsPath) {
  const std::string text =
      cat("{tensor_parallel: {autotp_size: 2, partition_config: ", GetParam().partition_config, "}}");
  EXPECT_THAT(refusal_of(text), AllOf(HasSubstr(GetParam().path), HasSubstr(GetParam().message))) << text;
}

const Wrong kWrong[] = {
    {"[1]", "tensor_parallel.partition_config", "expected an object"},
    {"{layer_spec: []}", "partition_config.layer_spec", "layer_specs"},
    {"{layer_specs: {}}", "partition_config.layer_specs", "a list"},
    {"{layer_specs: [3]}", "layer_specs.0", "expected an object"},
    {"{layer_specs: [{}]}", "layer_specs.0.patterns", "at least one"},
    {"{layer_specs: [{patterns: ['a'], kind: 1}]}", "layer_specs.0.kind", "known are patterns"},
    {"{layer_specs: [{patterns: ['(?P<x>a)']}]}", "layer_specs.0.patterns.0", "no regular expression"},
    {"{layer_specs: [{patterns: ['a'], partition_type: 'diagonal'}]}", "layer_specs.0.partition_type", "row, column"},
    {"{layer_specs: [{patterns: ['a'], shape: [0, -1]}]}", "layer_specs.0.shape", "positive integers"},
    {"{layer_specs: [{patterns: ['a'], shape: [-1, [1, 2]]}]}", "layer_specs.0.shape", "dimension 0, which is cut"},
    {"{layer_specs: [{patterns: ['a'], shape: [3, -1], partition_dim: 2}]}", "layer_specs.0.shape", "2 dimensions"},
    {"{layer_specs: [{patterns: ['a'], partition_dim: -1}]}", "layer_specs.0.partition_dim", "at least 0"},
    {"{layer_specs: [{patterns: ['a'], grad_allreduce: true}]}", "layer_specs.0.grad_allreduce", "skip"},
    {"{layer_specs: [{patterns: ['a'], partition_type: 'row', gather_output: true}]}", "layer_specs.0.gather_output",
     "column"},
    {"{embedding_partition_dim: 2}", "embedding_partition_dim", "0 or 1"},
    {"{tp_plan: ['a']}", "partition_config.tp_plan", "colwise"},
};

INSTANTIATE_TEST_SUITE_P(Each, PartitionConfigKey, ::testing::ValuesIn(kWrong));

TEST(TensorParallelSection, KeysOfNoEffectAreTold) {
  const std::string warnings =
      warnings_of("{tensor_parallel: {vocab_parallel_ce_backend: 'liger', sequence_parallel: true, verify: true}}");
  EXPECT_THAT(warnings, AllOf(HasSubstr("vocab_parallel_ce_backend"), HasSubstr("Python only"),
                              HasSubstr("tensor_parallel.sequence_parallel"), HasSubstr("tensor_parallel.verify")));
  EXPECT_THAT(warnings_of("{tensor_parallel: {autotp_size: 2, sequence_parallel: true}}"), IsEmpty());
  EXPECT_THAT(refusal_of("{tensor_parallel: {autotp_size: 2, injection_policy_tuple: [1]}}"),
              HasSubstr("tensor_parallel.injection_policy_tuple"));
}

TEST(SequenceParallelSection, ABoolIsMegatronsKey) {
  const DsConfig config = parse_text(
      "{sequence_parallel_size: 2, sequence_parallel: {attention: 'ring', order: 'zigzag'}}", {.world_size = 4});
  EXPECT_EQ(config.sequence_ranks(), 2);
  EXPECT_EQ(config.sequence_parallel.attention, "ring");
  EXPECT_THAT(refusal_of("{sequence_parallel_size: 2, sequence_parallel: true}"),
              AllOf(HasSubstr("sequence_parallel: expected an object"), HasSubstr("found true"),
                    HasSubstr("tensor_parallel.sequence_parallel")));
  EXPECT_THAT(refusal_of("{sequence_parallel: {order: 'headtail'}}"), HasSubstr("sequence_parallel.order"));
  EXPECT_THAT(refusal_of("{sequence_parallel_size: 2}", {.world_size = 4, .sequence_ranks = 4}),
              AllOf(HasSubstr("expected 4"), HasSubstr("axis sequence of the program's mesh")));
  EXPECT_THAT(warnings_of("{sequence_parallel: {attention: 'ring'}}"), HasSubstr("set sequence_parallel_size"));
}

TEST(SequenceParallelPlan, HasTheAxisAndSharesStatesOverDataAndSequence) {
  const DsConfig config = parse_text("{sequence_parallel_size: 2, zero_optimization: {stage: 2}}", {.world_size = 8});
  const Plan plan = make_plan(config, {.world_size = 8, .dp = 8, .sequence = 2}, {.parameters = 8000});
  EXPECT_EQ(plan.shard_ranks, 8);
  EXPECT_EQ(plan.topology.batches(), 4);
  EXPECT_THAT(to_table(plan), AllOf(HasSubstr("8 (data parallel 4 x sequence 2)"), HasSubstr("4 data-parallel ranks"),
                                    HasSubstr("data 4 x sequence 2"), HasSubstr("sequence_parallel_size: 2")));
  EXPECT_THROW(make_plan(config, {.world_size = 8, .dp = 8}, {}), ConfigError);
  EXPECT_THROW(make_plan(config, {.world_size = 8, .dp = 8, .sequence = 2}, {.pipeline_module = true}), ConfigError);
}

TEST(TensorParallelPlan, HasTheAxisAndItsRows) {
  const DsConfig config =
      parse_text("{tensor_parallel: {autotp_size: 4, sequence_parallel: true, verify: true}}", {.world_size = 8});
  const Plan plan =
      make_plan(config, {.world_size = 8, .dp = 2, .tensor = 4}, {.parameters = 1000, .split_parameters = 900});
  EXPECT_TRUE(plan.tensor.sequence_parallel);
  const std::string table = to_table(plan);
  EXPECT_THAT(table, AllOf(HasSubstr("8 (data parallel 2 x tensor 4)"), HasSubstr("4 neighbouring ranks"),
                           HasSubstr("900 of the 1000 elements of a rank are 1/4"), HasSubstr("autotp_size: 4"),
                           HasSubstr("1234 + data-parallel rank"), HasSubstr("tensor_parallel.verify: true"),
                           HasSubstr("tensor_parallel.sequence_parallel: true")));
  EXPECT_THROW(make_plan(config, {.world_size = 2, .dp = 2}), ConfigError);
}

}  // namespace
}  // namespace ds::engine::config
