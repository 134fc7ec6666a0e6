#include "dsengine/config_efficiency.h"

#include <map>
#include <string>

#include "config/compression_rules.h"
#include "config/describe.h"
#include "config/difficulty_checks.h"
#include "config/sparsity_section.h"

namespace ds::engine::config {
namespace {

using SparsityMode = ops::SparsityMode;

const std::map<std::string, SparsityMode> kSparsityModes = {{"dense", SparsityMode::kDense},
                                                            {"fixed", SparsityMode::kFixed},
                                                            {"variable", SparsityMode::kVariable},
                                                            {"bigbird", SparsityMode::kBigBird},
                                                            {"bslongformer", SparsityMode::kBSLongformer},
                                                            {"sliding_window", SparsityMode::kSlidingWindow}};

void describe(JsonFields& json, LayerReductionSection& s) {
  json.field("enabled", s.enabled);
  json.field("keep_number_layer", s.keep_number_layer);
  json.field("module_name_prefix", s.module_name_prefix);
  json.field("teacher_layer", s.teacher_layer);
  json.field("other_module_name", s.other_module_name);
}

void describe(JsonFields& json, CompressionMethodSection& s) {
  json.field("shared_parameters", s.shared_parameters);
  json.field("different_groups", s.different_groups);
  if (!json.reading() || !s.shared_parameters.is_object() || !s.shared_parameters.contains("enabled")) return;
  if (!convert(s.shared_parameters["enabled"], s.enabled)) {
    json.error("shared_parameters",
               cat("expected enabled to be true or false, found ", shown(s.shared_parameters["enabled"])));
  }
}

void check_pattern(JsonFields& json, const SparseAttentionSection& s) {
  if (s.block < 1 || !kSparsityModes.contains(s.mode)) return;  // said already
  const std::string problem = ops::problem_of(pattern_of(s));
  if (problem.empty()) return;
  const size_t end = problem.find(": ");
  json.error(problem.substr(0, end), problem.substr(end + 2));
}

}  // namespace

ops::SparsityPattern pattern_of(const SparseAttentionSection& s) {
  return {.mode = kSparsityModes.at(s.mode),
          .block = s.block,
          .different_layout_per_head = s.different_layout_per_head,
          .unidirectional = s.attention == "unidirectional",
          .num_local_blocks = s.num_local_blocks,
          .num_global_blocks = s.num_global_blocks,
          .horizontal_global_attention = s.horizontal_global_attention,
          .num_different_global_patterns = s.num_different_global_patterns,
          .num_random_blocks = s.num_random_blocks,
          .local_window_blocks = s.local_window_blocks,
          .global_block_indices = s.global_block_indices,
          .global_block_end_indices = s.global_block_end_indices,
          .num_sliding_window_blocks = s.num_sliding_window_blocks};
}

void describe(JsonFields& json, ProgressiveLayerDropSection& s) {
  json.field("enabled", s.enabled);
  json.field("theta", s.theta);
  json.field("gamma", s.gamma, at_least(0));
  if (json.reading() && s.enabled && (s.theta <= 0 || s.theta > 1)) {
    json.error("theta", cat("expected a probability in (0, 1], found ", s.theta));
  }
}

void describe(JsonFields& json, DifficultySection& s) {
  json.field("total_curriculum_step", s.total_curriculum_step);
  json.field("difficulty_step", s.difficulty_step);
  json.field("root_degree", s.root_degree);
  json.field("difficulty", s.difficulty);
  json.field("max_step", s.max_step);
}

void describe(JsonFields& json, CurriculumLearningSection& s) {
  json.field("enabled", s.enabled);
  json.field("curriculum_type", s.curriculum_type);
  json.field("min_difficulty", s.min_difficulty);
  json.field("max_difficulty", s.max_difficulty);
  json.field("schedule_type", s.schedule_type);
  json.section("schedule_config", s.schedule_config, describe, UnknownKeys::kWarn);
  read_schedule(json, s);
}

void describe(JsonFields& json, ElasticitySection& s) {
  json.field("enabled", s.enabled);
  json.field("max_train_batch_size", s.max_train_batch_size, above(0));
  json.field("micro_batch_sizes", s.micro_batch_sizes);
  json.field("min_gpus", s.min_gpus, above(0));
  json.field("max_gpus", s.max_gpus, above(0));
  json.field("num_gpus_per_node", s.num_gpus_per_node, above(0));
  json.field("model_parallel_size", s.model_parallel_size, above(0));
  json.field("min_time", s.min_time, at_least(0));
  json.field("prefer_larger_batch", s.prefer_larger_batch);
  json.field("ignore_non_elastic_batch_info", s.ignore_non_elastic_batch_info);
  json.field("version", s.version);
  if (!json.reading() || !s.enabled) return;
  if (!s.max_train_batch_size)
    json.error("max_train_batch_size", "expected an integer > 0, since elasticity is enabled");
  if (!s.micro_batch_sizes)
    json.error("micro_batch_sizes", "expected a list of integers > 0, since elasticity is enabled");
}

void describe(JsonFields& json, SparseAttentionSection& s) {
  json.choice("mode", s.mode, {"dense", "fixed", "variable", "bigbird", "bslongformer", "sliding_window"});
  json.field("block", s.block, above(0));
  json.field("different_layout_per_head", s.different_layout_per_head);
  json.field("num_local_blocks", s.num_local_blocks);
  json.field("num_global_blocks", s.num_global_blocks);
  json.choice("attention", s.attention, {"bidirectional", "unidirectional"});
  json.field("horizontal_global_attention", s.horizontal_global_attention);
  json.field("num_different_global_patterns", s.num_different_global_patterns);
  json.field("num_random_blocks", s.num_random_blocks);
  json.field("local_window_blocks", s.local_window_blocks);
  json.field("global_block_indices", s.global_block_indices);
  json.field("global_block_end_indices", s.global_block_end_indices);
  json.field("num_sliding_window_blocks", s.num_sliding_window_blocks);
  if (json.reading()) check_pattern(json, s);
}

void describe(JsonFields& json, CompressionTrainingSection& s) {
  json.section("layer_reduction", s.layer_reduction, describe, UnknownKeys::kWarn);
  json.section("weight_quantization", s.weight_quantization, describe, UnknownKeys::kWarn);
  json.section("activation_quantization", s.activation_quantization, describe, UnknownKeys::kWarn);
  json.section("sparse_pruning", s.sparse_pruning, describe, UnknownKeys::kWarn);
  json.section("row_pruning", s.row_pruning, describe, UnknownKeys::kWarn);
  json.section("head_pruning", s.head_pruning, describe, UnknownKeys::kWarn);
  json.section("channel_pruning", s.channel_pruning, describe, UnknownKeys::kWarn);
  if (!json.reading()) return;
  compression_rules(s, [&json](const std::string& path, const std::string& message, bool fatal) {
    fatal ? json.error(path, message) : json.warning(path, message);
  });
}

}  // namespace ds::engine::config
