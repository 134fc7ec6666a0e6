#include "zero/sliced_parameters.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <numeric>

#include "core/check.h"
#include "core/memory/storage_memory.h"
#include "core/op_interceptor.h"
#include "core/without_stack.h"
#include "zero/parameter.h"

namespace ds::zero {
namespace {

const void* storage_of(const at::Tensor& tensor) { return tensor.storage().unsafeGetStorageImpl(); }

void take_memory(const at::Tensor& parameter) {
  const c10::DeviceGuard guard(parameter.device());
  const size_t bytes = parameter.nbytes();
  try {
    give_storage(parameter, c10::GetAllocator(parameter.device().type())->allocate(bytes), bytes);
  } catch (const std::exception& error) {
    throw ConfigError(cat("zero::Init: no memory for a parameter of ", bytes, " bytes that an operator reads: ",
                          without_stack(error.what()), ". Reduce InitOptions::max_live, or use more ranks"));
  }
}

// Flat on `device`, with zeros up to an even part for every rank; a copy where that needs one.
at::Tensor padded(const at::Tensor& parameter, int64_t numel, at::Device device) {
  const at::Tensor flat = parameter.detach().view({-1});
  if (flat.numel() == numel) return flat.to(device);
  at::Tensor copy = at::empty({numel}, flat.options().device(device));
  copy.narrow(0, 0, flat.numel()).copy_(flat);
  copy.narrow(0, flat.numel(), numel - flat.numel()).zero_();
  return copy;
}

}  // namespace

bool can_be_sliced(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && tensor.is_floating_point() && !tensor.is_meta() && tensor.is_contiguous() &&
         tensor.storage_offset() == 0 && tensor.storage().nbytes() == tensor.nbytes();
}

SlicedParameters::~SlicedParameters() {
  for (const auto& entry : entries_) {
    if (!entry->whole() && entry->parameter.storage().nbytes() == 0) take_elements(entry->parameter);
  }
}

bool SlicedParameters::contains(const at::Tensor& tensor) const {
  return std::any_of(entries_.begin(), entries_.end(),
                     [&](const auto& entry) { return entry->parameter.is_same(tensor); });
}

void SlicedParameters::adopt(const at::Tensor& parameter) {
  if (!can_be_sliced(parameter) || by_storage_.contains(storage_of(parameter))) return;
  make_room(parameter.numel());
  entries_.push_back(
      std::make_unique<Entry>(parameter, cat("parameter ", adopted_++, " under construction, ", parameter.sizes())));
  Entry& entry = *entries_.back();
  entry.last_use = ++uses_;
  by_storage_[storage_of(parameter)] = &entry;
  add_live(parameter.numel());
}

void SlicedParameters::add_live(int64_t elements) {
  live_ += elements;
  peak_ = std::max(peak_, live_);
}

// Module::to() and set_data() give a parameter other memory without an operator.
void SlicedParameters::find_moved() {
  for (const auto& entry : entries_) {
    const void* const before = entry->storage._unsafe_get_target();
    if (storage_of(entry->parameter) == before) continue;
    by_storage_.erase(before);
    entry->storage = entry->parameter.storage().getWeakStorageImpl();
    by_storage_[storage_of(entry->parameter)] = entry.get();
    if (entry->whole()) continue;
    entry->slice.reset();  // its values are gone
    add_live(entry->parameter.numel());
  }
}

void SlicedParameters::fill(const at::Tensor& tensor) {
  find_moved();
  const auto found = by_storage_.find(storage_of(tensor));
  if (found == by_storage_.end()) return;
  Entry& entry = *found->second;
  entry.used_by = OpInterceptor::outermost_operator();
  entry.last_use = ++uses_;
  if (entry.whole()) return;
  try {
    make_room(entry.parameter.numel());
    gather(entry);
  } catch (...) {
    if (!entry.whole()) take_elements(tensor);  // the operator cannot be told, and there is nothing to read
    throw;
  }
}

// Slices the parameter that was read longest ago, and not by the operator under way, until `elements` more fit under
// the limit.
void SlicedParameters::make_room(int64_t elements) {
  find_moved();
  while (live_ + elements > options_.max_live && !failed_) {
    size_t oldest = entries_.size();
    for (size_t i = 0; i < entries_.size(); ++i) {
      const Entry& entry = *entries_[i];
      if (!entry.whole() || entry.used_by == OpInterceptor::outermost_operator() || !can_be_sliced(entry.parameter)) {
        continue;
      }
      if (oldest == entries_.size() || entry.last_use < entries_[oldest]->last_use) oldest = i;
    }
    if (oldest == entries_.size()) return;
    if (entries_[oldest]->parameter.use_count() == 1) {
      drop(oldest);  // the program has dropped it
    } else {
      slice(*entries_[oldest]);
    }
  }
}

void SlicedParameters::slice(Entry& entry) {
  const at::Tensor& parameter = entry.parameter;
  const int64_t length = (parameter.numel() + ranks_->size() - 1) / ranks_->size();
  const at::Tensor part = at::empty({length}, parameter.options().device(options_.device).requires_grad(false));
  at::Tensor whole;  // rank 0's values count
  if (ranks_->rank() == 0) whole = padded(parameter, length * ranks_->size(), options_.device);
  ranks_->scatter(part, whole, 0, entry.label).wait();
  entry.slice = part;
  take_storage(parameter);
  live_ -= parameter.numel();
}

void SlicedParameters::gather(Entry& entry) {
  const at::Tensor& parameter = entry.parameter;
  take_memory(parameter);
  add_live(parameter.numel());
  const at::Tensor flat = parameter.detach().view({-1});
  const at::Tensor part = std::exchange(entry.slice, at::Tensor());
  try {
    require<CommError>(!failed_, "zero::Init: ", entry.label, " cannot be gathered after the failure before");
    const int64_t numel = part.numel() * ranks_->size();
    const bool in_place = numel == flat.numel() && part.device() == flat.device();
    const at::Tensor all = in_place ? flat : at::empty({numel}, part.options());
    ranks_->all_gather(all, part, entry.label).wait();
    if (!in_place) flat.copy_(all.narrow(0, 0, flat.numel()));
  } catch (...) {
    flat.fill_(std::numeric_limits<double>::quiet_NaN());
    throw;
  }
}

bool SlicedParameters::read_part(const at::Tensor& parameter, const at::Tensor& part) {
  find_moved();
  const auto found = std::find_if(entries_.begin(), entries_.end(),
                                  [&](const auto& entry) { return entry->parameter.is_same(parameter); });
  if (found == entries_.end() || (*found)->whole()) return false;
  const Entry& entry = **found;
  require<CommError>(!failed_, "zero::Init: ", entry.label, " cannot be read after the failure before");
  const int64_t kept = entry.slice.numel();
  const auto common = [&](int64_t keeper, int64_t reader) {
    const int64_t end = std::min({(keeper + 1) * kept, (reader + 1) * part.numel(), parameter.numel()});
    return std::max(end - std::max(keeper * kept, reader * part.numel()), int64_t{0});
  };
  std::vector<int64_t> from;
  std::vector<int64_t> to;
  for (int rank = 0; rank < ranks_->size(); ++rank) {
    from.push_back(common(rank, ranks_->rank()));
    to.push_back(common(ranks_->rank(), rank));
  }
  const int64_t received = std::accumulate(from.begin(), from.end(), int64_t{0});
  const int64_t sent = std::accumulate(to.begin(), to.end(), int64_t{0});
  const bool in_place = part.dtype() == entry.slice.dtype() && part.device() == entry.slice.device();
  const at::Tensor values = part.narrow(0, 0, received);
  const at::Tensor all = in_place ? values : at::empty({received}, entry.slice.options());
  ranks_->all_to_all(all, entry.slice.narrow(0, 0, sent), from, to, entry.label).wait();
  if (!in_place) values.copy_(all);
  part.narrow(0, received, part.numel() - received).zero_();
  return true;
}

void SlicedParameters::drop(size_t index) {
  const Entry& entry = *entries_[index];
  if (entry.whole()) live_ -= entry.parameter.numel();
  by_storage_.erase(entry.storage._unsafe_get_target());
  entries_.erase(entries_.begin() + static_cast<std::ptrdiff_t>(index));
}

void SlicedParameters::forget(const at::Tensor& parameter) {
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (!entries_[i]->parameter.is_same(parameter)) continue;
    drop(i);
    return;
  }
}

void SlicedParameters::forget_unused() {
  for (size_t i = entries_.size(); i-- > 0;) {
    if (entries_[i]->parameter.use_count() == 1) drop(i);
  }
}

bool SlicedParameters::all_whole() const {
  return std::all_of(entries_.begin(), entries_.end(), [](const auto& entry) { return entry->whole(); });
}

int64_t SlicedParameters::held_bytes() const {
  int64_t bytes = 0;
  for (const auto& entry : entries_) {
    if (!entry->whole()) bytes += static_cast<int64_t>(entry->slice.nbytes());
  }
  return bytes;
}

}  // namespace ds::zero
