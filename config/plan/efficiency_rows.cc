#include <string>

#include "config/plan/plan_rows.h"
#include "core/text.h"

namespace ds::engine {

namespace {

std::string text_of(const efficiency::SampleMetric& metric, const config::CurriculumSection& section) {
  const nlohmann::ordered_json& written = section.curriculum_metrics[metric.name];
  return cat(metric.name, metric.by_percentile ? " percentile " : " ", metric.schedule.min_difficulty, " to ",
             metric.schedule.max_difficulty, ", ", written.value("schedule_type", ""),
             metric.chooses ? "" : ", for the program");
}

}  // namespace

void add_efficiency_rows(const config::DsConfig& config, Plan& plan) {
  const config::CurriculumLearningSection& curriculum = config.curriculum_learning;
  if (curriculum.enabled) {
    plan.rows.push_back({"curriculum",
                         cat(curriculum.curriculum_type, " ", curriculum.schedule.min_difficulty, " to ",
                             curriculum.schedule.max_difficulty, ", ", curriculum.schedule_type.value_or("")),
                         "curriculum_learning.enabled: true; the program cuts its batches"});
  }
  if (config.data_efficiency.chooses_samples()) {
    const config::CurriculumSection& section = config.data_efficiency.data_sampling.curriculum_learning;
    std::string text;
    for (const efficiency::SampleMetric& metric : section.metrics) {
      text += cat(text.empty() ? "" : "; ", text_of(metric, section));
    }
    plan.rows.push_back({"data sampling", text,
                         "data_efficiency.data_sampling.enabled: true; batches are drawn of what all metrics admit"});
  }
  const config::ProgressiveLayerDropSection& layers = config.progressive_layer_drop;
  if (layers.enabled) {
    plan.rows.push_back({"layer drop", cat("theta falls from 1 to ", layers.theta, " by exp(-", layers.gamma, " t)"),
                         "progressive_layer_drop.enabled: true; the program wraps its layers"});
  }
  if (config.data_efficiency.drops_tokens()) {
    const config::RandomLtdSection& tokens = config.data_efficiency.data_routing.random_ltd;
    plan.rows.push_back({"token drop",
                         cat(tokens.random_ltd_layer_id.size(), " layers see ", tokens.kept.min_difficulty, " to ",
                             tokens.kept.max_difficulty, " tokens"),
                         "data_efficiency.data_routing.random_ltd.enabled: true; the program wraps its layers"});
  }
  if (config.sparse_attention) {
    const config::SparseAttentionSection& blocks = *config.sparse_attention;
    plan.rows.push_back({"attention", cat(blocks.mode, ", blocks of ", blocks.block, " tokens, ", blocks.attention),
                         "sparse_attention is there; the program takes it in its layers"});
  }
}

}  // namespace ds::engine
