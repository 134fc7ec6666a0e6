#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <limits>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "comm/agreement.h"
#include "core/check.h"
#include "core/log.h"
#include "core/memory/host_memory.h"
#include "core/memory/storage_memory.h"
#include "core/op_interceptor.h"
#include "dsengine/comm.h"
#include "dsengine/zero.h"
#include "zero/parameter.h"

namespace ds::zero {
namespace {

const void* storage_of(const at::Tensor& tensor) { return tensor.storage().unsafeGetStorageImpl(); }

// Owns its memory alone and is laid out row by row.
bool can_be_sliced(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && tensor.is_floating_point() && !tensor.is_meta() && tensor.is_contiguous() &&
         tensor.storage_offset() == 0 && tensor.storage().nbytes() == tensor.nbytes();
}

void take_memory(const at::Tensor& parameter) {
  const c10::DeviceGuard guard(parameter.device());
  const size_t bytes = parameter.nbytes();
  try {
    give_storage(parameter, c10::GetAllocator(parameter.device().type())->allocate(bytes), bytes);
  } catch (const std::exception& error) {
    throw ConfigError(cat("zero::Init: no memory for a parameter of ", bytes, " bytes that an operator reads: ",
                          error.what(), ". Reduce InitOptions::max_live, or use more ranks"));
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

// The parameters of a model under construction, as a zero::Init sees them, and their slices. There is one per Init,
// which documents the calls.
class Init::Parameters {
 public:
  Parameters(std::shared_ptr<comm::Communicator> ranks, InitOptions options);
  ~Parameters();
  Parameters(const Parameters&) = delete;
  Parameters& operator=(const Parameters&) = delete;

  const std::shared_ptr<comm::Communicator>& ranks() const { return ranks_; }
  void rethrow();
  void forget(const at::Tensor& parameter);
  void end();
  int64_t live_elements() const { return live_; }
  int64_t peak_elements() const { return peak_; }
  int64_t held_bytes() const;

 private:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;
  struct Entry {
    Entry(const at::Tensor& tensor, std::string name)
        : parameter(tensor), label(std::move(name)), storage(tensor.storage().getWeakStorageImpl()) {}
    at::Tensor parameter;  // shares its identity with the module's
    std::string label;
    WeakStorage storage;  // the parameter's storage when it was looked at last; its address is not used again meanwhile
    at::Tensor slice;     // [ceil(numel / W)], while the parameter is not full
    uint64_t last_use = 0;  // the last use of a full one, by count of reads
    uint64_t used_by = 0;   // outermost operator that read it last
    bool whole() const { return !slice.defined(); }
  };

  static void on_made(const at::RecordFunction& function, at::ObserverContext* context);
  void made(const at::Tensor& tensor);
  void before_read(const at::Tensor& tensor);
  void adopt_parameters();
  void adopt(const at::Tensor& parameter);
  void find_moved();
  void touch(Entry& entry);
  void make_room(int64_t elements);
  void slice(Entry& entry);
  void gather(Entry& entry);
  void drop(size_t entry);
  void stop_watching();
  void require_same_options();
  template <class Action>
  void guarded(const Action& action);

  // The one of this thread: callbacks of at::RecordFunction carry no state.
  static thread_local Parameters* building;

  std::shared_ptr<comm::Communicator> ranks_;
  InitOptions options_;
  std::vector<std::unique_ptr<Entry>> entries_;  // in the order in which they became parameters: the same on all ranks
  std::unordered_map<const void*, Entry*> by_storage_;
  std::vector<WeakTensor> candidates_;  // made and not known to be anything yet
  int64_t adopted_ = 0;
  uint64_t uses_ = 0;
  int64_t live_ = 0;
  int64_t peak_ = 0;
  bool adopts_ = true;
  bool busy_ = false;
  std::exception_ptr failure_;
  bool failed_ = false;  // no collectives any more: ranks may have parted
  OpInterceptor interceptor_;
  at::CallbackHandle made_handle_ = 0;
};

thread_local Init::Parameters* Init::Parameters::building = nullptr;

Init::Parameters::Parameters(std::shared_ptr<comm::Communicator> ranks, InitOptions options)
    : ranks_(std::move(ranks)),
      options_(options),
      interceptor_([this](const at::Tensor& tensor) { guarded([&] { before_read(tensor); }); }) {
  require(ranks_ != nullptr,
          "zero::Init: expected a group of ranks, found none; pass engine::init_distributed().ranks");
  require(building == nullptr, "zero::Init: one is alive on this thread already; expected one at a time");
  require(options_.max_live >= 0 && options_.smallest >= 0, "zero::Init: expected max_live and smallest >= 0, found ",
          options_.max_live, " and ", options_.smallest);
  if (ranks_->size() == 1) return;
  require(at::isRecordFunctionEnabled(), "zero::Init sees operators through at::RecordFunction, which is disabled on ",
          "this thread; call at::enableRecordFunction(true) before it");
  require_same_options();
  return_freed_host_memory();
  building = this;
  interceptor_.enable();
  made_handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(nullptr, &Init::Parameters::on_made)
                                                .needsOutputs(true)
                                                .scopes({at::RecordScope::FUNCTION}));
}

void Init::Parameters::require_same_options() {
  const std::vector<int64_t> values =
      comm::numbers_of_ranks(*ranks_, options_.device, {options_.max_live, options_.smallest}, "options of zero::Init");
  for (size_t rank = 1; rank < static_cast<size_t>(ranks_->size()); ++rank) {
    require(values[2 * rank] == values[0] && values[2 * rank + 1] == values[1], "zero::Init: expected the options of ",
            "rank 0 on every rank, max_live ", values[0], " and smallest ", values[1], ", found ", values[2 * rank],
            " and ", values[2 * rank + 1], " on rank ", rank);
  }
}

Init::Parameters::~Parameters() {
  stop_watching();
  for (const auto& entry : entries_) {
    if (!entry->whole() && entry->parameter.storage().nbytes() == 0) take_elements(entry->parameter);
  }
}

void Init::Parameters::stop_watching() {
  if (building != this) return;
  building = nullptr;
  at::removeCallback(made_handle_);
  interceptor_.disable();
}

void Init::Parameters::end() {
  adopts_ = false;
  candidates_.clear();
  for (size_t i = entries_.size(); i-- > 0;) {
    if (entries_[i]->parameter.use_count() == 1) drop(i);  // the program has dropped it
  }
  if (std::all_of(entries_.begin(), entries_.end(), [](const auto& entry) { return entry->whole(); })) stop_watching();
}

void Init::Parameters::rethrow() {
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

int64_t Init::Parameters::held_bytes() const {
  int64_t bytes = 0;
  for (const auto& entry : entries_) {
    if (!entry->whole()) bytes += static_cast<int64_t>(entry->slice.nbytes());
  }
  return bytes;
}

// LibTorch only logs what a callback throws.
template <class Action>
void Init::Parameters::guarded(const Action& action) {
  if (busy_) return;
  busy_ = true;
  const at::RecordFunctionGuard not_watched(/*is_enabled=*/false);
  const at::NoGradGuard no_grad;
  try {
    action();
  } catch (const std::exception& error) {
    if (!failed_) log::error("zero::Init: parameters are not sliced any more: ", error.what());
    if (!failure_) failure_ = std::current_exception();
    failed_ = true;
  }
  busy_ = false;
}

void Init::Parameters::on_made(const at::RecordFunction& function, at::ObserverContext* /*context*/) {
  Parameters* const init = building;
  if (init == nullptr || init->busy_ || !init->adopts_) return;
  init->guarded([&] { init->adopt_parameters(); });
  for (const c10::IValue& output : function.outputs()) {
    if (output.isTensor() && output.toTensor().defined() && output.toTensor().has_storage()) {
      init->made(output.toTensor());
    }
  }
}

void Init::Parameters::made(const at::Tensor& tensor) {
  if (tensor.numel() < options_.smallest || !can_be_sliced(tensor)) return;
  const c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  const auto known = [&](const auto& entry) { return entry->parameter.unsafeGetTensorImpl() == impl; };
  if (std::any_of(entries_.begin(), entries_.end(), known)) return;
  const auto same = [&](const WeakTensor& one) { return one._unsafe_get_target() == impl && !one.expired(); };
  if (std::none_of(candidates_.begin(), candidates_.end(), same)) candidates_.emplace_back(tensor.getIntrusivePtr());
}

// A tensor that requires a gradient without a graph is a parameter: module code says so after the operator that made
// it.
void Init::Parameters::adopt_parameters() {
  std::vector<at::Tensor> parameters;
  std::vector<WeakTensor> left;
  for (WeakTensor& candidate : candidates_) {
    const auto alive = candidate.lock();
    if (!alive) continue;
    const at::Tensor tensor = at::Tensor(alive);
    if (tensor.requires_grad() && !tensor.grad_fn()) {
      parameters.push_back(tensor);
    } else {
      left.push_back(std::move(candidate));
    }
  }
  candidates_ = std::move(left);
  for (const at::Tensor& parameter : parameters) adopt(parameter);
}

void Init::Parameters::adopt(const at::Tensor& parameter) {
  if (!can_be_sliced(parameter) || by_storage_.contains(storage_of(parameter))) return;
  make_room(parameter.numel());
  entries_.push_back(
      std::make_unique<Entry>(parameter, cat("parameter ", adopted_++, " under construction, ", parameter.sizes())));
  Entry& entry = *entries_.back();
  entry.last_use = ++uses_;
  by_storage_[storage_of(parameter)] = &entry;
  live_ += parameter.numel();
  peak_ = std::max(peak_, live_);
}

// Module::to() and set_data() give a parameter other memory without an operator.
void Init::Parameters::find_moved() {
  for (const auto& entry : entries_) {
    const void* const before = entry->storage._unsafe_get_target();
    if (storage_of(entry->parameter) == before) continue;
    by_storage_.erase(before);
    entry->storage = entry->parameter.storage().getWeakStorageImpl();
    by_storage_[storage_of(entry->parameter)] = entry.get();
    if (entry->whole()) continue;
    entry->slice.reset();  // its values are gone
    live_ += entry->parameter.numel();
    peak_ = std::max(peak_, live_);
  }
}

void Init::Parameters::before_read(const at::Tensor& tensor) {
  if (adopts_) adopt_parameters();
  find_moved();
  const auto found = by_storage_.find(storage_of(tensor));
  if (found == by_storage_.end()) return;
  Entry& entry = *found->second;
  try {
    touch(entry);
  } catch (...) {
    if (!entry.whole()) take_elements(tensor);  // the operator cannot be told, and there is nothing to read
    throw;
  }
}

void Init::Parameters::touch(Entry& entry) {
  entry.used_by = OpInterceptor::outermost_operator();
  entry.last_use = ++uses_;
  if (entry.whole()) return;
  make_room(entry.parameter.numel());
  gather(entry);
}

// Slices what was read longest ago, and not by the operator under way.
void Init::Parameters::make_room(int64_t elements) {
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

void Init::Parameters::slice(Entry& entry) {
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

void Init::Parameters::gather(Entry& entry) {
  const at::Tensor& parameter = entry.parameter;
  take_memory(parameter);
  live_ += parameter.numel();
  peak_ = std::max(peak_, live_);
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

void Init::Parameters::drop(size_t index) {
  const Entry& entry = *entries_[index];
  if (entry.whole()) live_ -= entry.parameter.numel();
  by_storage_.erase(entry.storage._unsafe_get_target());
  entries_.erase(entries_.begin() + static_cast<std::ptrdiff_t>(index));
}

void Init::Parameters::forget(const at::Tensor& parameter) {
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (!entries_[i]->parameter.is_same(parameter)) continue;
    drop(i);
    return;
  }
}

Init::Init(std::shared_ptr<comm::Communicator> ranks, InitOptions options)
    : parameters_(std::make_unique<Parameters>(std::move(ranks), options)) {}

Init::~Init() = default;

const std::shared_ptr<comm::Communicator>& Init::ranks() const { return parameters_->ranks(); }
void Init::rethrow() { parameters_->rethrow(); }
void Init::forget(const at::Tensor& parameter) { parameters_->forget(parameter); }
void Init::end() { parameters_->end(); }
int64_t Init::live_elements() const { return parameters_->live_elements(); }
int64_t Init::peak_elements() const { return parameters_->peak_elements(); }
int64_t Init::held_bytes() const { return parameters_->held_bytes(); }

}  // namespace ds::zero
