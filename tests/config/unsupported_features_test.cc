// What is parsed and not done by this version is refused by name, never ignored.
#include <gmock/gmock.h>

#include "config/supported.h"
#include "tests/config/parse_text.h"

namespace ds::engine::config {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

struct Refused {
  const char* text;
  const char* path;
};

const Refused kRefused[] = {
    {"{zero_optimization: {zenflow: {}}}", "zero_optimization.zenflow"},
    {"{zero_optimization: {zeropp_loco_param: {}}}", "zero_optimization.zeropp_loco_param"},
    {"{optimizer: {type: 'Rprop'}}", "optimizer.type"},
    {"{scheduler: {type: 'LambdaLR'}}", "scheduler.type"},
    {"{amp: {enabled: true}}", "amp"},
    {"{expert_parallel: {enabled: true}}", "expert_parallel"},
    {"{sequence_parallel_size: 2, tensor_parallel: {autotp_size: 2}}",
     "sequence_parallel_size with tensor_parallel.autotp_size"},
    {"{sequence_parallel_size: 2, optimizer: {type: 'OneBitAdam', params: {lr: 0.1}}}",
     "sequence_parallel_size with optimizer.type"},
    {"{sequence_parallel_size: 2, sparse_attention: {}}", "sequence_parallel_size with sparse_attention"},
    {"{fp8: {enabled: true}, compression_training: {row_pruning: {shared_parameters: {enabled: true}, "
     "different_groups: {g: {params: {dense_ratio: 0.5}, modules: ['*']}}}}}",
     "fp8 with compression_training"},
    {"{optimizer: {type: 'OneBitAdam', params: {lr: 0.1}}, compression_training: {sparse_pruning: {shared_parameters: "
     "{enabled: true, method: 'snip_momentum'}}}}",
     "compression_training.sparse_pruning.shared_parameters.method"},
    {"{data_efficiency: {enabled: true, data_sampling: {enabled: true, dynamic_batching: {enabled: true, max_tokens: "
     "8}}}}",
     "data_efficiency.data_sampling.dynamic_batching"},
    {"{data_efficiency: {enabled: true, data_routing: {enabled: true, random_ltd: {enabled: true, random_ltd_schedule: "
     "{min_value: 1, max_value: 2, schedule_config: {require_steps: 1, seq_per_step: 1}}, layer_token_lr_schedule: "
     "{enabled: true}}}}}",
     "data_efficiency.data_routing.random_ltd.layer_token_lr_schedule"},
    {"{autotuning: {enabled: true}}", "autotuning"},
    {"{weight_quantization: {quantized_initialization: {num_bits: 4}}}",
     "weight_quantization.quantized_initialization"},
    {"{eigenvalue: {enabled: true}}", "eigenvalue"},
    {"{quantize_training: {}}", "quantize_training"},
    {"{graph_harvesting: true}", "graph_harvesting"},
};

class UnsupportedFeature : public ::testing::TestWithParam<Refused> {};

TEST_P(UnsupportedFeature, IsRefusedByName) {
  const DsConfig config = parse_text(GetParam().text);
  const auto features = unsupported_features(config);
  ASSERT_EQ(features.size(), 1U) << GetParam().text;
  EXPECT_EQ(features[0].path, GetParam().path);
  EXPECT_FALSE(features[0].message.empty());
}

INSTANTIATE_TEST_SUITE_P(Each, UnsupportedFeature, ::testing::ValuesIn(kRefused));

TEST(UnsupportedFeatures, TurnedOffTheyAreFine) {
  EXPECT_TRUE(unsupported_features(
                  parse_text("{zero_optimization: {stage: 2, offload_optimizer: {device: 'none'}}, amp: {enabled: "
                             "false}, flops_profiler: {enabled: false}, pipeline: {stages: 1}, autotuning: {}}"))
                  .empty());
}

TEST(UnsupportedFeatures, AllAreNamedTogether) {
  try {
    require_supported(parse_text("{zero_optimization: {zeropp_loco_param: {}}, autotuning: {enabled: true}}"));
    FAIL() << "accepted";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(),
                AllOf(HasSubstr("asks for 2 features"), HasSubstr("zero_optimization.zeropp_loco_param: not in this"),
                      HasSubstr("remove it"), HasSubstr("autotuning")));
  }
}

}  // namespace
}  // namespace ds::engine::config
