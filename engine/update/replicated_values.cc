#include "engine/update/replicated_values.h"

#include <ATen/core/Generator.h>

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <mutex>
#include <utility>

#include "core/device/readback.h"
#include "core/random_streams.h"
#include "core/text.h"
#include "engine/update/client_state_watch.h"
#include "layers/batch_norm/converted_layers.h"
#include "model/state/shared_buffers.h"
#include "model/state/tensor_parts.h"
#include "zero/partition.h"
#include "zero/value_digest.h"

namespace ds::engine {
namespace {

using ListedValues = std::vector<ReplicatedValue>;

constexpr const char* kDrawsDiffer =
    "Ranks of a tensor axis draw the same random numbers, so that dropout has the same masks on all of them. One of "
    "them has been seeded otherwise, or has drawn more than the others. Seed all ranks of an axis alike, by "
    "torch::manual_seed(seed + engine->communicator().rank()), draw on all of them, and let what one rank draws alone "
    "come from a generator of its own";
constexpr const char* kBuffersDiffer =
    "broadcast_buffers has given all data-parallel ranks the buffers of one after the last backward(), and one rank "
    "has another value by now: change buffers in forward, or after step(), alike on all ranks; else memory has lost a "
    "bit";

// A parameter, or the part of it that a rank keeps, as a run of elements.
struct KeptRun {
  std::string name;
  Segment segment;
};

std::vector<KeptRun> kept_runs(const zero::ParameterBucket& bucket, bool of_slice, int rank) {
  const zero::BucketLayout& layout = bucket.layout();
  std::map<int64_t, const std::string*> names;
  for (size_t i = 0; i < layout.segments.size(); ++i) {
    names[layout.segments[i].parameter] = &bucket.parameters()[i].name;
  }
  std::vector<KeptRun> runs;
  for (const Segment& segment : of_slice ? zero::slice_segments(layout, rank) : layout.segments) {
    runs.push_back({*names.at(segment.parameter), segment});
  }
  return runs;
}

// The runs of what this rank updates of a trainable bucket.
std::vector<KeptRun> own_runs(const ModelState& state, size_t b) {
  return kept_runs(state.buckets[b], state.plan.partition_optimizer, state.ranks.groups.shards->rank());
}

// Whether what this rank keeps of a bucket lies in a file, where it has no memory between its uses.
bool in_file(const ModelState& state, const zero::ParameterBucket& bucket) {
  return bucket.sharded() && state.plan.offload.parameters == zero::Home::kFile;
}

// Adds what this rank keeps of a bucket from step to step, where that is in memory.
void add_kept(const ModelState& state, const zero::ParameterBucket& bucket, bool computed, ListedValues& to) {
  if (in_file(state, bucket)) return;
  const at::Tensor& kept = bucket.kept();
  if (bucket.sharded() && bucket.kept_slice().bits() > 0) {  // elements have no places of their own in the code
    to.push_back({.name = bucket.parameters().front().name, .values = kept});
    return;
  }
  for (const KeptRun& run : kept_runs(bucket, bucket.sharded(), state.ranks.groups.shards->rank())) {
    to.push_back({.name = run.name,
                  .values = kept.narrow(0, run.segment.slice_offset, run.segment.length),
                  .computed = computed});
  }
}

// Whether the master and the states of a bucket can be read after a step, without a wait. In a file they have no memory
// outside of an update, and a delayed update changes them beside the next pass.
bool is_at_hand(const ModelState& state, size_t b) {
  const zero::Offload& offload = state.plan.offload;
  return !state.updates_on_host(b) || (offload.optimizer == zero::Home::kHost && !offload.delayed);
}

// Whether this rank has masters beside the parameters that can be read.
bool has_own_master(const ModelState& state, size_t b) {
  const at::Tensor& master = state.masters[b];
  if (!master.defined() || !is_at_hand(state, b)) return false;
  if (state.updates_on_host(b)) return !master.is_alias_of(state.own_part(b));
  return master.scalar_type() != state.buckets[b].options().dtype();
}

// Returns the states of a bucket that ranks can compare, flat: none of a class of the program's, which only its
// serialize() shows, by a copy on the host.
optimizers::NamedStates readable_states(const ModelState& state, size_t b) {
  if (!state.optimizer.own || !is_at_hand(state, b)) return {};
  if (const auto& kinds = state.optimizer.client_states) {
    const bool is_written = std::any_of(kinds->begin(), kinds->end(), [](const auto& kind) { return kind.is_written; });
    if (is_written) return {};
  }
  return state.optimizer.states(b);
}

// Adds the states that an optimizer of the program's keeps of the parameters of a bucket, where it steps on full
// parameters (stage 0, on ranks that have the whole model) and they are of a class of torch's.
void add_client_states(const ModelState& state, size_t b, ListedValues& to) {
  if (!state.optimizer.steps_on_parameters()) return;
  const auto& entries = state.optimizer.client->state();
  for (const zero::Parameter& parameter : state.buckets[b].parameters()) {
    const auto entry = entries.find(parameter.tensor.unsafeGetTensorImpl());
    if (entry == entries.end() || !entry->second) continue;
    for (const auto& [name, values] : client_tensors(*entry->second)) {
      to.push_back(
          {.name = cat("the optimizer state ", name, " of ", parameter.name), .values = values, .computed = true});
    }
  }
}

// Adds what each rank computes beside the parameters of a bucket: masters, states of the optimizer, and the moving
// average of the weights.
void add_own_state(const ModelState& state, size_t b, ListedValues& to) {
  const std::vector<KeptRun> runs = own_runs(state, b);
  const auto add = [&](const std::string& what, const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.numel() == 0) return;
    if (tensor.dim() != 1 || tensor.numel() != state.own_part(b).numel()) {  // a state of another shape
      to.push_back({.name = cat(what, " of the bucket of ", runs.empty() ? "" : runs.front().name),
                    .values = tensor,
                    .computed = true});
      return;
    }
    for (const KeptRun& run : runs) {
      to.push_back({.name = cat(what, " of ", run.name),
                    .values = tensor.narrow(0, run.segment.slice_offset, run.segment.length),
                    .computed = true});
    }
  };
  if (has_own_master(state, b)) add("the master", state.masters[b]);
  for (const auto& [name, values] : readable_states(state, b)) add(cat("the optimizer state ", name), values);
  add_client_states(state, b, to);
  if (state.average) add("the moving average", state.average->values(b));
}

// The statistics that layers compute over all data-parallel ranks.
void add_statistics(const ModelState& state, ListedValues& to) {
  const auto& ranks = state.ranks.groups.norms;
  if (!ranks) return;
  for (const norm::NamedLayer& layer : norm::batch_norms_of(*state.module)) {
    const auto buffers = layer.module->named_buffers(/*recurse=*/false);
    const at::Tensor* const mean = buffers.find("running_mean");
    if (mean == nullptr || !mean->defined()) continue;
    const auto converted = norm::find_converted(at::Tensor(), *mean);
    if (!converted || converted->group.lock() != ranks) continue;
    for (const auto& buffer : buffers) {
      if (!buffer.value().defined()) continue;
      to.push_back({.name = layer.name + "." + buffer.key(), .values = buffer.value(), .computed = true});
    }
  }
}

// Whether ranks with other parameters beside a common one keep what belongs to it in the same memory. By a ratio each
// of them chooses by the sizes of its own buckets.
bool share_homes(const ModelState& state) { return !state.offloaded || state.plan.offload.ratio >= 1; }

// Appends the group to `all`, unless there is nothing to compare.
void end_group(ReplicatedValues group, std::vector<ReplicatedValues>& all) {
  if (!group.values.empty() && group.ranks->size() > 1) all.push_back(std::move(group));
}

void add_data_ranks(const ModelState& state, bool buffers_shared, std::vector<ReplicatedValues>& all) {
  if (state.ranks.part->size() == 1) return;
  ReplicatedValues ranks{.ranks = state.ranks.part.get(), .among = "data-parallel ranks", .values = {}};
  comm::Communicator* const replicas = state.ranks.groups.replicas.get();
  ReplicatedValues copies{
      .ranks = replicas, .among = "ranks with the same slices (mics_shard_size)", .same_batches = false, .values = {}};
  for (size_t b = 0; b < state.buckets.size(); ++b) {
    const zero::ParameterBucket& bucket = state.buckets[b];
    const bool every_rank_computes = !state.plan.partition_optimizer;
    if (!bucket.sharded()) {
      add_kept(state, bucket, /*computed=*/every_rank_computes || replicas != nullptr, ranks.values);
    } else if (replicas != nullptr) {
      add_kept(state, bucket, /*computed=*/true, copies.values);
    }
    if (every_rank_computes) {
      add_own_state(state, b, ranks.values);
    } else if (replicas != nullptr) {
      add_own_state(state, b, copies.values);
    }
  }
  for (const zero::ParameterBucket& bucket : state.frozen_buckets) {
    if (!bucket.sharded()) {
      add_kept(state, bucket, /*computed=*/false, ranks.values);
    } else if (replicas != nullptr) {
      add_kept(state, bucket, /*computed=*/false, copies.values);
    }
  }
  for (const zero::Parameter& frozen : state.frozen_outside_buckets()) {
    ranks.values.push_back({.name = frozen.name, .values = frozen.tensor});
  }
  add_statistics(state, ranks.values);
  if (buffers_shared && state.ranks.groups.buffers) {
    for (auto& [name, buffer] : named_buffers_of(*state.module)) {
      if (buffer.layout() != at::kStrided) continue;
      ranks.values.push_back({.name = cat("buffer ", name), .values = buffer, .advice = kBuffersDiffer});
    }
  }
  end_group(std::move(ranks), all);
  if (replicas != nullptr) end_group(std::move(copies), all);
}

void add_tensor_axis(const ModelState& state, std::vector<ReplicatedValues>& all) {
  ReplicatedValues axis{
      .ranks = state.tensor->ranks.get(), .among = "ranks of one tensor axis", .same_batches = true, .values = {}};
  for (size_t b = 0; b < state.buckets.size(); ++b) {
    if (state.is_part(b)) continue;
    add_kept(state, state.buckets[b], /*computed=*/true, axis.values);
    if (share_homes(state)) add_own_state(state, b, axis.values);
  }
  for (const zero::Parameter& frozen : state.frozen_outside_buckets()) {
    if (frozen.part == nullptr) axis.values.push_back({.name = frozen.name, .values = frozen.tensor});
  }
  end_group(std::move(axis), all);
}

void add_tied_weights(const ModelState& state, std::vector<ReplicatedValues>& all) {
  const PipelineState& pipeline = *state.pipeline;
  for (size_t tie = 0; tie < pipeline.tied.size(); ++tie) {
    const TiedWeights& tied = pipeline.tied[tie];
    if (!tied.ranks) continue;
    ReplicatedValues copies{.ranks = tied.ranks.get(), .among = "stages of a pipeline", .values = {}};
    bool trained = false;
    for (size_t b = 0; b < state.buckets.size(); ++b) {
      if (pipeline.tied_of_bucket[b] != static_cast<int>(tie)) continue;
      trained = true;
      add_kept(state, state.buckets[b], /*computed=*/true, copies.values);
      if (share_homes(state)) add_own_state(state, b, copies.values);
    }
    if (!trained && state.gatherer == nullptr) {  // frozen
      for (const at::Tensor& parameter : tied.parameters) {
        copies.values.push_back({.name = tied.names.front(), .values = trained_tensor(parameter)});
      }
    }
    for (ReplicatedValue& value : copies.values) {
      value.name = cat("tied weight ", tied.names.front(), ": ", value.name);
    }
    end_group(std::move(copies), all);
  }
}

// The codes of 16-bit numbers: int16, with one code for all NaNs, because which one a kernel writes says nothing.
at::Tensor codes_of(const at::Tensor& numbers) {
  return numbers.view(at::kShort).masked_fill(numbers.isnan(), std::numeric_limits<int16_t>::max());
}

// Whether a run of 16-bit weights is not its master, rounded: int64 [] on the weights' device, 1 or 0. A master in host
// memory is summed there, and the sum alone travels, so that neither waits for the other.
at::Tensor differs_from_master(const at::Tensor& own, const at::Tensor& master) {
  const at::Tensor rounded = codes_of(master.to(own.scalar_type()));
  if (master.device() == own.device()) return rounded.ne(codes_of(own)).any().to(at::kLong);
  return zero::checksum_in_rows(codes_of(own)).ne(sent_to(own.device(), zero::checksum_in_rows(rounded))).to(at::kLong);
}

// Returns the state that the generator had when it was seeded last.
at::Tensor seeded_state(at::Generator generator) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  at::Generator copy = generator.clone();
  copy.set_current_seed(generator.current_seed());
  return copy.get_state();
}

}  // namespace

std::vector<ReplicatedValue> WatchedGenerators::look(c10::Device device) {
  constexpr std::array kNames = {"the default generator of the CPU", "the default generator of the device"};
  const std::vector<at::Generator> generators = default_generators(device);
  std::vector<ReplicatedValue> result;
  std::vector<at::Tensor> states;
  for (size_t i = 0; i < generators.size(); ++i) {
    states.push_back(generator_state(generators[i]));
    const bool drawn = begun() && !states[i].equal(last_[i]) && !states[i].equal(seeded_state(generators[i]));
    result.push_back({.name = kNames.at(i), .values = states[i], .counts = drawn, .advice = kDrawsDiffer});
  }
  last_ = std::move(states);
  return result;
}

std::vector<ReplicatedValues> replicated_values(const ModelState& state, bool buffers_shared) {
  std::vector<ReplicatedValues> all;
  add_data_ranks(state, buffers_shared, all);
  if (state.tensor) add_tensor_axis(state, all);
  if (state.pipeline) add_tied_weights(state, all);
  return all;
}

std::vector<std::pair<std::string, at::Tensor>> compared_with_masters(const ModelState& state) {
  std::vector<std::pair<std::string, at::Tensor>> result;
  for (size_t b = 0; b < state.buckets.size(); ++b) {
    if (in_file(state, state.buckets[b]) || !has_own_master(state, b)) continue;
    const at::Tensor own = state.own_part(b);
    if (own.element_size() != sizeof(int16_t)) continue;
    for (const KeptRun& run : own_runs(state, b)) {
      const Segment& s = run.segment;
      result.emplace_back(run.name, differs_from_master(own.narrow(0, s.slice_offset, s.length),
                                                        state.masters[b].narrow(0, s.slice_offset, s.length)));
    }
  }
  return result;
}

}  // namespace ds::engine
