#include "dsengine/zero.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/agreement.h"
#include "core/check.h"
#include "core/log.h"
#include "core/memory/host_memory.h"
#include "core/op_interceptor.h"
#include "core/without_stack.h"
#include "dsengine/comm.h"
#include "zero/sliced_parameters.h"

namespace ds::zero {
namespace {

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
