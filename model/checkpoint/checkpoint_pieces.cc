#include "model/checkpoint/checkpoint_pieces.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "core/numbers/block_codec.h"
#include "core/round_up.h"
#include "model/checkpoint/rank_state.h"
#include "pipeline/stage_placement.h"
#include "zero/kept_slice.h"

namespace ds::engine {
namespace {

// The share that this rank writes of something that `count` ranks hold: number `index`. count 0: others write it.
struct Share {
  int index = 0;
  int count = 0;
};

// Returns the range of a share of [begin, end), cut at aligned elements.
std::pair<int64_t, int64_t> part_of(int64_t begin, int64_t end, const Share& share) {
  if (share.count == 0) return {end, end};
  const int64_t part = round_up((end - begin + share.count - 1) / share.count, zero::kAlignment);
  return {std::min(end, begin + share.index * part), std::min(end, begin + (share.index + 1) * part)};
}

// `sliced`: what ranks of the replicas hold, not all with the same part of the model. `whole`: also all ranks of a
// tensor axis hold it. In one folder the axis' first rank writes that.
Share share_of(const ModelState& state, const HostFolders& folders, bool sliced, bool whole) {
  const Ranks& ranks = state.ranks;
  if (folders.apart()) {
    std::vector<int> holders = sliced ? ranks_of_slice(ranks) : ranks_of_part(ranks);
    if (whole) holders = with_tensor_axes(holders, ranks);
    const auto [index, count] = folders.place_among(holders);
    return {index, count};
  }
  if (whole && !ranks.is_first_of_tensor_axis()) return {};
  if (!sliced) return {ranks.part->rank(), ranks.part->size()};
  const std::shared_ptr<comm::Communicator>& replicas = ranks.groups.replicas;
  return replicas ? Share{replicas->rank(), replicas->size()} : Share{0, 1};
}

// Returns the part that this rank writes of what it holds of a bucket.
BucketRange written_range(const ModelState& state, const HostFolders& folders, size_t bucket, bool partitioned,
                          bool whole) {
  BucketRange range = held_range(state, bucket, partitioned);
  const Share share = share_of(state, folders, partitioned, whole);
  std::tie(range.begin, range.end) = part_of(range.begin, range.end, share);
  return range;
}

// Whether each rank of a tensor axis has the full parameter.
bool is_whole(const zero::Parameter& parameter) { return parameter.part == nullptr; }

// Whether the folder gets a tied weight from an earlier stage than this rank's. `tie`: the weight's place in
// PipelineState::tied; -1: it is not tied. With a folder for each host every host keeps what its ranks load: there the
// first stage that has ranks on it with the same of the weight writes it. `sliced`, `whole`: as share_of().
bool has_earlier_stage(const ModelState& state, const HostFolders& folders, int tie, bool sliced, bool whole) {
  if (tie < 0) return false;
  const auto index = static_cast<size_t>(tie);
  if (!folders.apart()) return !state.pipeline->tied[index].is_first();
  const Ranks& ranks = state.ranks;
  const int own = ranks.world->rank();
  const std::vector<int> stages = ranks.mesh->layout().group_of(own, {comm::MeshAxis::kPipe});
  std::vector<int> holders = sliced ? ranks_of_slice(ranks) : ranks_of_part(ranks);
  if (whole) holders = with_tensor_axes(holders, ranks);
  for (const int stage : state.pipeline->module->tied()[index].ranks) {
    const int other = stages[static_cast<size_t>(stage)];
    if (other == own) return false;
    const auto shares = [&](int holder) { return folders.shares(holder + other - own); };
    if (std::any_of(holders.begin(), holders.end(), shares)) return true;
  }
  return false;
}

bool is_written(const ModelState& state, const HostFolders& folders, size_t bucket) {
  if (!folders.apart()) return state.counts_in_stage(bucket);
  const int tie = state.pipeline ? state.pipeline->tied_of_bucket[bucket] : -1;
  return !has_earlier_stage(state, folders, tie, state.plan.partition_optimizer, !state.is_part(bucket));
}

bool is_written(const ModelState& state, const HostFolders& folders, const zero::Parameter& frozen, bool sliced) {
  if (!state.pipeline) return true;
  return !has_earlier_stage(state, folders, tie_of(state.pipeline->tied, frozen.name), sliced, is_whole(frozen));
}

// Elements of a live tensor: in a bucket, or in one of its own.
struct LiveRun {
  at::Tensor flat;
  int64_t position = 0;
  size_t bucket = StatePiece::kNoBucket;
};

class PieceList {
 public:
  void add(const std::string& path, checkpoint::TensorInfo tensor, const Segment& run, LiveRun live) {
    pieces_.push_back({.plan = {path, std::move(tensor), run.parameter_offset, run.length},
                       .flat = std::move(live.flat),
                       .position = live.position,
                       .bucket = live.bucket});
  }
  // Adds a run of a parameter, or of a tensor that has an element for each of the parameter's.
  void add(const std::string& path, const zero::Parameter& parameter, bool frozen, const Segment& run, LiveRun live) {
    const at::ScalarType dtype = live.flat.scalar_type();
    add(path, {.dtype = dtype, .sizes = parameter.whole_sizes(), .frozen = frozen}, run, std::move(live));
    pieces_.back().plan.part = parameter.part;
  }
  std::vector<StatePiece> take() { return std::move(pieces_); }

 private:
  std::vector<StatePiece> pieces_;
};

void add_trained(const ModelState& state, const HostFolders& folders, size_t b, PieceList& pieces) {
  const zero::BucketLayout& layout = state.buckets[b].layout();
  const bool partitioned = state.plan.partition_optimizer;
  const BucketRange range = written_range(state, folders, b, partitioned, !state.is_part(b));
  const auto add = [&](const at::Tensor& flat, const auto& path_of) {
    for_each_run(layout, range, [&](const Segment& run, int64_t position) {
      const zero::Parameter& parameter = state.parameters[static_cast<size_t>(run.parameter)];
      pieces.add(path_of(parameter.name), parameter, /*frozen=*/false, run, {flat, position, b});
    });
  };
  add(state.masters[b], checkpoint::weight_path);
  if (state.average) add(state.average->values(b), checkpoint::ema_path);
  for (const auto& [kind, values] : state.optimizer.states(b)) {
    ensure(values.dim() == 1 && values.numel() == state.masters[b].numel(), "a state has an element for each weight");
    add(values, [&kind = kind](const std::string& name) { return checkpoint::state_path(kind, name); });
  }
}

// Stage 3.
void add_frozen_bucket(const ModelState& state, const HostFolders& folders, size_t f, PieceList& pieces) {
  const zero::ParameterBucket& bucket = state.frozen_buckets[f];
  const bool partitioned = bucket.sharded();
  at::Tensor flat = partitioned ? at::Tensor() : bucket.flat();
  const zero::KeptSlice& kept = bucket.kept_slice();
  if (kept.bits() > 0) {
    flat = at::empty({bucket.layout().slice_numel}, bucket.flat().options().device(kept.tensor().device()));
    kept.use(/*changes=*/false, [&] { BlockCodec(kept.bits()).decode(kept.tensor(), flat); });
  } else if (partitioned) {
    flat = bucket.slice(state.groups_of(state.buckets.size() + f).shards.rank());
  }
  for (const bool whole : {false, true}) {
    const BucketRange range = written_range(state, folders, state.buckets.size() + f, partitioned, whole);
    for_each_run(bucket.layout(), range, [&](const Segment& run, int64_t position) {
      const zero::Parameter& parameter = state.frozen[static_cast<size_t>(run.parameter)];
      if (is_whole(parameter) != whole || !is_written(state, folders, parameter, partitioned)) return;
      pieces.add(checkpoint::weight_path(parameter.name), parameter, /*frozen=*/true, run,
                 {flat, position, state.buckets.size() + f});
    });
  }
}

// Adds the frozen parameters that every rank has whole: all of them below stage 3.
void add_frozen_parameters(const ModelState& state, const HostFolders& folders, PieceList& pieces) {
  int64_t total = 0;
  for (const zero::Parameter& parameter : state.frozen_outside_buckets()) total += parameter.tensor.numel();
  int64_t first = 0;
  for (const zero::Parameter& parameter : state.frozen_outside_buckets()) {
    const int64_t numel = parameter.tensor.numel();
    const Share share = share_of(state, folders, /*sliced=*/false, is_whole(parameter));
    const auto [begin, end] = part_of(0, total, share);
    const int64_t from = std::clamp<int64_t>(begin - first, 0, numel);
    const int64_t to = std::clamp<int64_t>(end - first, 0, numel);
    first += numel;
    const bool empty = numel == 0 && share.index == 0 && share.count > 0;
    if ((from == to && !empty) || !is_written(state, folders, parameter, /*sliced=*/false)) continue;
    pieces.add(checkpoint::weight_path(parameter.name), parameter, /*frozen=*/true,
               {.parameter_offset = from, .length = to - from},
               {parameter.tensor.detach().contiguous().view({-1}), from});
  }
}

void add_memory(const NamedTensors& memory, PieceList& pieces) {
  for (const auto& [path, values] : memory) {
    pieces.add(path, {.dtype = values.scalar_type(), .sizes = values.sizes().vec()}, {.length = values.numel()},
               {values});
  }
}

}  // namespace

BucketRange held_range(const ModelState& state, size_t bucket, bool partitioned) {
  const size_t trained = state.buckets.size();
  const zero::BucketLayout& layout =
      (bucket < trained ? state.buckets[bucket] : state.frozen_buckets[bucket - trained]).layout();
  if (!partitioned) return {0, 0, layout.numel};
  const int64_t begin = layout.slice_numel * state.groups_of(bucket).shards.rank();
  return {begin, begin, begin + layout.slice_numel};
}

void for_each_run(const zero::BucketLayout& layout, const BucketRange& range,
                  const std::function<void(const Segment& run, int64_t position)>& use) {
  for (const Segment& segment : layout.segments) {
    const int64_t begin = std::max(segment.slice_offset, range.begin);
    const int64_t end = std::min(segment.slice_offset + segment.length, range.end);
    if (begin >= end) continue;
    const Segment run = {.parameter = segment.parameter,
                         .parameter_offset = segment.parameter_offset + begin - segment.slice_offset,
                         .slice_offset = begin,
                         .length = end - begin};
    use(run, begin - range.first);
  }
}

std::vector<StatePiece> state_pieces(const ModelState& state, const HostFolders& folders, bool with_frozen) {
  PieceList pieces;
  for (size_t b = 0; b < state.buckets.size(); ++b) {
    if (is_written(state, folders, b)) add_trained(state, folders, b, pieces);
  }
  const bool first = share_of(state, folders, /*sliced=*/false, /*whole=*/false).index == 0;
  add_memory(optimizer_memory(state), pieces);
  const auto begins_bucket = [&](size_t b) {
    const Share share = share_of(state, folders, /*sliced=*/false, !state.is_part(b));
    return is_written(state, folders, b) && share.count > 0 && share.index == 0;
  };
  if (first) add_memory(shared_optimizer_memory(state, begins_bucket), pieces);
  add_memory(compression_memory(state), pieces);
  // Ranks of a tensor axis have parts of a layer, and one history.
  const Share of_layers = share_of(state, folders, /*sliced=*/false, /*whole=*/true);
  if (of_layers.count > 0 && of_layers.index == 0) add_memory(fp8_memory(state), pieces);
  if (!with_frozen) return pieces.take();
  for (size_t f = 0; f < state.frozen_buckets.size(); ++f) add_frozen_bucket(state, folders, f, pieces);
  add_frozen_parameters(state, folders, pieces);
  return pieces.take();
}

void use_bucket(const ModelState& state, size_t bucket, bool changes, const std::function<void()>& use) {
  if (bucket == StatePiece::kNoBucket) return use();
  if (bucket >= state.buckets.size()) {
    return state.frozen_buckets[bucket - state.buckets.size()].kept_slice().use(changes, use);
  }
  state.buckets[bucket].kept_slice().use(changes,
                                         [&] { state.use_master(bucket, changes, [&](const at::Tensor&) { use(); }); });
}

}  // namespace ds::engine
