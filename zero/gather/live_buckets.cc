#include "zero/gather/live_buckets.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "core/check.h"
#include "core/check_time.h"
#include "core/log.h"
#include "core/memory/storage_memory.h"
#include "core/replay/memory_writes.h"
#include "zero/value_digest.h"

namespace ds::zero {
namespace {

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& caught) {
    return caught.what();
  } catch (...) {
    return "unknown";
  }
}

constexpr const char* kForwardsTogether =
    ". At stage 3 all ranks run the same forwards together, also under NoGradGuard; where they cannot, run them in a "
    "scope of engine->gathered_parameters(model->parameters())";

}  // namespace

std::exception_ptr add_advice(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const CommError& parted) {
    const std::string text = parted.what();
    if (text.find("issued different collectives") == std::string::npos) return error;
    if (text.find(kForwardsTogether) != std::string::npos) return error;
    return std::make_exception_ptr(CommError(text + kForwardsTogether));
  } catch (...) {
    return error;
  }
}

LiveBuckets::LiveBuckets(const std::vector<ParameterBucket*>& buckets, const GatherRoutes& routes, int64_t max_live)
    : gathers_(routes, buckets.at(0)->flat().device()), max_live_(max_live), rank_(routes.slices.rank()) {
  for (size_t b = 0; b < buckets.size(); ++b) {
    Entry entry;
    entry.bucket = buckets[b];
    entry.label = "parameters of bucket " + buckets[b]->describe(b);
    entry.state = entry.sharded() ? State::kReleased : State::kWhole;
    if (entry.sharded()) sharded_ += entry.elements();
    entries_.push_back(std::move(entry));
  }
}

int64_t LiveBuckets::take_peak_elements() { return std::exchange(peak_, live_); }

void LiveBuckets::start(size_t bucket, bool exact) {
  constexpr uint64_t kMixing = 0x9E3779B97F4A7C15;
  const at::RecordFunctionGuard not_intercepted(/*is_enabled=*/false);
  Entry& entry = entries_[bucket];
  digest_ = digest_ * kMixing + bucket + 1;
  entry.exact = gathers_.is_exact(*entry.bucket, exact);
  gathers_.start(*entry.bucket, entry.label, exact, entry.gather);
}

void LiveBuckets::fetch(size_t bucket, bool exact) {
  Entry& entry = entries_[bucket];
  if (out_of_memory() || !allocate(entry)) return;
  entry.state = State::kComing;
  live_ += entry.elements();
  coming_ += entry.elements();
  peak_ = std::max(peak_, live_);
  try {
    const SameValues same;  // the values of before it was released
    start(bucket, exact);
  } catch (...) {
    fail(entry);
  }
}

bool LiveBuckets::allocate(const Entry& entry) {
  try {
    entry.bucket->storage().allocate(memory_);
    return true;
  } catch (const std::exception&) {  // once more, below
  }
  try {
    // With what is free on this rank. No bucket is released for it: other ranks know nothing of this one's memory, and
    // would not take part in the gather that brings the bucket back.
    memory_.clear();
    if (!entry.bucket->flat().is_cpu()) at::accelerator::emptyCache();
    entry.bucket->storage().allocate(memory_);
    return true;
  } catch (const std::exception& error) {
    const std::string text =
        cat("no memory for ", entry.label, ", ", entry.elements(), " elements, with ", live_,
            " elements gathered: ", error.what(), ". Reduce zero_optimization.stage3_max_live_parameters (", max_live_,
            ") or the batch");
    log::error(text);  // now: the operator that fails for it may end the program
    entry.bucket->storage().hide(text);
    no_memory_ = std::make_exception_ptr(ConfigError(text));
    return false;
  }
}

void LiveBuckets::refresh(size_t bucket) {
  Entry& entry = entries_[bucket];
  ensure(entry.whole() && !entry.sharded(), "what is not sharded is whole, and refreshed after updates");
  entry.state = State::kComing;
  try {
    start(bucket, /*exact=*/false);
  } catch (...) {
    entry.state = State::kWhole;
    throw;
  }
}

void LiveBuckets::wait(size_t bucket) {
  Entry& entry = entries_[bucket];
  if (entry.state != State::kComing) return;
  entry.state = State::kWhole;
  if (entry.sharded()) coming_ -= entry.elements();
  const at::RecordFunctionGuard not_intercepted(/*is_enabled=*/false);
  try {
    std::optional<SameValues> same;
    if (entry.sharded()) same.emplace();
    gathers_.wait(*entry.bucket, entry.gather);
  } catch (...) {
    fail(entry);
  }
  if (entry.sharded()) entry.changes.begin(*entry.bucket);
}

void LiveBuckets::wait_all() {
  for (size_t b = 0; b < entries_.size(); ++b) wait(b);
}

// Keeps the exception that is being handled. From then on an operator that reads a parameter throws; one that reads a
// view has NaN as its result.
void LiveBuckets::fail(const Entry& entry) {
  const std::exception_ptr error = std::current_exception();
  keep_error(add_advice(error));
  if (!entry.sharded()) return;
  const at::NoGradGuard no_grad;
  const at::RecordFunctionGuard not_intercepted(/*is_enabled=*/false);
  entry.bucket->flat().fill_(std::numeric_limits<double>::quiet_NaN());
  entry.bucket->storage().hide(
      cat(entry.label, " could not be gathered for an operator: ", text_of(error), kForwardsTogether));
}

void LiveBuckets::release(size_t bucket) {
  Entry& entry = entries_[bucket];
  ensure(entry.whole() && entry.sharded(), "only a whole, sharded bucket is released");
  if (entry.changes.found(*entry.bucket)) keep_changes(bucket);
  entry.state = State::kReleased;
  live_ -= entry.elements();
  entry.bucket->storage().release(memory_);
}

// Copies the changes of a bucket that an operator has changed in place to its slice. All ranks make the same changes,
// which the engine compares.
void LiveBuckets::keep_changes(size_t bucket) {
  const Entry& entry = entries_[bucket];
  const std::string name = entry.changes.name(*entry.bucket);
  if (failed()) return;  // its values are not worth keeping
  if (!entry.exact) {
    keep_error(std::make_exception_ptr(UsageError(cat(
        "parameter ", name, " was changed in place while it was gathered for an operator with the loss ",
        "of zero_quantized_weights or of torch_autocast.lower_precision_safe_modules, which its ",
        "slices must not take over. Change it in a scope of engine->gathered_parameters(..., ", "modifier_rank)"))));
    return;
  }
  const at::RecordFunctionGuard not_intercepted(/*is_enabled=*/false);
  uint64_t digest = 0;
  for (const Parameter& parameter : entry.bucket->parameters()) digest = digest * 31 + digest_of(parameter.tensor);
  // One of each bucket: nobody takes them while a program only evaluates.
  const auto noted = std::find_if(changed_.begin(), changed_.end(),
                                  [&](const ChangedBucket& changed) { return changed.bucket == bucket; });
  if (noted == changed_.end()) {
    changed_.push_back({.bucket = bucket, .parameter = name, .digest = digest});
  } else {
    *noted = {.bucket = bucket, .parameter = name, .digest = noted->digest * 31 + digest};
  }
  if (before_changes_) before_changes_();
  entry.bucket->keep_changes(rank_);
  entry.bucket->drop_secondary();
}

void LiveBuckets::release_all() {
  for (size_t b = 0; b < entries_.size(); ++b) {
    wait(b);
    if (entries_[b].sharded() && entries_[b].whole() && entries_[b].held == 0) release(b);
  }
}

void LiveBuckets::keep_error(const std::exception_ptr& error) {
  if (!failure_) failure_ = error;
}

void LiveBuckets::rethrow() {
  if (no_memory_) std::rethrow_exception(no_memory_);
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

bool is_part_of(const at::Tensor& tensor, const Parameter& parameter) {
  if (!is_same_storage(tensor.storage(), parameter.tensor.storage())) return false;
  const int64_t offset = tensor.storage_offset() - parameter.tensor.storage_offset();
  return offset >= 0 && offset < parameter.tensor.numel();
}

void ChangeWatch::begin(const ParameterBucket& bucket) {
  const CheckTime::Scope time;
  noted_ = false;
  versions_.clear();
  for (const Parameter& parameter : bucket.parameters()) versions_.push_back(parameter.tensor._version());
}

size_t ChangeWatch::changed_version(const ParameterBucket& bucket) const {
  const CheckTime::Scope time;
  size_t i = 0;
  while (i < versions_.size() && bucket.parameters()[i].tensor._version() == versions_[i]) ++i;
  return i;
}

std::string ChangeWatch::name(const ParameterBucket& bucket) const {
  const size_t changed = changed_version(bucket);
  return bucket.parameters()[changed < versions_.size() ? changed : 0].name;
}

}  // namespace ds::zero
