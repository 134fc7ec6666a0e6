// Aliases, deprecated keys, enumerations, ranges and cross checks of the other sections.
#include <gmock/gmock.h>

#include "config/supported.h"
#include "tests/config/parse_text.h"

namespace ds::engine::config {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(StepsPerPrint, InfinityIsNever) {
  for (const char* text : {"{steps_per_print: Infinity, wall_clock_breakdown: false}", "{steps_per_print: 'inf'}"}) {
    EXPECT_FALSE(parse_text(text).steps_per_print.has_value());
    EXPECT_THAT(warnings_of(text), AllOf(HasSubstr("steps_per_print"), HasSubstr("taken as null")));
  }
  EXPECT_THAT(refusal_of("{gradient_clipping: Infinity, wall_clock_breakdown: false}"),
              AllOf(HasSubstr("gradient_clipping"), HasSubstr("found \"Infinity\"")));
}

TEST(ZeroSection, AliasesAreOneKey) {
  EXPECT_EQ(parse_text("{zero_optimization: {prefetch_bucket_size: 7}}").zero_optimization.stage3_prefetch_bucket_size,
            7);
  EXPECT_THAT(refusal_of("{zero_optimization: {prefetch_bucket_size: 7, stage3_prefetch_bucket_size: 7}}"),
              HasSubstr("is another name of \"stage3_prefetch_bucket_size\""));
}

TEST(ZeroSection, DeprecatedKeysBecomeTheirReplacement) {
  const std::string text = "{zero_optimization: {stage: 2, cpu_offload: true}}";
  EXPECT_EQ(parse_text(text).zero_optimization.optimizer_device(), OffloadDevice::kCpu);
  EXPECT_THAT(warnings_of(text), HasSubstr("deprecated; use \"offload_optimizer\""));
  EXPECT_EQ(parse_text("{zero_optimization: {stage: 3, cpu_offload_param: true}}").zero_optimization.param_device(),
            OffloadDevice::kCpu);
  EXPECT_THAT(refusal_of("{zero_optimization: {cpu_offload: true, offload_optimizer: {device: 'cpu'}}}"),
              HasSubstr("excludes its replacement"));
  EXPECT_TRUE(parse_text("{zero_optimization: {stage3_gather_fp16_weights_on_model_save: true}}")
                  .zero_optimization.stage3_gather_16bit_weights_on_model_save);
}

TEST(ZeroSection, TheFormBeforeSections) {
  const DsConfig config = parse_text("{zero_optimization: true, allgather_size: 5e7}");
  EXPECT_EQ(config.zero_optimization.stage, 1);
  EXPECT_EQ(config.zero_optimization.allgather_bucket_size, 50'000'000);
  EXPECT_EQ(parse_text("{zero_optimization: false}").zero_optimization.stage, 0);
  EXPECT_THAT(warnings_of("{zero_optimization: true}"), HasSubstr("deprecated form; write {\"stage\": 1}"));
}

TEST(ZeroSection, OverlapIsOnAtStage3ByDefault) {
  EXPECT_TRUE(parse_text("{zero_optimization: {stage: 3}}").zero_optimization.overlap_comm);
  EXPECT_FALSE(parse_text("{zero_optimization: {stage: 2}}").zero_optimization.overlap_comm);
  EXPECT_TRUE(parse_text("{zero_optimization: {stage: 2, overlap_comm: true}}").zero_optimization.overlap_comm);
  EXPECT_TRUE(parse_text("{zero_optimization: {stage: 3, overlap_comm: null}}").zero_optimization.overlap_comm);
}

TEST(ZeroSection, LenientNumbersAndStrictRules) {
  const ZeroSection zero =
      parse_text("{zero_optimization: {stage: '2', reduce_bucket_size: 2e8, reduce_scatter: 'yes'}}").zero_optimization;
  EXPECT_EQ(zero.stage, 2);
  EXPECT_EQ(zero.reduce_bucket_size, 200'000'000);
  EXPECT_TRUE(zero.reduce_scatter);
  EXPECT_THAT(refusal_of("{zero_optimization: {stage: 4}}"),
              HasSubstr("zero_optimization.stage: expected an integer >= 0 and <= 3, found 4"));
  EXPECT_THAT(refusal_of("{zero_optimization: {stage: [0, 1]}}"), HasSubstr("found [0,1]"));
  EXPECT_THAT(refusal_of("{zero_optimization: {reduce_bucket_size: 1.5}}"), HasSubstr("found 1.5"));
  EXPECT_THAT(refusal_of("{zero_optimization: {offload_optimizer: {device: 'disk'}}}"),
              HasSubstr("expected one of \"none\", \"cpu\", \"nvme\", found \"disk\""));
  EXPECT_THAT(refusal_of("{zero_optimization: {stage: 2, offload_optimizer: {device: 'nvme'}}}"),
              HasSubstr("needs nvme_path"));
  EXPECT_THAT(refusal_of("{aio: {block_size: 1000}}"), HasSubstr("multiple of 4096"));
  EXPECT_THAT(refusal_of("{zero_optimization: {stage: 3, offload_param: {device: 'nvme'}}}"),
              HasSubstr("needs nvme_path"));
  EXPECT_THAT(refusal_of("{zero_optimization: {zenflow: {topk_ratio: 1}}}"), HasSubstr("> 0 and < 1"));
  EXPECT_THAT(refusal_of("{zero_optimization: {legacy_stage1: true}}"), HasSubstr("legacy_stage1"));
  EXPECT_THAT(refusal_of("{zero_optimization: 3}"), HasSubstr("expected an object"));
}

TEST(ZeroSection, LeafModulesAreAListOrOneName) {
  EXPECT_THAT(parse_text("{zero_optimization: {leaf_module: {names: 'moe'}}}").zero_optimization.leaf_module.names,
              ::testing::ElementsAre("moe"));
}

TEST(Precision, Fp16Rules) {
  EXPECT_THAT(refusal_of("{fp16: {enabled: true}, bf16: {enabled: true}}"), HasSubstr("excludes bf16.enabled"));
  EXPECT_THAT(refusal_of("{fp16: {loss_scale: true}}"), HasSubstr("fp16.loss_scale"));
  EXPECT_THAT(refusal_of("{fp16: {loss_scale: -1}}"), HasSubstr(">= 0"));
  EXPECT_THAT(refusal_of("{fp16: {enabled: true, min_loss_scale: 0}}"), HasSubstr("with a dynamic loss scale"));
  EXPECT_THAT(refusal_of("{fp16: {enabled: true, loss_scale_window: 0}}"), HasSubstr("with a dynamic loss scale"));
  EXPECT_EQ(refusal_of("{fp16: {enabled: true, loss_scale: 128, loss_scale_window: 0}}"), "");
  EXPECT_THAT(refusal_of("{fp16: {enabled: true, fp16_master_weights_and_grads: true}}"), HasSubstr("needs zero"));
  EXPECT_EQ(parse_text("{fp16: {enabled: true}}").model_dtype(), DType::kFloat16);
}

TEST(Precision, Bf16AndItsOldName) {
  EXPECT_EQ(parse_text("{bfloat16: {enabled: true}}").model_dtype(), DType::kBFloat16);
  EXPECT_THAT(warnings_of("{bfloat16: {enabled: true}}"), HasSubstr("deprecated; use \"bf16\""));
  EXPECT_THAT(refusal_of("{bfloat16: {}, bf16: {}}"), HasSubstr("is another name of \"bf16\""));
  EXPECT_THAT(refusal_of("{zero_optimization: {stage: 1}, bf16: {bf16_optimizer_states: true}}"),
              HasSubstr("needs bf16.bf16_master_weights_and_grads"));
}

// DeepSpeed's asserts, by both keys' names.
TEST(Precision, MastersOfSixteenBits) {
  const auto refusal = [](const std::string& fp16_or_bf16, const std::string& zero, const std::string& optimizer) {
    return refusal_of("{" + fp16_or_bf16 + ", zero_optimization: {" + zero + "}, optimizer: {" + optimizer + "}, " +
                      "zero_allow_untested_optimizer: true}");
  };
  const std::string fp16 = "fp16: {enabled: true, fp16_master_weights_and_grads: true}";
  const std::string bf16 = "bf16: {enabled: true, bf16_master_weights_and_grads: true}";
  const std::string all = "bf16: {enabled: true, bf16_master_weights_and_grads: true, bf16_optimizer_states: true}";
  const std::string on_host = "stage: 2, offload_optimizer: {device: 'cpu'}";
  for (const std::string& masters : {fp16, bf16}) {
    EXPECT_EQ(refusal(masters, on_host, "type: 'AdamW'"), "");
    EXPECT_EQ(refusal(masters, on_host, "type: 'Adam', params: {fp32_optimizer_states: false}"), "");
    EXPECT_THAT(refusal(masters, "stage: 2", "type: 'AdamW'"),
                AllOf(HasSubstr("master_weights_and_grads"), HasSubstr("needs zero_optimization.offload_optimizer")));
    EXPECT_THAT(refusal(masters, on_host, "type: 'Lion'"), HasSubstr("needs optimizer.type Adam or AdamW, found Lion"));
    EXPECT_THAT(refusal(masters, on_host, "type: 'AdamW', params: {torch_adam: true}"), HasSubstr("torch_adam"));
    EXPECT_THAT(refusal(masters, "stage: 0", "type: 'AdamW'"), HasSubstr("needs zero_optimization.stage 1, 2 or 3"));
  }
  EXPECT_EQ(refusal(all, "stage: 1", "type: 'Lion'"), "");
  EXPECT_EQ(refusal(all, on_host, "type: 'AdamW'"), "");
  EXPECT_THAT(refusal(all, on_host, "type: 'Lion'"), HasSubstr("Adam or AdamW"));
  EXPECT_THAT(refusal(all, "stage: 1", "type: 'OneBitAdam'"),
              AllOf(HasSubstr("bf16_master_weights_and_grads"), HasSubstr("excludes optimizer.type OneBitAdam")));
  EXPECT_THAT(refusal_of("{fp16: {fp16_master_weights_and_grads: true}, bf16: {bf16_master_weights_and_grads: true}}"),
              HasSubstr("excludes bf16.bf16_master_weights_and_grads"));
  EXPECT_THAT(warnings_of("{bf16: {bf16_master_weights_and_grads: true, bf16_optimizer_states: true}, "
                          "zero_optimization: {stage: 1}}"),
              HasSubstr("means nothing while bf16.enabled is false"));
}

TEST(Precision, DataTypes) {
  EXPECT_EQ(parse_text("{data_types: {grad_accum_dtype: 'fp32'}}").data_types.grad_accum_dtype, DType::kFloat32);
  EXPECT_THAT(refusal_of("{data_types: {grad_accum_dtype: 'fp8'}}"), HasSubstr("\"bf16\""));
  EXPECT_THAT(refusal_of("{data_types: {param_dtype: 'bf16'}}"), HasSubstr("expected fp32"));
  EXPECT_EQ(parse_text("{communication_data_type: 'bf16'}").communication_data_type, DType::kBFloat16);
  EXPECT_THAT(refusal_of("{communication_data_type: 'int8'}"), HasSubstr("communication_data_type"));
}

TEST(Gradients, Rules) {
  EXPECT_EQ(parse_text("{}").gradient_clipping, 1.0);
  EXPECT_THAT(refusal_of("{gradient_clipping: -1}"), HasSubstr(">= 0"));
  EXPECT_THAT(refusal_of("{gradient_predivide_factor: 0}"), HasSubstr("> 0"));
  EXPECT_THAT(refusal_of("{gradient_allreduce_op: 'max'}"), HasSubstr("\"mean\", \"sum\""));
  EXPECT_EQ(parse_text("{gradient_allreduce_op: 'SUM'}").gradient_allreduce_op, GradientAllreduceOp::kSum);
  EXPECT_THAT(refusal_of("{gradient_allreduce_op: 'sum', zero_optimization: {stage: 3}}"), HasSubstr("excludes"));
  EXPECT_THAT(refusal_of("{zero_optimization: {stage: 1, compute_grad_norm: false}}"),
              HasSubstr("set \"gradient_clipping\": 0"));
  EXPECT_EQ(refusal_of("{gradient_clipping: 0, zero_optimization: {stage: 1, compute_grad_norm: false}}"), "");
  EXPECT_THAT(refusal_of("{gradient_clipping: 0, zero_optimization: {compute_grad_norm: false}}"),
              HasSubstr("needs stage 1 or 2"));
  EXPECT_THAT(refusal_of("{managed_gradient_accumulation: false, zero_optimization: {overlap_comm: true}}"),
              HasSubstr("below stage 2"));
}

TEST(Sections, WordsInAnyCase) {
  EXPECT_EQ(parse_text("{checkpoint: {tag_validation: 'fail'}}").checkpoint.tag_validation, TagValidation::kFail);
  EXPECT_THAT(refusal_of("{checkpoint: {tag_validation: 'sometimes'}}"), HasSubstr("\"Ignore\", \"Warn\", \"Fail\""));
}

TEST(Sections, ANormThatIsTrueOrFalseIsTold) {
  EXPECT_THAT(warnings_of("{gradient_clipping: true}"), HasSubstr("found true, which Python takes as 1; write 1.0"));
  EXPECT_THAT(warnings_of("{gradient_clipping: false}"), HasSubstr("write 0.0"));
  EXPECT_EQ(warnings_of("{gradient_clipping: 1}"), "");
}

TEST(Sections, PackedCopiesOfInputsNeedCopiesAndTheirNumber) {
  const auto warning = [](const std::string& keys) {
    return warnings_of("{activation_checkpointing: {contiguous_memory_optimization: true, " + keys + "}}");
  };
  EXPECT_THAT(warning("number_checkpoints: 4"), HasSubstr("no effect: it packs the copies"));
  EXPECT_THAT(warning("partition_activations: true"), HasSubstr("needs number_checkpoints beside it"));
  EXPECT_EQ(warning("cpu_checkpointing: true, number_checkpoints: 4"), "");
}

TEST(Sections, TheFlopsProfilerTurnsTimersOn) {
  EXPECT_TRUE(parse_text("{flops_profiler: {enabled: true}}").wall_clock_breakdown);
}

TEST(Sections, ElasticityReplacesTheBatchSizes) {
  EXPECT_THAT(refusal_of("{train_batch_size: 4, elasticity: {enabled: true, max_train_batch_size: 8, "
                         "micro_batch_sizes: [1, 2]}}"),
              HasSubstr("excludes elasticity.enabled"));
  EXPECT_THAT(refusal_of("{elasticity: {enabled: true}}"),
              AllOf(HasSubstr("elasticity.max_train_batch_size"), HasSubstr("elasticity.micro_batch_sizes")));
}

TEST(Sections, PythonOnlyOnesGetOneWarning) {
  const std::string text =
      "{wandb: {enabled: true, project: 'p'}, compile: {deepcompile: true}, hybrid_engine: {enabled: true}}";
  const DsConfig config = parse_text(text);
  EXPECT_THAT(config.warnings, ::testing::ElementsAre("wandb: works in Python only, has no effect here",
                                                      "compile: works in Python only, has no effect here",
                                                      "hybrid_engine: works in Python only, has no effect here"));
  EXPECT_TRUE(unsupported_features(config).empty());
}

// What a training run of DeepSpeed does not read either.
TEST(Sections, WhatChangesNothingIsTold) {
  EXPECT_THAT(warnings_of("{weight_quantization: {num_bits: 4, post_init_quant: {fc: {num_bits: 4}}}}"),
              HasSubstr("weight_quantization: read by DeepSpeed's inference alone"));
  EXPECT_THAT(warnings_of("{zero_optimization: {stage: 3, elastic_checkpoint: true}}"),
              HasSubstr("zero_optimization.elastic_checkpoint: changes nothing"));
  EXPECT_EQ(warnings_of("{zero_optimization: {stage: 2, elastic_checkpoint: true}}"), "");
  EXPECT_TRUE(unsupported_features(parse_text("{weight_quantization: {}}")).empty());
}

TEST(GradientCompression, HasDefaultsAndRanges) {
  const GradientCompressionSection none = parse_text("{}").gradient_compression;
  EXPECT_EQ(none.method, CompressionMethod::kNone);
  EXPECT_FALSE(none.compresses());
  const GradientCompressionSection found =
      parse_text(
          "{gradient_compression: {method: 'power_sgd', rank: 2, start_step: 10, error_feedback: false,"
          " between_nodes_only: true}}")
          .gradient_compression;
  EXPECT_EQ(found.method, CompressionMethod::kPowerSgd);
  EXPECT_EQ(found.rank, 2);
  EXPECT_EQ(found.start_step, 10);
  EXPECT_FALSE(found.error_feedback);
  EXPECT_TRUE(found.between_nodes_only);
  EXPECT_TRUE(found.compresses());
  EXPECT_FALSE(parse_text("{gradient_compression: {method: 'bf16'}}").gradient_compression.compresses());
  EXPECT_THAT(refusal_of("{gradient_compression: {method: 'zip'}}"),
              AllOf(HasSubstr("\"power_sgd\""), HasSubstr("found \"zip\"")));
  EXPECT_THAT(refusal_of("{gradient_compression: {method: 'top_k', top_k: 2}}"),
              HasSubstr("gradient_compression.top_k: expected a number > 0 and <= 1, found 2"));
  EXPECT_THAT(refusal_of("{gradient_compression: {method: 'top_k', top_k: 0}}"), HasSubstr("found 0"));
  EXPECT_THAT(refusal_of("{gradient_compression: {rank: 0}}"), HasSubstr("gradient_compression.rank"));
  EXPECT_THAT(refusal_of("{gradient_compression: {methd: 'int8'}}"), HasSubstr("method"));
}

TEST(GradientCompression, ExcludesWhatCompressesTheSame) {
  EXPECT_THAT(refusal_of("{gradient_compression: {method: 'int8'}, zero_optimization: {stage: 2,"
                         " zero_quantized_gradients: true}}"),
              AllOf(HasSubstr("gradient_compression.method"), HasSubstr("zero_quantized_gradients")));
  EXPECT_THAT(refusal_of("{gradient_compression: {method: 'int8'}, optimizer: {type: 'OneBitAdam'}}"),
              AllOf(HasSubstr("gradient_compression.method"), HasSubstr("OneBitAdam")));
  EXPECT_THAT(refusal_of("{gradient_compression: {method: 'bf16'}, communication_data_type: 'fp16'}"),
              AllOf(HasSubstr("gradient_compression.method"), HasSubstr("communication_data_type")));
  EXPECT_EQ(refusal_of("{gradient_compression: {method: 'none'}, communication_data_type: 'fp16'}"), "");
}

TEST(GradientCompression, TellsOfKeysThatAMethodDoesNotRead) {
  EXPECT_THAT(warnings_of("{gradient_compression: {method: 'int8', top_k: 0.1}}"),
              HasSubstr("gradient_compression.top_k"));
  EXPECT_THAT(warnings_of("{gradient_compression: {method: 'fp16', start_step: 3}}"),
              HasSubstr("means nothing to method \"fp16\""));
  EXPECT_EQ(warnings_of("{gradient_compression: {method: 'power_sgd', rank: 1, start_step: 3}}"), "");
}

TEST(SdpaBackends, AreNamedOnce) {
  EXPECT_EQ(parse_text("{sdpa_backends: ['cudnn', 'math']}").sdpa_backends->size(), 2U);
  EXPECT_THAT(refusal_of("{sdpa_backends: ['fa3']}"), HasSubstr("found \"fa3\""));
  EXPECT_THAT(refusal_of("{sdpa_backends: ['math', 'math']}"), HasSubstr("has \"math\" twice"));
  EXPECT_THAT(refusal_of("{sdpa_backends: []}"), HasSubstr("at least one backend"));
  EXPECT_THAT(refusal_of("{deterministic: true, sdpa_backends: ['cudnn']}"), HasSubstr("which excludes cuDNN's"));
  EXPECT_EQ(parse_text("{deterministic: true, sdpa_backends: ['cudnn', 'math']}").sdpa_backends->size(), 2U);
  EXPECT_THAT(refusal_of("{fp8: {margin: 17}}"), HasSubstr("margin"));
}

TEST(Fp8Section, SaysWhatBlocksExclude) {
  EXPECT_THAT(refusal_of("{fp8: {enabled: true, granularity: 'block'}}"), HasSubstr("expected \"current\""));
  EXPECT_THAT(refusal_of("{fp8: {enabled: true, granularity: 'block', recipe: 'current', fp8_wgrad: true}}"),
              HasSubstr("expected false with granularity"));
  EXPECT_THAT(refusal_of("{fp8: {enabled: true, format: 'e5m2'}}"), HasSubstr("hybrid"));
  EXPECT_THAT(refusal_of("{fp8: {enabled: true, modules: []}}"), HasSubstr("at least one pattern"));
}

}  // namespace
}  // namespace ds::engine::config
