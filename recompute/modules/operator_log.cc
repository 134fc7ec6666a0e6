#include "recompute/modules/operator_log.h"

#include <ATen/core/Generator.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include "recompute/kept_input.h"
#include "recompute/outside_tensors.h"

namespace ds::recompute {

namespace {

constexpr int64_t kGeneratorBytes = 5056;  // the state of the CPU's
constexpr uint64_t kSweepEvery = 16;       // operators

const c10::StorageImpl* storage_impl(const at::Tensor& tensor) { return tensor.storage().unsafeGetStorageImpl(); }
int64_t storage_bytes(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.storage().nbytes()); }

bool is_parameter(const at::TensorBase& tensor) {
  if (tensor.is_view()) return is_parameter(tensor._base());
  return tensor.requires_grad() && tensor.is_leaf();
}

// The tensor takes all of its storage, each element once.
bool fills_storage(const at::Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense() && tensor.storage_offset() == 0 &&
         static_cast<int64_t>(tensor.nbytes()) == storage_bytes(tensor);
}

// Where an operator draws: beside its tensors, of which those on the CPU may be numbers.
std::vector<at::Device> devices_drawn_on(const std::vector<at::Tensor>& read, const std::optional<at::Device>& asked) {
  std::vector<at::Device> devices;
  const auto add = [&](at::Device device) {
    if (std::find(devices.begin(), devices.end(), device) == devices.end()) devices.push_back(device);
  };
  // Without an index it is the current one.
  if (asked) add(asked->is_cpu() || asked->has_index() ? *asked : at::empty({0}, at::TensorOptions(*asked)).device());
  for (const at::Tensor& tensor : read) {
    if (!asked && !tensor.is_cpu()) add(tensor.device());
  }
  if (devices.empty()) add(at::kCPU);
  return devices;
}

bool is_optional_list(const c10::IValue& value) {
  return value.isList() && value.type()->isSubtypeOf(*c10::ListType::create(c10::OptionalType::ofTensor()));
}

// The arguments of an operator, which lie on top of the stack.
template <class Visit>
void each_tensor(const c10::IValue& value, Visit&& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor());
  } else if (value.isTensorList() || is_optional_list(value)) {
    for (const c10::IValue& element : value.toListRef()) {
      if (element.isTensor() && element.toTensor().defined()) visit(element.toTensor());
    }
  }
}

}  // namespace

Counts counts_of(const at::Tensor& tensor) {
  return Counts(tensor.is_view() ? tensor._base().getIntrusivePtr() : tensor.getIntrusivePtr());
}

std::shared_ptr<StoredValue> OperatorLog::made_value_of(const at::Tensor& tensor) const {
  const auto found = places_.find(storage_impl(tensor));
  if (found == places_.end() || !found->second.made || found->second.made->blank) return nullptr;
  // Another count of changes: something that was not seen has written to it, or it is another tensor's `data`. Another
  // size: resize_().
  const bool as_made =
      found->second.version == version_of(tensor) && found->second.made->bytes == storage_bytes(tensor);
  return as_made ? found->second.made : nullptr;
}

std::shared_ptr<StoredValue> OperatorLog::value_of(const at::Tensor& tensor, const Counts& counts) {
  if (auto made = made_value_of(tensor)) return made;
  Place& place = places_[storage_impl(tensor)];
  for (const Held& each : place.held) {
    if (each.counts != counts) continue;
    if (auto held = each.value.lock(); held && held->version == version_of(tensor)) return held;
  }
  place.storage = tensor.storage().getWeakStorageImpl();
  place.made.reset();
  auto value = std::make_shared<StoredValue>(mutex_);
  value->bytes = storage_bytes(tensor);
  value->device = tensor.device();
  value->held = alias_of(tensor);
  value->version = version_of(tensor);
  value->anchored = is_parameter(tensor);
  add_held(place, value, counts);
  place.version = value->version;
  return value;
}

void OperatorLog::hold(const std::shared_ptr<StoredValue>& value, const at::Tensor& tensor, const Counts& counts) {
  std::shared_ptr<Step> ended;  // outside of the lock
  {
    const std::lock_guard lock(*mutex_);
    if (value->held.defined()) return;
    value->held = alias_of(tensor);
    value->version = version_of(tensor);
    ended = std::move(value->step);
  }
  const auto found = places_.find(storage_impl(tensor));
  if (found == places_.end() || found->second.made != value) return;
  add_held(found->second, value, counts);
  found->second.made.reset();
}

void OperatorLog::add_held(Place& place, const std::shared_ptr<StoredValue>& value, const Counts& counts) {
  std::erase_if(place.held, [](const Held& each) { return each.value.expired(); });
  place.held.push_back({value, counts});
}

std::optional<TensorRef> OperatorLog::ref_of(const at::Tensor& tensor) {
  if (!is_plain(tensor)) return std::nullopt;
  std::shared_ptr<StoredValue> value = value_of(tensor, counts_of(tensor));
  value->is_argument = true;
  return TensorRef{std::move(value), Geometry(tensor)};
}

bool OperatorLog::add_argument(Step& step, const c10::IValue& value) {
  Argument argument;
  const auto add = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) {
      argument.tensors.emplace_back(std::nullopt);
      return true;
    }
    auto ref = ref_of(tensor);
    if (!ref) return false;
    argument.tensors.push_back(std::move(ref));
    return true;
  };
  // Numbers that Scalars became have a flag of their own, which decides dtypes.
  const bool is_number =
      value.isTensor() && value.toTensor().defined() && value.toTensor().unsafeGetTensorImpl()->is_wrapped_number();
  if (value.isTensor() && !is_number) {
    argument.kind = Argument::Kind::kTensor;
    if (!add(value.toTensor())) return false;
  } else if (value.isTensorList() || is_optional_list(value)) {
    argument.kind = value.isTensorList() ? Argument::Kind::kTensors : Argument::Kind::kOptionalTensors;
    for (const c10::IValue& element : value.toListRef()) {
      if (!add(element.isTensor() ? element.toTensor() : at::Tensor())) return false;
    }
  } else if (value.isGenerator() && value.toGenerator().defined()) {
    return false;  // not a default one, whose state is recorded
  } else {
    argument.plain = value;
  }
  step.arguments.push_back(std::move(argument));
  return true;
}

std::shared_ptr<StoredValue> OperatorLog::blank_value_of(const c10::IValue& written) const {
  if (!written.isTensor() || !is_plain(written.toTensor()) || !fills_storage(written.toTensor())) return nullptr;
  const auto found = places_.find(storage_impl(written.toTensor()));
  const bool is_blank = found != places_.end() && found->second.made && found->second.made->blank;
  return is_blank ? found->second.made : nullptr;
}

std::shared_ptr<Step> OperatorLog::step_of(const c10::OperatorHandle& op, const OperatorFacts& facts,
                                           const torch::jit::Stack& stack) {
  auto step = std::make_shared<Step>(op, operators_);
  const size_t count = op.schema().arguments().size();
  std::vector<at::Tensor> read;
  std::optional<at::Device> asked;  // for where its output is
  for (size_t i = 0; i < count; ++i) {
    const c10::IValue& value = stack[stack.size() - count + i];
    // The program waits for such a copy when it likes; who computes it again does not know when.
    if (value.isBool() && value.toBool() && op.schema().arguments()[i].name() == "non_blocking") return nullptr;
    // Memory that nobody has written is no argument but of what writes it.
    if (auto blank = facts.overwrites && i == 0 ? blank_value_of(value) : nullptr) {
      Argument& argument = step->arguments.emplace_back();
      argument.kind = Argument::Kind::kTensor;
      argument.tensors.emplace_back(TensorRef{std::move(blank), Geometry(value.toTensor())});
      read.push_back(value.toTensor());
      continue;
    }
    if (value.isDevice()) asked = value.toDevice();
    each_tensor(value, [&](const at::Tensor& tensor) { read.push_back(tensor); });
    if (!add_argument(*step, value)) return nullptr;
  }
  if (facts.random) {
    step->state = ExecutionState::capture_of(devices_drawn_on(read, asked));
    step->state_bytes = kGeneratorBytes;
  }
  return step;
}

// Whoever needs the memory as it is now gets a copy of it, by whichever tensor it is known and written.
void OperatorLog::before_write(const at::Tensor& tensor) {
  const auto found = places_.find(storage_impl(tensor));
  if (found == places_.end()) return;
  c10::Storage copy;
  for (const Held& each : std::exchange(found->second.held, {})) {
    const std::shared_ptr<StoredValue> value = each.value.lock();
    // Of another version: changed by what was not seen, which is an error where the value is asked for.
    if (!value || !value->is_argument || value->version != version_of(value->held)) continue;
    const at::NoGradGuard no_graph;
    if (!copy) copy = copy_of_storage(tensor.storage());
    at::Tensor own = Geometry(value->held).on(copy);
    const std::lock_guard lock(*mutex_);
    value->held = std::move(own);
    value->version = version_of(value->held);
  }
}

// What is held already, and is needed by nobody yet, would be copied for nothing.
bool OperatorLog::continues(const c10::OperatorHandle& op, const OperatorFacts& facts,
                            const torch::jit::Stack& stack) const {
  const c10::IValue& written = stack[stack.size() - op.schema().arguments().size()];
  if (!written.isTensor() || !is_plain(written.toTensor())) return false;
  return made_value_of(written.toTensor()) != nullptr || (facts.overwrites && blank_value_of(written) != nullptr);
}

void OperatorLog::before_unseen_write(const at::Tensor& tensor) {
  if (!is_plain(tensor)) return;
  before_write(tensor);
  places_.erase(storage_impl(tensor));
}

OperatorLog::Draft OperatorLog::begin(const c10::OperatorHandle& op, const OperatorFacts& facts,
                                      const torch::jit::Stack& stack, bool record) {
  ++operators_;
  if (operators_ % kSweepEvery == 0) sweep();
  Draft draft;
  const size_t count = op.schema().arguments().size();
  for (const size_t i : facts.writes) {
    each_tensor(stack[stack.size() - count + i], [&](const at::Tensor& tensor) {
      if (is_plain(tensor)) draft.written.push_back(tensor);
    });
  }
  if (record && (facts.writes.empty() || continues(op, facts, stack))) draft.step = step_of(op, facts, stack);
  if (draft.step && !facts.writes.empty()) {
    // Only what was dropped before, or never held, goes on to be dropped.
    draft.before = draft.step->arguments[0].tensors.empty() ? nullptr : draft.step->arguments[0].tensors[0]->value;
    const bool dropped = draft.before && !draft.before->held.defined();
    if (!dropped || draft.written.size() != 1) draft.step.reset();
    if (draft.step) draft.step->written = 0;
  }
  for (const at::Tensor& tensor : draft.written) before_write(tensor);
  return draft;
}

void OperatorLog::end_in_place(const Draft& draft) {
  const at::Tensor& tensor = draft.written.front();
  auto value = std::make_shared<StoredValue>(mutex_);
  value->bytes = draft.before->bytes;
  value->device = draft.before->device;
  value->step = draft.step;
  if (storage_bytes(tensor) != value->bytes) {
    places_.erase(storage_impl(tensor));
    return;
  }
  enter(tensor, std::move(value));
}

void OperatorLog::enter(const at::Tensor& tensor, std::shared_ptr<StoredValue> value) {
  Place& place = places_[storage_impl(tensor)];
  place.storage = tensor.storage().getWeakStorageImpl();
  place.version = version_of(tensor);
  place.made = std::move(value);
  place.held.clear();
}

void OperatorLog::end(const Draft& draft, const OperatorFacts& facts, const torch::jit::Stack& stack) {
  if (draft.step && draft.step->written) return end_in_place(draft);
  for (const at::Tensor& tensor : draft.written) places_.erase(storage_impl(tensor));
  if (!draft.step && !facts.makes_blank) return;
  std::vector<std::pair<size_t, at::Tensor>> outputs;
  for (size_t i = 0; i < facts.returns; ++i) {
    const c10::IValue& returned = stack[stack.size() - facts.returns + i];
    if (!returned.isTensor() || !returned.toTensor().defined()) continue;
    const at::Tensor& output = returned.toTensor();
    // Views and what is known already stay what they are.
    if (!is_plain(output)) return;
    const auto known = places_.find(storage_impl(output));
    if (known != places_.end() && !known->second.storage.expired()) return;
    for (const auto& [place, other] : outputs) {
      if (storage_impl(other) == storage_impl(output)) return;
    }
    outputs.emplace_back(i, output);
  }
  for (const auto& [i, output] : outputs) {
    auto value = std::make_shared<StoredValue>(mutex_);
    value->bytes = storage_bytes(output);
    value->device = output.device();
    value->step = draft.step;
    value->output = i;
    value->blank = facts.makes_blank;
    enter(output, std::move(value));
  }
}

void OperatorLog::sweep() {
  std::erase_if(places_, [](const auto& each) { return each.second.storage.expired(); });
}

}  // namespace ds::recompute
