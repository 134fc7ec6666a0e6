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
#include <numeric>
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
#include "core/without_stack.h"
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

void require_same_options(comm::Communicator& ranks, const InitOptions& options) {
  const std::vector<int64_t> values =
      comm::numbers_of_ranks(ranks, options.device, {options.max_live, options.smallest}, "options of zero::Init");
  for (size_t rank = 1; rank < static_cast<size_t>(ranks.size()); ++rank) {
    require(values[2 * rank] == values[0] && values[2 * rank + 1] == values[1], "zero::Init: expected the options of ",
            "rank 0 on every rank, max_live ", values[0], " and smallest ", values[1], ", found ", values[2 * rank],
            " and ", values[2 * rank + 1], " on rank ", rank);
  }
}

}  // namespace

// Parameters of which each rank has an even part while they are not needed in full. At most `max_live` of their
// elements are full at a time, beside those that the operator under way reads. Collective: all ranks adopt and read the
// same parameters in the same order.
class SlicedParameters {
 public:
  SlicedParameters(std::shared_ptr<comm::Communicator> ranks, const InitOptions& options)
      : ranks_(std::move(ranks)), options_(options) {}
  // Leaves the parameters that are not full without elements.
  ~SlicedParameters();
  SlicedParameters(const SlicedParameters&) = delete;
  SlicedParameters& operator=(const SlicedParameters&) = delete;

  const std::shared_ptr<comm::Communicator>& ranks() const { return ranks_; }
  // Whether `tensor` is one of the parameters.
  bool contains(const at::Tensor& tensor) const;
  // Adds a full parameter, and makes room for it.
  void adopt(const at::Tensor& parameter);
  // Makes the parameter full that `tensor` lies in, if it lies in one.
  void fill(const at::Tensor& tensor);
  // Init::read_part().
  bool read_part(const at::Tensor& parameter, const at::Tensor& part);
  // Drops what is kept of the parameter.
  void forget(const at::Tensor& parameter);
  // Drops what is kept of the parameters that the program has dropped.
  void forget_unused();
  // Neither slices nor gathers from now on: a failure may have parted the ranks.
  void fail() { failed_ = true; }
  bool failed() const { return failed_; }
  bool all_whole() const;
  int64_t live_elements() const { return live_; }
  int64_t peak_elements() const { return peak_; }
  int64_t held_bytes() const;

 private:
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

  void find_moved();
  void make_room(int64_t elements);
  void slice(Entry& entry);
  void gather(Entry& entry);
  void add_live(int64_t elements);
  void drop(size_t entry);

  std::shared_ptr<comm::Communicator> ranks_;
  InitOptions options_;
  std::vector<std::unique_ptr<Entry>> entries_;  // in the order in which they became parameters: the same on all ranks
  std::unordered_map<const void*, Entry*> by_storage_;
  int64_t adopted_ = 0;
  uint64_t uses_ = 0;
  int64_t live_ = 0;
  int64_t peak_ = 0;
  bool failed_ = false;
};

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

// Watches the operators of this thread for a zero::Init, which documents the calls: finds the tensors that become
// parameters, and has the ones filled that an operator reads.
class Init::Parameters {
 public:
  Parameters(std::shared_ptr<comm::Communicator> ranks, InitOptions options);
  ~Parameters() { stop_watching(); }
  Parameters(const Parameters&) = delete;
  Parameters& operator=(const Parameters&) = delete;

  // The parameters that were found so far.
  SlicedParameters& found() { return found_; }
  void rethrow();
  void end();

 private:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

  static void on_made(const at::RecordFunction& function, at::ObserverContext* context);
  void note_made(const at::Tensor& tensor);
  void adopt_parameters();
  void before_read(const at::Tensor& tensor);
  void stop_watching();
  template <class Action>
  void guarded(const Action& action);

  // The one of this thread: callbacks of at::RecordFunction carry no state.
  static thread_local Parameters* building;

  int64_t smallest_;
  SlicedParameters found_;
  std::vector<WeakTensor> candidates_;  // made and not known to be anything yet
  bool adopts_ = true;
  bool busy_ = false;
  std::exception_ptr failure_;
  OpInterceptor interceptor_;
  at::CallbackHandle made_handle_ = 0;
};

thread_local Init::Parameters* Init::Parameters::building = nullptr;

Init::Parameters::Parameters(std::shared_ptr<comm::Communicator> ranks, InitOptions options)
    : smallest_(options.smallest),
      found_(std::move(ranks), options),
      interceptor_([this](const at::Tensor& tensor) { guarded([&] { before_read(tensor); }); }) {
  require(found_.ranks() != nullptr,
          "zero::Init: expected a group of ranks, found none; pass engine::init_distributed().ranks");
  require(building == nullptr, "zero::Init: one is alive on this thread already; expected one at a time");
  require(options.max_live >= 0 && options.smallest >= 0, "zero::Init: expected max_live and smallest >= 0, found ",
          options.max_live, " and ", options.smallest);
  comm::Communicator& group = *found_.ranks();
  if (group.size() == 1) return;
  require(at::isRecordFunctionEnabled(), "zero::Init sees operators through at::RecordFunction, which is disabled on ",
          "this thread; call at::enableRecordFunction(true) before it");
  require_same_options(group, options);
  return_freed_host_memory();
  building = this;
  interceptor_.enable();
  made_handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(nullptr, &Init::Parameters::on_made)
                                                .needsOutputs(true)
                                                .scopes({at::RecordScope::FUNCTION}));
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
  found_.forget_unused();
  if (found_.all_whole()) stop_watching();
}

void Init::Parameters::rethrow() {
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
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
    if (!found_.failed()) log::error("zero::Init: parameters are not sliced any more: ", without_stack(error.what()));
    if (!failure_) failure_ = std::current_exception();
    found_.fail();
  }
  busy_ = false;
}

void Init::Parameters::on_made(const at::RecordFunction& function, at::ObserverContext* /*context*/) {
  Parameters* const init = building;
  if (init == nullptr || init->busy_ || !init->adopts_) return;
  init->guarded([&] { init->adopt_parameters(); });
  for (const c10::IValue& output : function.outputs()) {
    if (output.isTensor() && output.toTensor().defined() && output.toTensor().has_storage()) {
      init->note_made(output.toTensor());
    }
  }
}

void Init::Parameters::note_made(const at::Tensor& tensor) {
  if (tensor.numel() < smallest_ || !can_be_sliced(tensor) || found_.contains(tensor)) return;
  const c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
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
  for (const at::Tensor& parameter : parameters) found_.adopt(parameter);
}

void Init::Parameters::before_read(const at::Tensor& tensor) {
  if (adopts_) adopt_parameters();
  found_.fill(tensor);
}

Init::Init(std::shared_ptr<comm::Communicator> ranks, InitOptions options)
    : parameters_(std::make_unique<Parameters>(std::move(ranks), options)) {}

Init::~Init() = default;

const std::shared_ptr<comm::Communicator>& Init::ranks() const { return parameters_->found().ranks(); }
void Init::rethrow() { parameters_->rethrow(); }
bool Init::read_part(const at::Tensor& parameter, const at::Tensor& part) {
  return parameters_->found().read_part(parameter, part);
}
void Init::forget(const at::Tensor& parameter) { parameters_->found().forget(parameter); }
void Init::end() { parameters_->end(); }
int64_t Init::live_elements() const { return parameters_->found().live_elements(); }
int64_t Init::peak_elements() const { return parameters_->found().peak_elements(); }
int64_t Init::held_bytes() const { return parameters_->found().held_bytes(); }

}  // namespace ds::zero
