#include "engine/update/replica_watch.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <map>
#include <utility>

#include "comm/agreement.h"
#include "core/check.h"
#include "core/log.h"
#include "layers/batch_norm/converted_layers.h"
#include "model/state/tensor_parts.h"
#include "zero/partition.h"
#include "zero/value_digest.h"

namespace ds::engine {
namespace {

// Collects the numbers of one comparison.
class Numbered {
 public:
  explicit Numbered(c10::Device device) : device_(device) {}

  void add(std::string name, const at::Tensor& number) {
    names_.push_back(std::move(name));
    numbers_.push_back(number.is_cpu() ? sent_to(device_, number) : number);
  }
  // Appends the comparison to `all`, unless there is nothing to compare.
  void end(comm::Communicator* ranks, const char* among, std::vector<ReplicaWatch::Comparison>& all) {
    if (names_.empty() || (ranks != nullptr && ranks->size() == 1)) return;
    all.push_back({.ranks = ranks, .among = among, .names = std::move(names_), .numbers = at::stack(numbers_)});
  }

 private:
  c10::Device device_;
  std::vector<std::string> names_;
  std::vector<at::Tensor> numbers_;
};

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

// Adds what this rank keeps of a bucket from step to step.
void add_kept(const ModelState& state, const zero::ParameterBucket& bucket, Numbered& to) {
  const at::Tensor& kept = bucket.kept();
  if (bucket.sharded() && bucket.kept_slice().bits() > 0) {  // elements have no places of their own in the code
    to.add(bucket.parameters().front().name, zero::device_checksum_of(kept));
    return;
  }
  for (const KeptRun& run : kept_runs(bucket, bucket.sharded(), state.ranks.groups.shards->rank())) {
    to.add(run.name, zero::device_checksum_of(kept.narrow(0, run.segment.slice_offset, run.segment.length)));
  }
}

// Whether this rank has masters beside the parameters, on the device.
bool has_own_master(const ModelState& state, size_t b) {
  return !state.updates_on_host(b) && state.masters[b].defined() &&
         state.masters[b].scalar_type() != state.buckets[b].options().dtype();
}

void add_masters(const ModelState& state, size_t b, Numbered& to) {
  for (const KeptRun& run : kept_runs(state.buckets[b], /*of_slice=*/false, 0)) {
    const Segment& s = run.segment;
    to.add(cat("the master of ", run.name),
           zero::device_checksum_of(state.masters[b].narrow(0, s.slice_offset, s.length)));
  }
}

// Adds for each parameter of 16 bits whether an element is another one than its master, rounded.
void add_roundings(const ModelState& state, size_t b, Numbered& to) {
  const at::Tensor own = state.own_part(b);
  if (own.element_size() != sizeof(int16_t) || own.device() != state.masters[b].device()) return;
  const at::Tensor rounded = state.masters[b].to(own.scalar_type());
  const at::Tensor differs = rounded.view(at::kShort).ne(own.view(at::kShort));
  for (const KeptRun& run :
       kept_runs(state.buckets[b], state.plan.partition_optimizer, state.ranks.groups.shards->rank())) {
    const Segment& s = run.segment;
    to.add(run.name, differs.narrow(0, s.slice_offset, s.length).any().to(at::kLong));
  }
}

// The statistics that layers compute over all data-parallel ranks.
void add_statistics(const ModelState& state, Numbered& to) {
  const auto& ranks = state.ranks.groups.norms;
  if (!ranks) return;
  for (const norm::NamedLayer& layer : norm::batch_norms_of(*state.module)) {
    const auto buffers = layer.module->named_buffers(/*recurse=*/false);
    const at::Tensor* const mean = buffers.find("running_mean");
    if (mean == nullptr || !mean->defined()) continue;
    const auto converted = norm::find_converted(at::Tensor(), *mean);
    if (!converted || converted->group.lock() != ranks) continue;
    for (const auto& buffer : buffers) {
      if (buffer.value().defined()) to.add(layer.name + "." + buffer.key(), zero::device_checksum_of(buffer.value()));
    }
  }
}

void compare_over_data(const ModelState& state, std::vector<ReplicaWatch::Comparison>& all) {
  if (state.ranks.part->size() == 1) return;
  Numbered numbers(state.ranks.device);
  Numbered of_copies(state.ranks.device);
  const auto add_bucket = [&](const zero::ParameterBucket& bucket) {
    if (!bucket.sharded()) return add_kept(state, bucket, numbers);
    if (state.ranks.groups.replicas) add_kept(state, bucket, of_copies);
  };
  for (const zero::ParameterBucket& bucket : state.buckets) add_bucket(bucket);
  for (const zero::ParameterBucket& bucket : state.frozen_buckets) add_bucket(bucket);
  for (const zero::Parameter& frozen : state.frozen_outside_buckets()) {
    numbers.add(frozen.name, zero::device_checksum_of(frozen.tensor));
  }
  for (size_t b = 0; b < state.buckets.size() && !state.plan.partition_optimizer; ++b) {
    if (has_own_master(state, b)) add_masters(state, b, numbers);
  }
  add_statistics(state, numbers);
  numbers.end(state.ranks.part.get(), "data-parallel ranks", all);
  of_copies.end(state.ranks.groups.replicas.get(), "ranks with the same slices (mics_shard_size)", all);
}

// Collects all that is to be compared, in an order that all ranks of each group have.
std::vector<ReplicaWatch::Comparison> comparisons_of(const ModelState& state) {
  std::vector<ReplicaWatch::Comparison> all;
  const c10::Device device = state.ranks.device;
  const bool in_files = state.plan.offload.parameters == zero::Home::kFile;
  if (!in_files) compare_over_data(state, all);
  if (state.tensor && !in_files) {
    Numbered whole(device);
    for (size_t b = 0; b < state.buckets.size(); ++b) {
      if (!state.is_part(b)) add_kept(state, state.buckets[b], whole);
    }
    const size_t before = all.size();
    whole.end(state.tensor->ranks.get(), "ranks of one tensor axis", all);
    if (all.size() > before) all.back().by_rounding = true;
  }
  if (state.pipeline && state.gatherer == nullptr) {
    for (const TiedWeights& tied : state.pipeline->tied) {
      if (!tied.ranks) continue;
      Numbered copies(device);
      copies.add(cat("tied weight ", tied.name), zero::device_checksum_of(trained_tensor(tied.parameters.front())));
      copies.end(tied.ranks.get(), "stages of a pipeline", all);
    }
  }
  Numbered roundings(device);
  for (size_t b = 0; b < state.buckets.size() && !in_files; ++b) {
    if (has_own_master(state, b)) add_roundings(state, b, roundings);
  }
  roundings.end(nullptr, "", all);
  return all;
}

// The first letter of the text that a rank tells says how serious the difference is.
constexpr char kError = 'E';
constexpr char kWarning = 'W';

// Whether a comparison has found something: int64 [1] on the device. Collective over its ranks.
at::Tensor problem_in(const ReplicaWatch::Comparison& comparison) {
  const at::Tensor& own = comparison.numbers;
  if (comparison.ranks == nullptr) return own.max().view({1});
  // The largest number of all ranks and, by its complement, the smallest.
  const at::Tensor both = at::cat({own, own.bitwise_not()});
  comparison.ranks->all_reduce(both, comm::ReduceOp::kMax, "checksums of replicas").wait();
  const at::Tensor largest = both.narrow(0, 0, own.numel());
  const at::Tensor smallest = both.narrow(0, own.numel(), own.numel()).bitwise_not();
  return largest.ne(smallest).any().to(at::kLong).view({1});
}

// Says which rank is alone with its number, "is on rank 3 another one than on the 3 ranks like rank 0", or, where most
// ranks have no number in common, two ranks that differ.
std::string odd_ranks(const std::vector<std::pair<int64_t, int64_t>>& number_of_rank) {
  std::map<int64_t, std::vector<int64_t>> ranks_with;
  for (const auto& [rank, number] : number_of_rank) ranks_with[number].push_back(rank);
  const auto most = std::max_element(ranks_with.begin(), ranks_with.end(),
                                     [](const auto& a, const auto& b) { return a.second.size() < b.second.size(); });
  if (most->second.size() * 2 <= number_of_rank.size()) {
    const auto& [first_rank, first] = number_of_rank.front();
    const auto other =
        std::find_if(number_of_rank.begin(), number_of_rank.end(), [&](const auto& of) { return of.second != first; });
    return cat("is not the same on ranks ", first_rank, " and ", other->first);
  }
  const auto odd = std::find_if(number_of_rank.begin(), number_of_rank.end(),
                                [&](const auto& of) { return of.second != most->first; });
  return cat("is on rank ", odd->first, " another one than on the ", most->second.size(), " ranks like rank ",
             most->second.front());
}

}  // namespace

ReplicaWatch::ReplicaWatch(const ModelState& state, ModelConsistency& consistency, int64_t every)
    : state_(state), consistency_(consistency), every_(every) {
  // Ranks of ZeroOneAdam have weights of their own between its meetings.
  if (state.optimizer.own && state.optimizer.own->name() == "ZeroOneAdam") every_ = 0;
  if (!state.plan.trains) every_ = 0;
}

void ReplicaWatch::step_made(int64_t step) {
  if (every_ == 0 || step % every_ != 0) return;
  const at::NoGradGuard no_grad;
  state_.access->wait_all();
  begun_.emplace(Round{.step = step, .comparisons = comparisons_of(state_), .problem = {}});
  at::Tensor problem = at::zeros({1}, at::TensorOptions(state_.ranks.device).dtype(at::kLong));
  for (const Comparison& comparison : begun_->comparisons) problem = at::maximum(problem, problem_in(comparison));
  comm::Communicator& world = *state_.ranks.world;
  if (world.size() > 1) world.all_reduce(problem, comm::ReduceOp::kMax, "whether replicas differ").wait();
  begun_->problem = Readback(problem);
  if (state_.ranks.device.is_cpu()) judge();
}

void ReplicaWatch::judge() {
  if (!begun_) return;
  const Round round = *std::exchange(begun_, std::nullopt);
  if (round.problem.numbers().item<int64_t>() == 0) return;
  std::string own;
  for (const Comparison& comparison : round.comparisons) {
    const std::string found = difference_in(comparison);
    if (!found.empty() && (own.empty() || own.front() == kWarning)) {
      own = cat(comparison.by_rounding ? kWarning : kError, found);
    }
  }
  const std::vector<std::string> texts =
      comm::texts_of_ranks(own, state_.ranks.device, *state_.ranks.world, "replicas that differ");
  const auto first = [&](char kind) {
    const auto found = std::find_if(texts.begin(), texts.end(),
                                    [kind](const std::string& text) { return !text.empty() && text.front() == kind; });
    return found == texts.end() ? std::string() : found->substr(1);
  };
  const std::string error = first(kError);
  if (error.empty()) {
    if (state_.ranks.world->rank() == 0 && !std::exchange(warned_, true)) {
      log::warning("check_replicas: after step ", round.step, ", ", first(kWarning),
                   ". Each rank of the axis computes them by itself, from the same gradients: where kernels add in ",
                   "another order, or processors are of several kinds, they part by rounding (\"deterministic\": true ",
                   "chooses kernels that do not); else a bit of memory is lost, or a program has changed them on one ",
                   "rank. Training goes on (said once)");
    }
    return;
  }
  consistency_.slice_updated();  // what ranks have is no longer one model
  throw UsageError(
      cat("check_replicas: after step ", round.step, ", ", error,
          ". Something has changed on one rank alone: a program that changes parameters or buffers outside of ",
          "engine->gathered_parameters(parameters, /*modifier_rank=*/0), a hook or an optimizer that draws random ",
          "numbers, kernels that add in another order on another kind of processor, or memory that has lost a bit. ",
          "Load a checkpoint of an earlier step to go on; a smaller check_replicas finds the step, 0 compares ",
          "nothing (this is rank ", state_.ranks.world->rank(), ")"));
}

std::string ReplicaWatch::difference_in(const Comparison& comparison) const {
  const at::Tensor host = comparison.numbers.cpu();
  const auto* const numbers = host.const_data_ptr<int64_t>();
  const size_t count = comparison.names.size();
  const int world_rank = state_.ranks.world->rank();
  const auto more = [](size_t differing) {
    return differing == 1 ? std::string() : cat(" (and ", differing - 1, " more)");
  };
  if (comparison.ranks == nullptr) {
    const auto wrong = static_cast<size_t>(std::count_if(numbers, numbers + count, [](int64_t n) { return n != 0; }));
    if (wrong == 0) return {};
    const auto first =
        static_cast<size_t>(std::find_if(numbers, numbers + count, [](int64_t n) { return n != 0; }) - numbers);
    return cat("parameter ", comparison.names[first], more(wrong), " of rank ", world_rank,
               " is not its master, rounded");
  }
  std::vector<int64_t> own = {world_rank};
  own.insert(own.end(), numbers, numbers + count);
  const std::vector<int64_t> all =
      comm::numbers_of_ranks(*comparison.ranks, state_.ranks.device, own, "checksums of replicas that differ");
  std::string text;
  size_t differing = 0;
  for (size_t i = 0; i < count; ++i) {
    std::vector<std::pair<int64_t, int64_t>> number_of_rank;
    for (size_t at = 0; at < all.size(); at += own.size()) number_of_rank.emplace_back(all[at], all[at + 1 + i]);
    const auto same = [&](const auto& of) { return of.second == number_of_rank.front().second; };
    if (std::all_of(number_of_rank.begin(), number_of_rank.end(), same)) continue;
    if (++differing == 1) text = cat(comparison.names[i], " ", odd_ranks(number_of_rank));
  }
  return differing == 0 ? text : cat("of the ", comparison.among, ", ", text, more(differing));
}

}  // namespace ds::engine
