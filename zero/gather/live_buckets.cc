#include "zero/gather/live_buckets.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <optional>
#include <utility>

#include "core/check.h"
#include "core/log.h"
#include "core/replay/memory_writes.h"
#include "core/text.h"
#include "core/trace_span.h"
#include "core/without_stack.h"

namespace ds::zero {

LiveBuckets::LiveBuckets(const std::vector<ParameterBucket*>& buckets, const GatherRoutes& routes, int64_t max_live)
    : gathers_(routes, buckets.at(0)->flat().device()), max_live_(max_live), changes_(routes.slices.rank(), errors_) {
  for (size_t b = 0; b < buckets.size(); ++b) {
    Entry entry;
    entry.bucket = buckets[b];
    entry.label = "parameters of bucket " + buckets[b]->describe(b);
    entry.state = entry.sharded() ? State::kReleased : State::kWhole;
    if (entry.sharded()) counts_.sharded += entry.elements();
    entries_.push_back(std::move(entry));
  }
}

int64_t LiveBuckets::take_peak_elements() { return std::exchange(peak_, counts_.live); }

void LiveBuckets::start(size_t bucket, bool exact) {
  constexpr uint64_t kMixing = 0x9E3779B97F4A7C15;
  const at::RecordFunctionGuard not_intercepted(/*is_enabled=*/false);
  Entry& entry = entries_[bucket];
  digest_ = digest_ * kMixing + bucket + 1;
  ++counts_.started;
  entry.exact = gathers_.is_exact(*entry.bucket, exact);
  gathers_.start(*entry.bucket, entry.label, exact, entry.gather);
}

void LiveBuckets::fetch(size_t bucket, bool exact) {
  Entry& entry = entries_[bucket];
  if (errors_.out_of_memory() || !allocate(entry)) return;
  entry.state = State::kComing;
  counts_.live += entry.elements();
  counts_.coming += entry.elements();
  peak_ = std::max(peak_, counts_.live);
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
        cat("no memory for ", entry.label, ", ", entry.elements(), " elements, with ", counts_.live,
            " elements gathered: ", without_stack(error.what()),
            ". Reduce zero_optimization.stage3_max_live_parameters (", max_live_, ") or the batch");
    log::error(text);  // now: the operator that fails for it may end the program
    entry.bucket->storage().hide(text);
    errors_.keep_no_memory(text);
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
  if (entry.sharded()) counts_.coming -= entry.elements();
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
  errors_.keep(add_advice(error));
  if (!entry.sharded()) return;
  const at::NoGradGuard no_grad;
  const at::RecordFunctionGuard not_intercepted(/*is_enabled=*/false);
  entry.bucket->flat().fill_(std::numeric_limits<double>::quiet_NaN());
  entry.bucket->storage().hide(cat(entry.label, " could not be gathered for an operator: ", text_with_advice(error)));
}

void LiveBuckets::keep_changes(size_t bucket) {
  Entry& entry = entries_[bucket];
  if (!entry.whole() || !entry.sharded() || !entry.changes.found(*entry.bucket)) return;
  changes_.take_over(bucket, *entry.bucket, entry.changes, entry.exact);
  entry.changes.begin(*entry.bucket);
}

void LiveBuckets::release(size_t bucket) {
  Entry& entry = entries_[bucket];
  ensure(entry.whole() && entry.sharded(), "only a whole, sharded bucket is released");
  const TraceSpan span([&entry] { return cat("release ", entry.label); });
  keep_changes(bucket);
  entry.state = State::kReleased;
  counts_.live -= entry.elements();
  entry.bucket->storage().release(memory_);
}

void LiveBuckets::release_all() {
  for (size_t b = 0; b < entries_.size(); ++b) {
    wait(b);
    if (entries_[b].can_be_released()) release(b);
  }
}

}  // namespace ds::zero
