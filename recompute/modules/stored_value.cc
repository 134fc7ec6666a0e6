#include "recompute/modules/stored_value.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <map>
#include <unordered_map>
#include <utility>

#include "core/check.h"
#include "core/split/split_tensor.h"
#include "core/tensor_check.h"
#include "recompute/outside_tensors.h"

namespace ds::recompute {

Geometry::Geometry(const at::Tensor& tensor)
    : sizes(tensor.sizes()),
      strides(tensor.strides()),
      offset(tensor.storage_offset()),
      dtype(tensor.scalar_type()),
      keys(tensor.key_set()) {}

at::Tensor Geometry::on(c10::Storage storage) const {
  at::Tensor result =
      at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, c10::scalarTypeToTypeMeta(dtype));
  result.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return result;
}

int64_t Geometry::elements() const { return c10::multiply_integers(sizes); }

bool is_plain(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && tensor.has_storage() && !tensor.is_meta() &&
         !tensor.is_quantized() && !tensor.is_conj() && !tensor.is_neg() && !tensor._is_zerotensor() &&
         !tensor.is_inference() && !tensor.is_nested() && !is_split(tensor) &&
         !tensor.key_set().has(c10::DispatchKey::Python);
}

// Chains of steps may be longer than a stack is deep: they end one after the other.
StoredValue::~StoredValue() {
  if (!step) return;
  thread_local std::vector<std::shared_ptr<Step>>* ending = nullptr;
  if (ending != nullptr) {
    ending->push_back(std::move(step));
    return;
  }
  std::vector<std::shared_ptr<Step>> steps;
  steps.push_back(std::move(step));
  ending = &steps;
  while (!steps.empty()) {
    const std::shared_ptr<Step> last = std::move(steps.back());
    steps.pop_back();
  }
  ending = nullptr;
}

namespace {

// What a recorded operator ran below: its own kernel, as autograd called it.
struct BelowAutograd {
  const at::AutoGradMode as_recorded{true};
  const c10::impl::ExcludeDispatchKeyGuard without{c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                                                   c10::autocast_dispatch_keyset | c10::DispatchKeySet(kWatchKey)};
};

at::Tensor bytes_of(const c10::Storage& storage) {
  const auto count = static_cast<int64_t>(storage.nbytes());
  at::Tensor result = at::empty({0}, at::TensorOptions(at::kByte).device(storage.device()));
  result.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
  result.unsafeGetTensorImpl()->set_sizes_contiguous({count});
  return result;
}

c10::Storage held_storage(const StoredValue& value) {
  require(version_of(value.held) == value.version,
          "activation checkpointing of modules: a tensor from which activations are computed again (",
          describe(value.held), ") was changed in place after the module ran: expected version ", value.version,
          ", found ", version_of(value.held),
          "; change it after backward, or change a clone, or leave the module out of apply_activation_checkpointing");
  return value.held.storage();
}

// Makes one value again: the steps that it needs, in the order in which they were recorded.
class Replay {
 public:
  explicit Replay(std::shared_ptr<StoredValue> target) : target_(std::move(target)) { collect(); }

  c10::Storage run() {
    for (const auto& [order, needed] : steps_) run(*needed.step, needed.values);
    c10::Storage result = found_.at(target_.get());
    for (const auto& [value, storage] : found_) {
      // The one that is asked for here is none of those who still wait for it.
      const int64_t waiting = value->savers - (value == target_.get() ? 1 : 0);
      if (waiting <= 0) continue;
      value->made = storage;
      value->awaited = waiting;
    }
    return result;
  }

 private:
  struct Needed {
    const Step* step = nullptr;
    std::vector<StoredValue*> values;
  };

  static bool is_there(const StoredValue& value) { return value.held.defined() || value.made || value.blank; }

  template <class Visit>
  static void each_argument(const Step& step, Visit&& visit) {
    for (const Argument& argument : step.arguments) {
      for (const std::optional<TensorRef>& ref : argument.tensors) {
        if (ref) visit(*ref->value);
      }
    }
  }

  void collect() {
    std::vector<StoredValue*> open = {target_.get()};
    std::unordered_map<const StoredValue*, bool> seen = {{target_.get(), true}};
    while (!open.empty()) {
      StoredValue* const value = open.back();
      open.pop_back();
      ensure(value->step != nullptr, "a value that nobody holds is made by a step");
      Needed& needed = steps_[value->step->order];
      needed.values.push_back(value);
      if (needed.step != nullptr) continue;
      needed.step = value->step.get();
      each_argument(*needed.step, [&](StoredValue& each) {
        ++uses_[&each];
        if (!is_there(each) && seen.emplace(&each, true).second) open.push_back(&each);
      });
    }
  }

  c10::Storage storage_of(const StoredValue& value) const {
    if (value.held.defined()) return held_storage(value);
    if (value.made) return value.made;
    return found_.at(const_cast<StoredValue*>(&value));
  }

  // Memory with the value before a change in place, which may be changed.
  c10::Storage changeable(StoredValue& value) {
    if (value.blank) {
      const at::TensorOptions options = at::TensorOptions(at::kByte).device(value.device);
      return at::empty({value.bytes}, options).storage();
    }
    const c10::Storage storage = storage_of(value);
    const bool last_use = found_.contains(&value) && uses_[&value] == 1 && value.savers == 0 && &value != target_.get();
    return last_use ? storage : copy_of_storage(storage);
  }

  c10::IValue value_of(const Argument& argument, const c10::Storage* written) const {
    const auto tensor = [&](const std::optional<TensorRef>& ref) {
      if (!ref) return at::Tensor();
      return ref->geometry.on(written != nullptr ? *written : storage_of(*ref->value));
    };
    switch (argument.kind) {
      case Argument::Kind::kPlain:
        return argument.plain;
      case Argument::Kind::kTensor:
        return tensor(argument.tensors.front());
      case Argument::Kind::kTensors: {
        c10::List<at::Tensor> list;
        for (const auto& ref : argument.tensors) list.push_back(tensor(ref));
        return list;
      }
      case Argument::Kind::kOptionalTensors: {
        c10::List<std::optional<at::Tensor>> list;
        for (const auto& ref : argument.tensors) list.push_back(ref ? std::make_optional(tensor(ref)) : std::nullopt);
        return list;
      }
    }
    return {};
  }

  void run(const Step& step, const std::vector<StoredValue*>& values) {
    std::optional<c10::Storage> written;
    if (step.written) written = changeable(*step.arguments[*step.written].tensors.front()->value);
    torch::jit::Stack stack;
    for (size_t i = 0; i < step.arguments.size(); ++i) {
      stack.push_back(value_of(step.arguments[i], step.written == i ? &*written : nullptr));
    }
    {
      std::optional<ExecutionState::Scope> as_before;
      if (step.state) as_before.emplace(*step.state);
      const BelowAutograd below;
      step.op.callBoxed(stack);
    }
    for (StoredValue* const value : values) {
      c10::Storage result = written ? *written : stack.at(value->output).toTensor().storage();
      require(static_cast<int64_t>(result.nbytes()) == value->bytes,
              "activation checkpointing of modules: ", step.op.operator_name().name, " computed again gave ",
              result.nbytes(), " bytes: expected ", value->bytes,
              ", as in forward; leave the module out of apply_activation_checkpointing, or keep() this operator");
      found_.insert_or_assign(value, std::move(result));
    }
    each_argument(step, [&](StoredValue& each) {
      if (--uses_[&each] == 0 && each.savers == 0 && &each != target_.get()) found_.erase(&each);
    });
  }

  const std::shared_ptr<StoredValue> target_;
  std::map<uint64_t, Needed> steps_;
  std::unordered_map<const StoredValue*, int64_t> uses_;
  std::unordered_map<StoredValue*, c10::Storage> found_;
};

}  // namespace

c10::Storage copy_of_storage(const c10::Storage& storage) {
  const BelowAutograd below;
  return bytes_of(storage).clone().storage();
}

c10::Storage storage_of(const std::shared_ptr<StoredValue>& value) {
  if (value->held.defined()) return held_storage(*value);
  if (value->made) {
    const c10::Storage result = value->made;
    if (--value->awaited <= 0) value->made = c10::Storage();
    return result;
  }
  return Replay(value).run();
}

}  // namespace ds::recompute
