#include "zero/memory_model.h"

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "core/round_up.h"
#include "zero/partition.h"

namespace ds::zero {
namespace {

constexpr size_t kBucketsInFlight = 2;  // beside the one that fills, see ReductionQueue

// Each is a place in lists of the model here; a job with so many would spend its steps on them alone.
constexpr int64_t kMostBuckets = 1 << 22;

int64_t sum(const std::vector<int64_t>& values) {
  int64_t total = 0;
  for (const int64_t value : values) total += value;
  return total;
}

void require_valid(const MemoryQuestion& question) {
  require<UsageError>(question.stage >= 0 && question.stage <= 3, "memory model: expected a stage from 0 to 3, found ",
                      question.stage);
  require<UsageError>(question.dp > 0, "memory model: expected dp > 0, found ", question.dp);
  require<UsageError>(question.parameters >= 0 && question.bucket_limit > 0 && question.accumulation_steps > 0,
                      "memory model: expected parameters >= 0, bucket_limit > 0 and accumulation_steps > 0, found ",
                      question.parameters, ", ", question.bucket_limit, " and ", question.accumulation_steps);
}

// Bucket sizes: the given ones, or the cut a model without module boundaries would get.
std::vector<int64_t> buckets_of(const MemoryQuestion& question) {
  if (!question.buckets.empty() || question.parameters == 0) return question.buckets;
  const int64_t size = std::min(default_target_elements(question.parameters), question.bucket_limit);
  require<ConfigError>(question.parameters / size < kMostBuckets, "memory model: ", question.parameters,
                       " parameters in buckets of ", size, " elements: expected fewer than ", kMostBuckets,
                       " buckets; raise zero_optimization.reduce_bucket_size, and at stage 3 ",
                       "stage3_max_live_parameters and stage3_max_reuse_distance");
  std::vector<int64_t> buckets;
  for (int64_t left = question.parameters; left > 0; left -= size) buckets.push_back(std::min(size, left));
  const int64_t multiple = (question.stage > 0 ? question.dp : 1) * kAlignment;
  for (int64_t& bucket : buckets) bucket = round_up(bucket, multiple);
  return buckets;
}

bool is_persistent(const MemoryQuestion& question, size_t bucket) {
  return bucket < question.persistent.size() && question.persistent[bucket] != 0;
}

int64_t persistent_elements(const MemoryQuestion& question, const std::vector<int64_t>& buckets) {
  int64_t elements = 0;
  for (size_t b = 0; b < buckets.size(); ++b) elements += is_persistent(question, b) ? buckets[b] : 0;
  return elements;
}

// The elements that GradientReducer holds at stage 2 beside its slices: transient buckets are taken from a pool, the
// last bucket of the model first, stay until two more have been launched, and are used again in the next step.
class TransientBuckets {
 public:
  explicit TransientBuckets(const std::vector<int64_t>& buckets) : buckets_(buckets) {}

  // One step; returns the elements held at its peak.
  int64_t step() {
    int64_t peak = 0;
    const auto complete_oldest = [&] {
      const int64_t buffer = in_flight_.front();
      in_flight_.erase(in_flight_.begin());
      pool_.insert(std::lower_bound(pool_.begin(), pool_.end(), buffer), buffer);
    };
    for (size_t b = buckets_.size(); b-- > 0;) {
      in_flight_.push_back(take(buckets_[b]));
      peak = std::max(peak, buffers_);
      if (in_flight_.size() > kBucketsInFlight) complete_oldest();
    }
    while (!in_flight_.empty()) complete_oldest();
    return peak;
  }

 private:
  int64_t take(int64_t numel) {
    const auto fits = std::lower_bound(pool_.begin(), pool_.end(), numel);
    if (fits != pool_.end()) {
      const int64_t buffer = *fits;
      pool_.erase(fits);
      return buffer;
    }
    if (!pool_.empty()) {
      buffers_ -= pool_.back();
      pool_.pop_back();
    }
    buffers_ += numel;
    return numel;
  }

  const std::vector<int64_t>& buckets_;
  std::vector<int64_t> pool_;       // ascending
  std::vector<int64_t> in_flight_;  // buffers, oldest first
  int64_t buffers_ = 0;             // elements of all buffers, pooled or not
};

// Elements of the buckets that the optimizer updates elsewhere.
int64_t offloaded_elements(const MemoryQuestion& question, const std::vector<int64_t>& buckets) {
  const std::vector<char> chosen = offloaded_buckets(buckets, question.offload);
  int64_t elements = 0;
  for (size_t b = 0; b < buckets.size(); ++b) elements += chosen[b] ? buckets[b] : 0;
  return elements;
}

// Returns the buckets of `all` that are no row-wise tables: only these are gathered, and have buffers of gradients.
std::vector<int64_t> without_tables(const MemoryQuestion& question, const std::vector<int64_t>& all) {
  std::vector<int64_t> buckets;
  for (size_t b = 0; b < all.size(); ++b) {
    if (b >= question.row_wise.size() || question.row_wise[b] == 0) buckets.push_back(all[b]);
  }
  return buckets;
}

int64_t gradient_elements(const MemoryQuestion& question, const std::vector<int64_t>& all) {
  const std::vector<int64_t> buckets = without_tables(question, all);
  const int64_t offloaded = offloaded_elements(question, buckets);
  if (question.stage < 2 || (question.dp == 1 && offloaded == 0)) return sum(buckets);
  TransientBuckets transient(buckets);
  transient.step();  // fills the pool
  return transient.step() + (sum(buckets) - offloaded) / question.dp;
}

int64_t in_pages(int64_t bytes) { return round_up(bytes, int64_t{4096}); }

// Integers, and a float32 scale for 512 of them: core/numbers/block_codec.h, but for short blocks.
int64_t encoded_bytes(int64_t elements, int bits) { return elements * bits / 8 + elements / 512 * 4; }

// The bytes of one reduction of all buckets.
int64_t reduced_bytes(const MemoryQuestion& question, const std::vector<int64_t>& buckets) {
  const int64_t elements = sum(buckets);
  const int64_t others = elements / question.dp * (question.dp - 1);
  if (question.gradient_bits == 0) return others * question.communication_bytes;
  const int64_t inside = question.gradient_node_ranks;
  const int64_t nodes = question.dp / inside;
  const int64_t to_places = elements / inside * (inside - 1);
  const int64_t to_nodes = elements / inside / nodes * (nodes - 1);
  return encoded_bytes(to_places + to_nodes, question.gradient_bits);
}

}  // namespace

ReductionPolicy fitting_policy(ReductionPolicy policy, int owners, bool leaves_device) {
  const bool early = policy == ReductionPolicy::kReduceScatterEveryBackward;
  return early && owners == 1 && !leaves_device ? ReductionPolicy::kReduceScatterAtBoundary : policy;
}

ModelStateBytes predict_model_state(const MemoryQuestion& question) {
  require_valid(question);
  const std::vector<int64_t> buckets = buckets_of(question);
  const int64_t elements = sum(buckets);
  const int64_t owned = question.stage == 0 ? elements : elements / question.dp;
  ModelStateBytes bytes;
  const int64_t persistent = persistent_elements(question, buckets);
  const bool parameters_leave = question.stage == 3 && question.offload.parameters != Home::kDevice;
  int64_t held = elements;
  if (question.stage == 3) held = persistent + (parameters_leave ? 0 : (elements - persistent) / question.dp);
  bytes.parameters = held * question.parameter_bytes + question.frozen_bytes;
  bytes.gradients = gradient_elements(question, buckets) * question.gradient_bytes;
  const int64_t updated_here = owned - offloaded_elements(question, buckets) / question.dp;
  int64_t masters = question.separate_master ? updated_here : 0;
  if (!question.separate_master && parameters_leave) {
    const std::vector<char> elsewhere = offloaded_buckets(buckets, question.offload);
    for (size_t b = 0; b < buckets.size(); ++b) {
      if (!elsewhere[b] && !is_persistent(question, b)) masters += buckets[b] / question.dp;
    }
  }
  bytes.master = masters * question.master_bytes;
  bytes.optimizer = updated_here * question.optimizer_state_bytes;
  if (question.error_feedback && question.dp > 1) bytes.optimizer += (elements + elements / question.dp) * 4;
  bytes.buffers = question.buffer_bytes;
  return bytes;
}

std::vector<char> offloaded_buckets(const std::vector<int64_t>& buckets, const Offload& offload) {
  std::vector<char> chosen(buckets.size(), 0);
  if (offload.optimizer == Home::kDevice) return chosen;
  const double stays = (1.0 - offload.ratio) * static_cast<double>(sum(buckets));
  int64_t before = 0;
  for (size_t b = 0; b < buckets.size(); ++b) {
    before += buckets[b];
    chosen[b] = static_cast<double>(before) > stays * (1 + 1e-9);
  }
  return chosen;
}

bool shares_master(const Offload& offload, bool separate_master) {
  return !separate_master && offload.parameters == Home::kHost && offload.optimizer == Home::kHost &&
         !offload.delayed && !offload.speculative;
}

size_t kept_slices(const std::vector<StoredSlice>& slices, const Offload& offload) {
  if (offload.parameters == Home::kHost) return slices.size();
  size_t kept = 0;
  int64_t left = offload.kept_parameters;
  while (kept < slices.size() && slices[kept].numel <= left) left -= slices[kept++].numel;
  return kept;
}

OffloadedBytes place_parameters(const std::vector<StoredSlice>& slices, const Offload& offload) {
  OffloadedBytes bytes;
  const size_t kept = kept_slices(slices, offload);
  int64_t largest = 0;
  for (size_t i = 0; i < slices.size(); ++i) {
    const int64_t pages = in_pages(slices[i].bytes);
    (i < kept ? bytes.host.parameters : bytes.file) += pages;
    if (i >= kept) largest = std::max(largest, pages);
  }
  bytes.staging = largest * offload.parameter_buffers;
  return bytes;
}

OffloadedBytes predict_offloaded(const MemoryQuestion& question) {
  require_valid(question);
  const Offload& offload = question.offload;
  OffloadedBytes bytes;
  const std::vector<int64_t> buckets = buckets_of(question);
  if (offload.parameters != Home::kDevice && question.stage == 3) {
    std::vector<StoredSlice> slices;
    for (size_t b = 0; b < buckets.size(); ++b) {
      const int64_t numel = buckets[b] / question.dp;
      if (!is_persistent(question, b)) slices.push_back({numel, numel * question.parameter_bytes});
    }
    slices.insert(slices.end(), question.frozen_slices.begin(), question.frozen_slices.end());
    bytes = place_parameters(slices, offload);
  }
  const std::vector<char> chosen = offloaded_buckets(buckets, offload);
  const int64_t moments = question.optimizer_state_bytes / question.state_bytes;
  const auto swapped_pages = [&](int64_t owned) {  // of a slice: master and states
    return in_pages(owned * question.master_bytes) + in_pages(owned * question.state_bytes) * moments;
  };
  int64_t masters = 0;
  int64_t states = 0;
  int64_t longest = 0;
  for (size_t b = 0; b < buckets.size(); ++b) {
    if (!chosen[b]) continue;
    const int64_t owned = buckets[b] / question.dp;
    longest = std::max(longest, owned);
    bytes.host.gradients += in_pages(owned * question.gradient_bytes) * (offload.delayed ? 2 : 1);
    if (offload.delayed || offload.speculative) bytes.staging += in_pages(owned * question.parameter_bytes);
    if (offload.speculative) bytes.staging += swapped_pages(owned);
    if (!shares_master(offload, question.separate_master) || is_persistent(question, b))
      masters += in_pages(owned * question.master_bytes);
    states += in_pages(owned * question.state_bytes) * moments;
  }
  if (offload.speculation_copies_gradient) bytes.staging += in_pages(longest * question.gradient_bytes);
  if (offload.staged) {
    bytes.staging += kWriteBackBuffers * in_pages(longest * question.parameter_bytes) +
                     kArrivals * in_pages(longest * question.gradient_bytes);
  }
  if (offload.optimizer == Home::kFile) {
    bytes.file += masters + states;
    bytes.staging += swapped_pages(longest) * offload.optimizer_buffers;
  } else {
    bytes.host.master = masters;
    bytes.host.optimizer = states;
  }
  return bytes;
}

StepBytes predict_step(const MemoryQuestion& question) {
  require_valid(question);
  if (!question.gather) return {};
  const GatherLimits& limits = *question.gather;
  const std::vector<int64_t> all_buckets = buckets_of(question);
  const std::vector<int64_t> buckets = without_tables(question, all_buckets);
  const int64_t trainable = sum(buckets) - persistent_elements(question, all_buckets);
  int64_t largest = question.largest_frozen_bucket;
  for (const int64_t bucket : buckets) largest = std::max(largest, bucket);
  const int64_t all = trainable + question.frozen_elements;
  // Limits may be as large as an int64: no sum of them.
  const auto bounded = [&](int64_t limit, int64_t beside) {
    return limit >= all ? all : std::min(all, limit + beside);
  };
  const int64_t by_use = bounded(limits.max_reuse_distance, bounded(limits.prefetch, 3 * largest));
  const int64_t by_limit = bounded(std::max(limits.max_live, 2 * largest), 0);
  StepBytes bytes;
  bytes.gathered = std::min(by_use, by_limit) * question.parameter_bytes;
  if (question.node_ranks > 1) bytes.secondary = all / question.node_ranks * question.parameter_bytes;
  return bytes;
}

int64_t predict_sent_bytes(const MemoryQuestion& question) {
  require_valid(question);
  const std::vector<int64_t> buckets = buckets_of(question);
  const int64_t elements = sum(buckets);
  const int64_t slice = elements / question.dp;
  const int64_t others = slice * (question.dp - 1);  // all slices but this rank's
  const int64_t joins = 2 * slice * (question.copies - 1) / question.copies * question.communication_bytes;
  if (question.stage == 0) return 2 * others * question.communication_bytes;
  const int64_t reductions = question.stage >= 2 ? question.accumulation_steps : 1;
  const int64_t reduced = reductions * reduced_bytes(question, buckets) + joins;
  if (question.stage < 3) return reduced + others * question.parameter_bytes;
  const int64_t whole = persistent_elements(question, buckets);
  const int64_t persistent = whole / question.dp * (question.dp - 1);
  int64_t first = (others - persistent) * question.parameter_bytes;
  if (question.weight_bits > 0) first = encoded_bytes(others - persistent, question.weight_bits);
  const int64_t node = (elements - whole) / question.node_ranks * (question.node_ranks - 1);
  const int64_t again = question.node_ranks > 1 ? node * question.parameter_bytes : first;
  return reduced + first + (2 * question.accumulation_steps - 1) * again + persistent * question.parameter_bytes;
}

}  // namespace ds::zero
