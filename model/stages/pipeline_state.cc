#include "model/stages/pipeline_state.h"

#include <algorithm>
#include <unordered_map>

#include "core/check.h"
#include "dsengine/activation_checkpoint.h"
#include "pipeline/schedule/schedule_check.h"
#include "pipeline/stage_placement.h"

namespace ds::engine {
namespace {

using pipeline::Schedule;

pipeline::ScheduleShape shape_of(const Plan& plan, int micro_batches) {
  return {.ranks = static_cast<int>(plan.topology.pipe),
          .chunks = static_cast<int>(plan.pipeline->chunks),
          .micro_batches = micro_batches};
}

std::vector<int> placement_of(const Plan& plan) {
  if (plan.pipeline->own) return plan.pipeline->own->rank_of;
  return pipeline::place_stages(pipeline::parse_schedule_kind(plan.pipeline->schedule), shape_of(plan, 1));
}

}  // namespace

std::unique_ptr<PipelineState> build_pipeline(const std::shared_ptr<pipeline::PipelineModule>& module,
                                              const std::shared_ptr<comm::Communicator>& ranks,
                                              const config::DsConfig& config, const Plan& plan, at::Device device,
                                              comm::Communicator& world) {
  const config::PipelineSection& section = config.pipeline;
  const auto recomputed = [](const std::function<pipeline::Tensors(const pipeline::Tensors&)>& region,
                             const pipeline::Tensors& inputs) {
    return recompute::checkpoint_tensors(recompute::checkpoint_options(), region, inputs);
  };
  module->build({.rank = ranks->rank(),
                 .rank_of = placement_of(plan),
                 .ranks = ranks.get(),
                 .world = &world,
                 .device = device,
                 .partition = section.partition == "best" ? "parameters" : section.partition,
                 .activation_checkpoint_interval = section.activation_checkpoint_interval,
                 .seed_layers = section.seed_layers},
                recomputed);
  const std::vector<at::Tensor> own = module->parameters();
  const bool trains = std::any_of(own.begin(), own.end(), [](const at::Tensor& t) { return t.requires_grad(); });
  require(trains, "pipeline: rank ", ranks->rank(),
          " of the pipeline has nothing to train: its stages have no trainable ",
          "parameter. Use fewer pipeline.stages, or another pipeline.partition than \"", section.partition, "\"");
  auto parts = std::make_unique<PipelineState>();
  parts->module = module;
  parts->ranks = ranks;
  parts->tied = make_tied_weights(*module, *ranks);
  return parts;
}

void require_equal_batches(const PipelineState& parts, const DataLoader& loader, const char* what) {
  require<ConfigError>(parts.ranks->size() == 1 || parts.module->options().dynamic_shape || loader.has_equal_batches(),
                       what,
                       ": expected micro-batches of one size, for stages agree on one shape; found that the last ",
                       "of the ", loader.size(), " of an epoch is shorter. Set \"dataloader_drop_last\": true ",
                       "(DataLoaderOptions.drop_last), use a multiple of micro-batch size x data-parallel ranks of ",
                       "samples, or set PipelineOptions.dynamic_shape");
}

std::string layers_text(const PipelineState& parts) {
  std::string text;
  int64_t number = 0;
  for (const pipeline::LayerSpec& layer : parts.module->layers()) {
    text += cat("layer ", number++, " of the pipeline\t", layer.name, ' ', layer.type, ' ', layer.key, '\n');
  }
  text += "first layers of the stages\t";
  for (const int bound : parts.module->bounds()) text += cat(bound, ' ');
  text += "\nranks of the stages\t";
  for (const int rank : parts.module->placement()) text += cat(rank, ' ');
  return text + '\n';
}

void note_buckets(PipelineState& parts, const std::vector<zero::ParameterBucket>& buckets,
                  at::Tensor (*trained)(const at::Tensor& parameter)) {
  std::unordered_map<const void*, size_t> bucket_of;
  for (size_t b = 0; b < buckets.size(); ++b) {
    for (const zero::Parameter& parameter : buckets[b].parameters()) {
      bucket_of[parameter.tensor.unsafeGetTensorImpl()] = b;
    }
  }
  const auto for_each = [&](const std::vector<at::Tensor>& tensors, const auto& use) {
    for (const at::Tensor& tensor : tensors) {
      const auto found = bucket_of.find(trained(tensor).unsafeGetTensorImpl());
      if (found != bucket_of.end()) use(found->second);  // else it is frozen
    }
  };
  parts.tied_of_bucket.assign(buckets.size(), -1);
  for (size_t k = 0; k < parts.tied.size(); ++k) {
    for_each(parts.tied[k].parameters, [&](size_t b) { parts.tied_of_bucket[b] = static_cast<int>(k); });
  }
  for (int stage = 0; stage < parts.stages(); ++stage) {
    std::vector<char>& in_pass = parts.bucket_in_pass.emplace_back(buckets.size(), 0);
    for_each(parts.module->parameters_of(stage), [&](size_t b) { in_pass[b] = 1; });
  }
}

const Schedule& training_schedule(PipelineState& parts, const Plan& plan, int micro_batches) {
  const auto found = parts.schedules.find(micro_batches);
  if (found != parts.schedules.end()) return found->second;
  const std::string& name = plan.pipeline->schedule;
  Schedule schedule = plan.pipeline->own
                          ? *plan.pipeline->own
                          : pipeline::make_schedule(pipeline::parse_schedule_kind(name), shape_of(plan, micro_batches));
  require(schedule.shape.micro_batches == micro_batches, "train_batch: ", name, " is of ", schedule.shape.micro_batches,
          " micro-batches, found ", micro_batches, " gradient accumulation steps");
  pipeline::require_sound(schedule);
  return parts.schedules.emplace(micro_batches, std::move(schedule)).first->second;
}

const Schedule& evaluation_schedule(PipelineState& parts, int micro_batches) {
  const auto found = parts.evaluations.find(micro_batches);
  if (found != parts.evaluations.end()) return found->second;
  Schedule schedule = pipeline::make_inference_schedule(
      {.ranks = parts.ranks->size(), .chunks = parts.stages() / parts.ranks->size(), .micro_batches = micro_batches},
      parts.module->placement());
  pipeline::require_sound(schedule);
  return parts.evaluations.emplace(micro_batches, std::move(schedule)).first->second;
}

}  // namespace ds::engine
