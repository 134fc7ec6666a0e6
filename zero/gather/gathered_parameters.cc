#include <ATen/core/grad_mode.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/log.h"
#include "core/making_process.h"
#include "core/op_interceptor.h"
#include "core/without_stack.h"
#include "zero/gather/gathered_scope.h"
#include "zero/gather/in_place_changes.h"

namespace ds::zero {

class GatheredParameters::Opened {
 public:
  explicit Opened(Scope scope);
  ~Opened();
  Opened(const Opened&) = delete;
  Opened& operator=(const Opened&) = delete;

  void close();

 private:
  std::vector<const Parameter*> parameters() const;
  void watch();
  void note_change(const at::Tensor& tensor);
  void require_unchanged() const;
  void share_changes();
  void restore();
  void forget_changes();
  void give_back();
  void give_back_after_failure();

  Scope scope_;
  std::vector<int64_t> versions_;  // the version counters of parameters() when the scope opened
  // The storages of parameters(), and the name of the first that an operator was seen to change, also where its version
  // does not tell (.data()). Used without a modifier rank.
  std::unordered_set<const void*> storages_;
  std::optional<std::string> changed_;
  OpInterceptor watch_;
  // Used with a modifier rank: the values that nothing else holds, of full buckets and of others.
  std::vector<std::pair<at::Tensor, at::Tensor>> before_;
  size_t gathered_ = 0;  // buckets so far
  bool open_ = true;
  int exceptions_;  // under way when the scope opened
  MakingProcess process_;
};

GatheredParameters::Opened::Opened(Scope scope)
    : scope_(std::move(scope)),
      watch_([this](const at::Tensor& tensor) { note_change(tensor); }),
      exceptions_(std::uncaught_exceptions()) {
  try {
    for (const auto& [index, bucket] : scope_.buckets) {
      if (scope_.held) scope_.held->gather(index);
      ++gathered_;
    }
    for (const Parameter* parameter : parameters()) versions_.push_back(parameter->tensor._version());
    if (scope_.wholes) scope_.wholes->show();
    if (!scope_.modifier_rank) {
      watch();
      return;
    }
    const at::NoGradGuard no_grad;
    for (const auto& [index, bucket] : scope_.buckets) {
      if (!bucket->sharded()) before_.emplace_back(bucket->flat(), bucket->flat().clone());
    }
    for (const Parameter& other : scope_.others) {
      before_.emplace_back(other.tensor.detach(), other.tensor.detach().clone());
    }
  } catch (...) {
    give_back_after_failure();
    throw;
  }
}

GatheredParameters::Opened::~Opened() {
  if (!open_ || !process_.is_this()) return;  // Note [Forked children]
  try {
    if (std::uncaught_exceptions() > exceptions_) {
      restore();
      give_back();
    } else {
      close();
    }
  } catch (const std::exception& error) {
    log::error("gathered parameters: ", without_stack(error.what()));
  }
}

void GatheredParameters::Opened::close() {
  require(open_, "gathered parameters: close() was called twice");
  try {
    if (scope_.modifier_rank) {
      share_changes();
    } else {
      require_unchanged();
    }
  } catch (...) {
    forget_changes();
    give_back_after_failure();
    throw;
  }
  give_back();
}

void GatheredParameters::Opened::forget_changes() {
  for (const auto& [index, bucket] : scope_.buckets) {
    if (scope_.held && bucket->sharded()) scope_.held->forget_changes(index);
  }
}

void GatheredParameters::Opened::give_back_after_failure() {
  try {
    give_back();
  } catch (const std::exception&) {  // follows from the failure that is thrown
  }
}

std::vector<const Parameter*> GatheredParameters::Opened::parameters() const {
  std::vector<const Parameter*> all;
  for (const auto& [index, bucket] : scope_.buckets) {
    for (const Parameter& parameter : bucket->parameters()) all.push_back(&parameter);
  }
  for (const Parameter& parameter : scope_.others) all.push_back(&parameter);
  return all;
}

void GatheredParameters::Opened::watch() {
  for (const Parameter* parameter : parameters()) {
    storages_.insert(parameter->tensor.storage().unsafeGetStorageImpl());
  }
  watch_.enable();
}

void GatheredParameters::Opened::note_change(const at::Tensor& tensor) {
  if (changed_ || !storages_.contains(tensor.storage().unsafeGetStorageImpl())) return;
  if (!OpInterceptor::changes_tensor()) return;
  for (const Parameter* parameter : parameters()) {
    if (!is_part_of(tensor, *parameter)) continue;
    changed_ = parameter->name;
    return;
  }
}

void GatheredParameters::Opened::require_unchanged() const {
  std::optional<std::string> changed = changed_;
  const std::vector<const Parameter*> all = parameters();
  for (const auto& [index, bucket] : scope_.buckets) {
    if (const Parameter* const replaced = bucket->storage().take_parameters_back()) changed = replaced->name;
  }
  for (size_t i = 0; i < all.size() && !changed; ++i) {
    if (all[i]->tensor._version() != versions_[i]) changed = all[i]->name;
  }
  if (scope_.wholes && !changed) changed = scope_.wholes->changed();
  require(!changed, "gathered parameters: parameter ", changed.value_or(""),
          " was changed in a scope without a modifier rank, so that ranks may differ now. Expected ",
          "engine->gathered_parameters(parameters, /*modifier_rank=*/0) around changes");
}

void GatheredParameters::Opened::share_changes() {
  const at::NoGradGuard no_grad;
  if (scope_.wholes) scope_.wholes->share_wholes();
  for (const auto& [index, bucket] : scope_.buckets) {
    bucket->storage().take_values_back();
    if (scope_.wholes) scope_.wholes->share_bucket(index, bucket->flat());
    if (scope_.world->size() > 1) {
      scope_.world->broadcast(bucket->flat(), *scope_.modifier_rank, "changed parameters").wait();
    }
    if (scope_.held) scope_.held->keep_changes(index);
    scope_.changed(index);
  }
  for (const Parameter& parameter : scope_.others) {
    const at::Tensor values = parameter.tensor.detach().contiguous();
    if (scope_.wholes && !parameter.part) scope_.wholes->share_other(values);
    if (scope_.world->size() > 1) scope_.world->broadcast(values, *scope_.modifier_rank, parameter.name).wait();
    if (!values.is_alias_of(parameter.tensor)) parameter.tensor.detach().copy_(values);
  }
}

void GatheredParameters::Opened::restore() {
  const at::NoGradGuard no_grad;
  for (const auto& [index, bucket] : scope_.buckets) bucket->storage().take_parameters_back();
  for (const auto& [tensor, values] : before_) tensor.copy_(values);
  forget_changes();
}

void GatheredParameters::Opened::give_back() {
  open_ = false;
  watch_.disable();
  if (scope_.wholes) scope_.wholes->hide();
  std::exception_ptr failure;
  for (size_t i = 0; i < gathered_ && scope_.held; ++i) {
    try {
      scope_.held->drop(scope_.buckets[i].first);
    } catch (...) {
      if (!failure) failure = std::current_exception();
    }
  }
  gathered_ = 0;
  if (scope_.closed) std::exchange(scope_.closed, nullptr)();
  if (failure) std::rethrow_exception(failure);
}

GatheredParameters::GatheredParameters(Scope scope) : opened_(std::make_unique<Opened>(std::move(scope))) {}

GatheredParameters::~GatheredParameters() = default;

void GatheredParameters::close() { opened_->close(); }

}  // namespace ds::zero
