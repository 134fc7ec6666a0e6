#include "model/state/axes.h"

#include <utility>

#include "core/text.h"
#include "model/state/model_state.h"

namespace ds::engine {
namespace {

Axis data_axis(const ModelState& state) {
  Axis axis;
  comm::Communicator* const shards = state.ranks.groups.shards.get();
  if (shards == nullptr || shards->size() == 1) return axis;
  if (state.plan.partition_optimizer) axis.squares = {.ranks = shards};
  // Nobody has the mean of local gradients. Its norm is at most the root mean square of theirs, which clips all ranks
  // by one factor.
  axis.local_squares = {.ranks = shards,
                        .factor = state.plan.average_gradients ? 1.0 / shards->size() : shards->size()};
  return axis;
}

// Replicated parameters count on the first rank of the axis. With sequence parallelism each rank has a partial sum of
// their gradients.
Axis tensor_axis(const ModelState& state) {
  TensorParts& tensor = *state.tensor;
  Axis axis{.name = comm::MeshAxis::kTensor};
  axis.squares = axis.local_squares = {.ranks = tensor.ranks.get()};
  axis.same_data = &tensor;
  for (size_t b = 0; b < state.buckets.size(); ++b) {
    axis.counts.push_back(state.ranks.is_first_of_tensor_axis() || state.is_part(b) ? 1 : 0);
    if (!state.is_summed(b)) continue;
    axis.sums.push_back({.bucket = b, .ranks = tensor.ranks.get(), .label = cat("summed gradients of bucket ", b)});
  }
  return axis;
}

// Ranks of Ranks::part have all squares already, and add up the partial sums of gradients.
Axis sequence_axis(const ModelState& state) {
  return {.name = comm::MeshAxis::kSequence,
          .squares = {},
          .local_squares = {},
          .sums = {},
          .counts = {},
          .same_data = state.tensor.get()};
}

// Weights that several stages use have the gradients of all of them; each of their ranks has the same slice. The sums
// are in the order of the list of tied weights, which all stages have: that of the buckets is another one where a stage
// uses them in another order.
Axis pipe_axis(const ModelState& state) {
  const PipelineState& pipeline = *state.pipeline;
  Axis axis{.name = comm::MeshAxis::kPipe};
  axis.squares = axis.local_squares = {.ranks = pipeline.ranks.get()};
  for (size_t b = 0; b < state.buckets.size(); ++b) axis.counts.push_back(pipeline.counts(b) ? 1 : 0);
  for (size_t k = 0; k < pipeline.tied.size(); ++k) {
    for (size_t b = 0; b < state.buckets.size(); ++b) {
      if (pipeline.tied_of_bucket[b] != static_cast<int>(k)) continue;
      axis.sums.push_back({.bucket = b, .ranks = pipeline.tied[k].ranks.get(), .label = "tied gradients"});
    }
  }
  return axis;
}

}  // namespace

std::unique_ptr<Axes> make_axes(const ModelState& state) {
  auto axes = std::make_unique<Axes>();
  axes->list.push_back(data_axis(state));
  if (state.tensor) {
    axes->list.push_back(state.tensor->cuts_batches ? sequence_axis(state) : tensor_axis(state));
  }
  if (state.pipeline) axes->list.push_back(pipe_axis(state));
  return axes;
}

}  // namespace ds::engine
