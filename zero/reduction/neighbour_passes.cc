#include "zero/reduction/neighbour_passes.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "core/check.h"
#include "core/check_time.h"
#include "core/memory/storage_memory.h"

namespace ds::zero {
namespace {

// The engines of each thread. Not destroyed: engines of the program may end after everything else.
struct List {
  std::mutex mutex;
  std::map<std::thread::id, std::vector<NeighbourPasses*>> of_thread;
};

List& list() {
  static auto& all = *new List();
  return all;
}

// A marker in place of a gradient that was dropped: where it is gone, the program has dropped it too.
at::Tensor marker(const Parameter& parameter, const std::string& model) {
  const at::NoGradGuard no_grad;
  const at::Tensor& like = parameter.tensor;
  at::Tensor none = at::empty({0}, like.options().requires_grad(false));
  const size_t bytes = static_cast<size_t>(like.numel()) * like.element_size();
  at::TensorImpl* const impl = none.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(
      unreadable_storage(like.device(), bytes,
                         cat("the gradient of parameter ", parameter.name, " of ", model,
                             " was made by the backward() of another engine, ",
                             "and dropped: call zero_grad() before this model's own backward()")));
  impl->set_sizes_contiguous(like.sizes());
  return none;
}

}  // namespace

NeighbourPasses::NeighbourPasses(const std::vector<Parameter>& parameters, std::string model, bool alone)
    : parameters_(parameters), model_(std::move(model)), alone_(alone), had_foreign_(parameters.size()) {
  enlist();
}

NeighbourPasses::~NeighbourPasses() {
  leave();
  clear();
}

std::vector<NeighbourPasses*> NeighbourPasses::on_thread(std::thread::id thread) {
  const std::lock_guard lock(list().mutex);
  const auto found = list().of_thread.find(thread);
  return found == list().of_thread.end() ? std::vector<NeighbourPasses*>() : found->second;
}

std::string NeighbourPasses::model() const {
  int same = 0;
  int own = 0;
  for (const NeighbourPasses* const one : on_thread(thread_)) {
    if (one->model_ == model_) ++same;
    if (one == this) own = same;
  }
  return same < 2 ? model_ : cat(model_, " (number ", own, " of ", same, " engines for such a model)");
}

std::string NeighbourPasses::engine_if_several() const {
  return on_thread(thread_).size() > 1 ? "the engine of " + model() : std::string();
}

void NeighbourPasses::enlist() {
  thread_ = std::this_thread::get_id();
  if (alone_) return;
  const std::lock_guard lock(list().mutex);
  list().of_thread[thread_].push_back(this);
}

void NeighbourPasses::leave() {
  if (alone_) return;
  const std::lock_guard lock(list().mutex);
  const auto found = list().of_thread.find(thread_);
  std::erase(found->second, this);
  if (found->second.empty()) list().of_thread.erase(found);
}

void NeighbourPasses::use_from_this_thread() {
  leave();
  enlist();
}

void NeighbourPasses::come_back() {
  if (aside_) step_back();
}

void NeighbourPasses::begin() {
  if (alone_) return;
  const CheckTime::Scope time;
  come_back();
  running_ = true;
  for (NeighbourPasses* const other : on_thread(thread_)) {
    if (!other->running_ && !other->aside_) other->step_aside();
  }
}

void NeighbourPasses::end() {
  if (alone_) return;
  const CheckTime::Scope time;
  running_ = false;
  const std::vector<NeighbourPasses*> all = on_thread(thread_);
  if (std::any_of(all.begin(), all.end(), [](const NeighbourPasses* one) { return one->running_.load(); })) return;
  for (NeighbourPasses* const other : all) {
    if (other->aside_) other->step_back();
  }
}

bool NeighbourPasses::another_runs() const {
  if (alone_) return false;
  const std::vector<NeighbourPasses*> all = on_thread(thread_);
  return std::any_of(all.begin(), all.end(),
                     [this](const NeighbourPasses* one) { return one != this && one->running_; });
}

void NeighbourPasses::drop(size_t parameter) {
  had_foreign_[parameter] = 1;
  parameters_[parameter].tensor.mutable_grad().reset();
}

void NeighbourPasses::step_aside() {
  aside_ = true;
  own_.resize(parameters_.size());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    own_[i] = std::exchange(parameters_[i].tensor.mutable_grad(), at::Tensor());
  }
}

void NeighbourPasses::step_back() {
  aside_ = false;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    at::Tensor& gradient = parameters_[i].tensor.mutable_grad();
    gradient = std::exchange(own_[i], at::Tensor());
    if (had_foreign_[i] != 0 && !gradient.defined()) gradient = marker(parameters_[i], model());
  }
}

void NeighbourPasses::require_no_gradients(const char* call) {
  const CheckTime::Scope time;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (had_foreign_[i] == 0) continue;
    if (!parameters_[i].tensor.grad().defined()) {  // module->zero_grad()
      had_foreign_[i] = 0;
      continue;
    }
    throw UsageError(cat(
        call, " of the engine of ", model(), ": the backward() of another engine has made gradients for parameter ",
        parameters_[i].name, " and others of this model since, which torch would add to its own. They were dropped: ",
        "call zero_grad() of this engine (or of the module) before its backward(), as with torch's optimizers, or ",
        "keep engine::frozen_scope(model) around the other engine's forward, which costs less. For one loss that is ",
        "to train both models: engine::backward(loss, {one engine, the other})"));
  }
}

void NeighbourPasses::clear() {
  const CheckTime::Scope time;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (had_foreign_[i].exchange(0) != 0) parameters_[i].tensor.mutable_grad().reset();
  }
}

}  // namespace ds::zero
