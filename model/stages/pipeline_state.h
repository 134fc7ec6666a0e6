// The state of a model that is a pipeline: this rank's stages, the ranks it runs them with, the schedules.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "config/plan/plan.h"
#include "dsengine/comm.h"
#include "dsengine/config.h"
#include "dsengine/data_loader.h"
#include "dsengine/pipeline.h"
#include "model/stages/tied_weights.h"
#include "pipeline/schedule/schedule.h"
#include "pipeline/stage_runner.h"
#include "zero/parameter_bucket.h"

namespace ds::engine {

// The stages of a pipeline that this rank has, and how it runs them.
struct PipelineState {
  std::shared_ptr<pipeline::PipelineModule> module;
  std::shared_ptr<comm::Communicator> ranks;  // this rank's pipeline: one rank of each data-parallel group
  std::vector<TiedWeights> tied;
  std::vector<int> tied_of_bucket;                // by bucket: its place in `tied`, or -1
  std::vector<std::vector<char>> bucket_in_pass;  // by stage: the buckets that its backward gives gradients to
  std::unique_ptr<pipeline::StageRunner> runner;
  pipeline::BatchSource source;                   // where train_batch() without a source reads
  std::map<int, pipeline::Schedule> schedules;    // for training, by number of micro-batches
  std::map<int, pipeline::Schedule> evaluations;  // forward-only, by number of micro-batches

  int stages() const { return static_cast<int>(module->bounds().size()) - 1; }
  // Whether this rank stands for a bucket in what is counted once over the pipeline.
  bool counts(size_t bucket) const {
    const int index = tied_of_bucket[bucket];
    return index < 0 || tied[static_cast<size_t>(index)].is_first();
  }
  // Whether a parameter or buffer of this name is a copy of what the first rank of its tie has.
  bool is_copy(const std::string& name) const { return is_tied_copy(tied, name); }
};

// Whether this rank has the first, or the last, of all stages. Null: the model is no pipeline, and each rank has both.
inline bool has_first_stage(const PipelineState* pipeline) {
  return pipeline == nullptr || pipeline->module->placement().front() == pipeline->ranks->rank();
}
inline bool has_last_stage(const PipelineState* pipeline) {
  return pipeline == nullptr || pipeline->module->placement().back() == pipeline->ranks->rank();
}

// Builds the layers of this rank. Collective over `ranks`, the pipeline's, and over `world`, all pipelines.
std::unique_ptr<PipelineState> build_pipeline(const std::shared_ptr<pipeline::PipelineModule>& module,
                                              const std::shared_ptr<comm::Communicator>& ranks,
                                              const config::DsConfig& config, const Plan& plan, at::Device device,
                                              comm::Communicator& world);

// Throws ConfigError for a loader whose last batch of an epoch is shorter than the others, where stages agree on one
// shape: the rank that has it would throw at the end of the epoch, and the others wait for it. `what`: for the message.
void require_equal_batches(const PipelineState& parts, const DataLoader& loader, const char* what);

// Describes what has to be the same on all ranks: layers, and where they are, as lines "what<TAB>value".
std::string layers_text(const PipelineState& parts);

// Notes which buckets are tied, and which belong to the backward of each stage.
// `trained(parameter)` is the tensor that buckets know a parameter by (model/state/tensor_parts.h).
void note_buckets(PipelineState& parts, const std::vector<zero::ParameterBucket>& buckets,
                  at::Tensor (*trained)(const at::Tensor& parameter));

// Returns the training schedule of so many micro-batches, once it is proved sound.
const pipeline::Schedule& training_schedule(PipelineState& parts, const Plan& plan, int micro_batches);
// Returns the forward-only schedule of so many micro-batches, the one that ds-tool draws.
const pipeline::Schedule& evaluation_schedule(PipelineState& parts, int micro_batches);

}  // namespace ds::engine
