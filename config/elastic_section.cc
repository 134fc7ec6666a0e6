#include "config/parse_steps.h"

#include <algorithm>

#include "config/elastic_batch.h"
#include "core/check.h"
#include "core/json/json_convert.h"
#include "core/json/parse_json.h"

namespace ds::engine::config {
namespace {

constexpr const char* kSection = "/elasticity";

void compare_with_scheduler(const DsConfig& config, const std::string& scheduled, JsonProblems& problems) {
  const auto seen = parse_json<nlohmann::ordered_json>(scheduled, nullptr, /*allow_exceptions=*/false);
  if (!seen.is_object()) {
    problems.error(kSection,
                   "the environment variable DEEPSPEED_ELASTICITY_CONFIG is no JSON object; unset it, or set "
                   "it to this section");
    return;
  }
  ElasticitySection other;
  const auto read = [&](const char* key, auto& value) {
    if (seen.contains(key)) convert(seen[key], value);
  };
  int64_t batch = 0;
  std::vector<int64_t> micro_batches;
  read("max_train_batch_size", batch);
  read("micro_batch_sizes", micro_batches);
  read("version", other.version);
  const auto differ = [&](const char* key, const auto& here, const auto& there) {
    problems.error(cat(kSection, "/", key),
                   cat("found ", here, ", but the scheduler of the job has seen ", there,
                       " (DEEPSPEED_ELASTICITY_CONFIG); it may start world sizes that are not valid here. Submit the "
                       "job with the same section"));
  };
  const ElasticitySection& own = config.elasticity;
  const auto shown_list = [](const std::vector<int64_t>& list) { return nlohmann::ordered_json(list).dump(); };
  if (*own.max_train_batch_size != batch) differ("max_train_batch_size", *own.max_train_batch_size, batch);
  if (*own.micro_batch_sizes != micro_batches) {
    differ("micro_batch_sizes", shown_list(*own.micro_batch_sizes), shown_list(micro_batches));
  }
  if (own.version != other.version) differ("version", own.version, other.version);
}

// The stages of a pipeline times the ranks that share a layer.
void check_model_parallel_size(const DsConfig& config, JsonProblems& problems) {
  const int64_t given = config.elasticity.model_parallel_size;
  const int64_t stages = config.pipeline.stages.value_or(1);
  const int64_t tensor = config.tensor_parallel.size();
  if (given == 1 || given == stages * tensor) return;
  problems.error(
      cat(kSection, "/model_parallel_size"),
      cat("expected 1",
          stages > 1   ? cat(" or the ", stages, " stages of the pipeline")
          : tensor > 1 ? " or"
                       : "",
          tensor > 1 ? cat(stages > 1 ? " x " : " ", tensor, " ranks of tensor_parallel") : "", ", found ", given));
}

void warn_of_replaced(const DsConfig& config, const char* key, int64_t size, JsonProblems& problems) {
  if (!config.given(key)) return;
  problems.warning(cat("/", key), cat("is ignored, elasticity sets it to ", size));
}

}  // namespace

void resolve_elastic_batch(DsConfig& config, const char* scheduled, JsonProblems& problems) {
  const ElasticitySection& section = config.elasticity;
  if (!section.max_train_batch_size || !section.micro_batch_sizes) return;  // an error already
  if (scheduled != nullptr) compare_with_scheduler(config, scheduled, problems);
  check_model_parallel_size(config, problems);
  try {
    config.elastic = elastic_batch(section, config.dp_world_size);
  } catch (const ConfigError& error) {
    problems.error(kSection, error.what());
    return;
  }
  const ElasticBatch& sizes = *config.elastic;
  config.train_batch_size = sizes.train;
  config.train_micro_batch_size_per_gpu = sizes.micro;
  config.gradient_accumulation_steps = sizes.accumulation;
  warn_of_replaced(config, "train_batch_size", sizes.train, problems);
  warn_of_replaced(config, "train_micro_batch_size_per_gpu", sizes.micro, problems);
  warn_of_replaced(config, "gradient_accumulation_steps", sizes.accumulation, problems);
  if (std::binary_search(sizes.valid.begin(), sizes.valid.end(), config.dp_world_size)) return;
  problems.warning(kSection, cat(config.dp_world_size, " data-parallel ranks train with a batch of ", sizes.train,
                                 ", not with the ", sizes.train_of_valid, " of the valid world sizes (nearest: ",
                                 nearest_sizes(sizes.valid, config.dp_world_size), "); version 0.1 refuses them"));
}

}  // namespace ds::engine::config
