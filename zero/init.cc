#include "zero/init.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "core/host_memory.h"
#include "core/log.h"

namespace ds::zero {
namespace {

// The Init of this thread: callbacks of at::RecordFunction carry no state.
thread_local Init* building = nullptr;

const void* storage_of(const at::Tensor& tensor) { return tensor.storage().unsafeGetStorageImpl(); }

// Owns its memory alone and is laid out row by row.
bool can_be_sliced(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && tensor.is_floating_point() && !tensor.is_meta() && tensor.is_contiguous() &&
         tensor.storage_offset() == 0 && tensor.storage().nbytes() == tensor.nbytes();
}

// The operator that is about to read cannot be told that there is none (LibTorch swallows what a callback throws).
void take_memory(const at::Tensor& parameter) {
  c10::StorageImpl* storage = parameter.storage().unsafeGetStorageImpl();
  const size_t bytes = parameter.nbytes();
  try {
    storage->set_data_ptr_noswap(storage->allocator()->allocate(bytes));
  } catch (const std::exception& error) {
    log::error("zero::Init: no memory for a parameter of ", bytes, " bytes that an operator reads: ", error.what(),
               ". Reduce InitOptions::max_live, or use more ranks");
    std::terminate();
  }
  storage->set_nbytes(bytes);
}

void give_memory_back(const at::Tensor& parameter) {
  c10::StorageImpl* storage = parameter.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(c10::DataPtr(nullptr, parameter.device()));
  storage->set_nbytes(0);
}

// Flat, with zeros up to an even part for every rank; a copy where that needs one.
at::Tensor padded(const at::Tensor& parameter, int64_t numel) {
  const at::Tensor flat = parameter.detach().view({-1});
  if (flat.numel() == numel) return flat;
  at::Tensor copy = at::empty({numel}, flat.options());
  copy.narrow(0, 0, flat.numel()).copy_(flat);
  copy.narrow(0, flat.numel(), numel - flat.numel()).zero_();
  return copy;
}

}  // namespace

Init::Init(std::shared_ptr<comm::Communicator> ranks, InitOptions options)
    : ranks_(std::move(ranks)),
      options_(options),
      interceptor_([this](const at::Tensor& tensor) { guarded([&] { before_read(tensor); }); }) {
  require(ranks_ != nullptr, "zero::Init: expected a group of ranks, found none; pass engine::init_distributed()");
  require(building == nullptr, "zero::Init: one is alive on this thread already; expected one at a time");
  require(options_.max_live >= 0 && options_.smallest >= 0, "zero::Init: expected max_live and smallest >= 0, found ",
          options_.max_live, " and ", options_.smallest);
  if (ranks_->size() == 1) return;
  require(at::isRecordFunctionEnabled(), "zero::Init sees operators through at::RecordFunction, which is disabled on ",
          "this thread; call at::enableRecordFunction(true) before it");
  return_freed_host_memory();
  building = this;
  interceptor_.enable();
  made_handle_ = at::addThreadLocalCallback(
      at::RecordFunctionCallback(nullptr, &Init::on_made).needsOutputs(true).scopes({at::RecordScope::FUNCTION}));
}

void Init::stop_watching() {
  if (building != this) return;
  building = nullptr;
  at::removeCallback(made_handle_);
  interceptor_.disable();
}

void Init::end() {
  for (const auto& [storage, entry] : entries_) {
    if (!entry.whole) return;
  }
  stop_watching();
}

Init::~Init() {
  stop_watching();
  const at::NoGradGuard no_grad;
  for (auto& [storage, entry] : entries_) {
    // Without memory a read would be a fault; without elements it is an error of shapes.
    if (!entry.whole) entry.parameter.set_data(at::empty({0}, entry.parameter.options().requires_grad(false)));
  }
}

void Init::rethrow() {
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

int64_t Init::held_bytes() const {
  int64_t bytes = 0;
  for (const auto& [storage, entry] : entries_) {
    if (entry.slice.defined()) bytes += static_cast<int64_t>(entry.slice.nbytes());
  }
  return bytes;
}

// LibTorch only logs what a callback throws.
template <class Action>
void Init::guarded(const Action& action) {
  if (busy_) return;
  busy_ = true;
  const at::RecordFunctionGuard not_watched(/*is_enabled=*/false);
  const at::NoGradGuard no_grad;
  try {
    action();
  } catch (...) {
    if (!failure_) failure_ = std::current_exception();
  }
  busy_ = false;
}

void Init::on_made(const at::RecordFunction& function, at::ObserverContext* /*context*/) {
  Init* const init = building;
  if (init == nullptr || init->busy_) return;
  init->guarded([&] { init->adopt_parameters(); });
  for (const c10::IValue& output : function.outputs()) {
    if (output.isTensor() && output.toTensor().defined() && output.toTensor().has_storage())
      init->made(output.toTensor());
  }
}

void Init::made(const at::Tensor& tensor) {
  if (tensor.numel() < options_.smallest || !can_be_sliced(tensor) || entries_.contains(storage_of(tensor))) return;
  const c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  const auto same = [&](const Weak& known) { return known._unsafe_get_target() == impl && !known.expired(); };
  if (std::none_of(candidates_.begin(), candidates_.end(), same)) candidates_.emplace_back(tensor.getIntrusivePtr());
}

// What requires a gradient without a graph is a parameter: module code says so after the operator that made it.
void Init::adopt_parameters() {
  std::vector<Weak> left;
  for (Weak& candidate : std::exchange(candidates_, {})) {
    const auto alive = candidate.lock();
    if (!alive) continue;
    const at::Tensor tensor = at::Tensor(alive);
    if (!tensor.requires_grad() || tensor.grad_fn()) {
      left.push_back(std::move(candidate));
      continue;
    }
    if (!can_be_sliced(tensor) || entries_.contains(storage_of(tensor))) continue;
    make_room(tensor.numel());
    Entry& entry = entries_[storage_of(tensor)];
    entry.parameter = tensor;
    entry.place = order_.insert(order_.end(), storage_of(tensor));
    live_ += tensor.numel();
    peak_ = std::max(peak_, live_);
  }
  candidates_ = std::move(left);
}

void Init::before_read(const at::Tensor& tensor) {
  adopt_parameters();
  const auto found = entries_.find(storage_of(tensor));
  if (found == entries_.end()) return;
  if (found->second.whole) {
    touch(found_again(found->first));
  } else {
    touch(found->second);
  }
}

void Init::touch(Entry& entry) {
  entry.used_by = OpInterceptor::outermost_operator();
  if (entry.whole) {
    order_.splice(order_.end(), order_, entry.place);
    return;
  }
  make_room(entry.parameter.numel());
  gather(entry);
}

// The entry of a whole parameter, under the storage that it has now: Module::to() gives it another one.
Init::Entry& Init::found_again(const void* storage) {
  Entry& entry = entries_.at(storage);
  const void* const now = storage_of(entry.parameter);
  if (now == storage) return entry;
  auto node = entries_.extract(storage);
  node.key() = now;
  Entry& moved = entries_.insert(std::move(node)).position->second;
  *moved.place = now;
  moved.slice.reset();
  return moved;
}

// Slices what was read longest ago, and not by the operator under way.
void Init::make_room(int64_t elements) {
  for (auto it = order_.begin(); it != order_.end() && live_ + elements > options_.max_live;) {
    const auto place = it++;
    Entry& entry = found_again(*place);
    if (entry.used_by == OpInterceptor::outermost_operator()) continue;
    if (entry.parameter.use_count() == 1) {  // the module has dropped it
      forget(at::Tensor(entry.parameter));
    } else if (can_be_sliced(entry.parameter)) {
      slice(entry);
    }
  }
}

void Init::slice(Entry& entry) {
  const at::Tensor& parameter = entry.parameter;
  const int64_t length = (parameter.numel() + ranks_->size() - 1) / ranks_->size();
  if (!entry.slice.defined() || entry.version != parameter._version()) {
    if (!entry.slice.defined()) entry.slice = at::empty({length}, parameter.options().requires_grad(false));
    const at::Tensor whole = ranks_->rank() == 0 ? padded(parameter, length * ranks_->size()) : at::Tensor();
    ranks_->scatter(entry.slice, whole, 0, "parameters under construction").wait();
  }
  give_memory_back(parameter);
  entry.whole = false;
  order_.erase(entry.place);
  live_ -= parameter.numel();
}

void Init::gather(Entry& entry) {
  const at::Tensor& parameter = entry.parameter;
  take_memory(parameter);
  entry.whole = true;
  entry.place = order_.insert(order_.end(), storage_of(parameter));
  live_ += parameter.numel();
  peak_ = std::max(peak_, live_);
  const at::Tensor flat = parameter.detach().view({-1});
  try {
    const int64_t numel = entry.slice.numel() * ranks_->size();
    const at::Tensor all = numel == flat.numel() ? flat : at::empty({numel}, flat.options());
    ranks_->all_gather(all, entry.slice, "parameters under construction").wait();
    if (!all.is_same(flat)) flat.copy_(all.narrow(0, 0, flat.numel()));
  } catch (...) {
    flat.zero_();
    throw;
  }
  entry.version = static_cast<uint32_t>(parameter._version());
}

void Init::forget(const at::Tensor& parameter) {
  for (auto it = entries_.begin(); it != entries_.end(); ++it) {
    Entry& entry = it->second;
    if (!entry.parameter.is_same(parameter)) continue;
    if (entry.whole) {
      order_.erase(entry.place);
      live_ -= entry.parameter.numel();
    }
    entries_.erase(it);
    return;
  }
}

}  // namespace ds::zero
