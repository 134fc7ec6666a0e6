#include "optim/client_optimizer.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "optim/written_states.h"

namespace ds::optimizers {
namespace {

// A gradient of a slice for as long as it lives.
class GradientOf {
 public:
  GradientOf(const at::Tensor& leaf, at::Tensor gradient) : leaf_(leaf) { leaf_.mutable_grad() = std::move(gradient); }
  ~GradientOf() { leaf_.mutable_grad() = at::Tensor(); }
  GradientOf(const GradientOf&) = delete;
  GradientOf& operator=(const GradientOf&) = delete;

 private:
  const at::Tensor& leaf_;
};

}  // namespace

ClientOptimizer::ClientOptimizer(std::shared_ptr<torch::optim::Optimizer> client, std::vector<ClientState> states,
                                 Previous previous)
    : SliceOptimizer(std::vector<GroupOptions>(states.size() + 1)),
      client_(std::move(client)),
      kinds_(std::move(states)),
      previous_(std::move(previous)) {
  ensure(client_ != nullptr && kinds_.size() == client_->param_groups().size(), "a state for each group");
}

const ClientState* ClientOptimizer::kind_of(const Slice& slice) const {
  const auto group = static_cast<size_t>(slice.group);
  return group < kinds_.size() ? &kinds_[group] : nullptr;
}

void ClientOptimizer::allocate_states(int64_t index, const NewState& new_state) {
  NamedStates& own = states_.emplace_back();
  copies_.emplace_back();
  const Slice& own_slice = slice(index);
  leaves_.push_back(own_slice.row_width > 0 ? own_slice.master.view({-1, own_slice.row_width}) : own_slice.master);
  const ClientState* const kind = kind_of(own_slice);
  if (!kind) return;
  for (const std::string& name : kind->names) own.emplace_back(name, new_state());
  take_over(index);
}

void ClientOptimizer::take_over(int64_t index) const {
  const at::NoGradGuard no_grad;
  for (const Segment& segment : slice(index).segments) {
    if (!previous_) return;
    for (const auto& [name, values] : previous_(static_cast<int>(segment.parameter))) {
      for (const auto& [own, flat] : states_[static_cast<size_t>(index)]) {
        if (own != name) continue;
        flat.narrow(0, segment.slice_offset, segment.length)
            .copy_(values.narrow(0, segment.parameter_offset, segment.length));
      }
    }
  }
}

void ClientOptimizer::hold(int64_t steps) {
  std::vector<torch::optim::OptimizerParamGroup>& groups = client_->param_groups();
  for (torch::optim::OptimizerParamGroup& group : groups) group.params().clear();
  client_->state().clear();
  previous_ = nullptr;
  set_step_count(steps);
  for (int64_t i = 0; i < slice_count(); ++i) {
    if (kind_of(slice(i))) groups[static_cast<size_t>(slice(i).group)].params().push_back(leaf(i));
  }
  states_changed(/*rank_states=*/true);
}

void ClientOptimizer::begin_state(int64_t index) {
  const Slice& own = slice(index);
  const ClientState& kind = *kind_of(own);
  std::unique_ptr<torch::optim::OptimizerParamState> state = kind.prototype->clone();
  if (const std::optional<StateFields> fields = fields_of(*state)) {
    for (const auto& [name, tensor] : fields->tensors) {
      for (const auto& [kept, values] : states_[static_cast<size_t>(index)]) {
        if (kept == name) *tensor = own.row_width > 0 ? values.view({-1, own.row_width}) : values;
      }
    }
    if (fields->step) *fields->step = step_count_;
  }
  client_->state()[leaf(index).unsafeGetTensorImpl()] = std::move(state);
}

void ClientOptimizer::states_changed(bool /*rank_states*/) {
  for (int64_t i = 0; i < slice_count(); ++i) {
    const ClientState* const kind = kind_of(slice(i));
    if (!kind || !kind->prototype || !kind->is_known) continue;
    Copy& copy = copies_[static_cast<size_t>(i)];
    if (kind->is_written && step_count_ > 0) {
      const bool begun = client_->state().count(leaf(i).unsafeGetTensorImpl()) > 0;
      if (begun && !copy.is_current) continue;  // nobody has asked for them, so nobody has changed them
      copy.is_current = false;
      write_changed(i, step_count_);
    } else if (kind->from_start || step_count_ > 0) {
      begin_state(i);
    } else {
      client_->state().erase(leaf(i).unsafeGetTensorImpl());
    }
  }
}

void ClientOptimizer::update(int64_t index, const at::Tensor& gradient, double gradient_scale) {
  const Slice& own = slice_for_update(index, gradient);
  if (!kind_of(own)) return;
  const at::NoGradGuard no_grad;
  const at::Tensor wide = gradient.to(own.master.scalar_type());
  if (gradient_scale != 1.0) wide.mul_(gradient_scale);
  step_on(index, wide);
}

void ClientOptimizer::begin_step() {
  for (const Slice& own : slices_) {
    if (own.row_width == 0 || !kind_of(own)) continue;
    require_row_wise(name(), group_options_of(client_->param_groups()[static_cast<size_t>(own.group)].options()));
  }
  SliceOptimizer::begin_step();
}

// Steps without a row, too: the optimizer counts its steps, and ranks compare these.
void ClientOptimizer::update_rows(int64_t index, const TableRows& gradients, double gradient_scale) {
  const Slice& own = slice(index);
  if (!kind_of(own)) return;
  const at::NoGradGuard no_grad;
  if (gradient_scale != 1.0) gradients.values.mul_(gradient_scale);
  step_on(index, sparse_of(gradients, leaf(index).sizes(), /*coalesced=*/true));
}

void ClientOptimizer::step_on(int64_t index, const at::Tensor& gradient) {
  const ClientState& kind = *kind_of(slice(index));
  // Drops the state that a first step has made which was skipped, or failed.
  if (step_count_ == 1 && !kind.from_start) client_->state().erase(leaf(index).unsafeGetTensorImpl());
  Copy& copy = copies_[static_cast<size_t>(index)];
  const bool asked = std::exchange(copy.is_asked, false);
  if (copy.is_current && kind.is_written && step_count_ > 1) write_changed(index, step_count_ - 1);
  const GradientOf given(leaf(index), gradient);
  client_->step();
  if (!kind.is_written) return adopt(index);
  copy.is_current = false;
  if (asked)
    read_written(
        index);  // whoever asked before the step may write to them after it, as FrozenValues of engine/update does
}

NamedStates ClientOptimizer::states(int64_t index) {
  const ClientState* const kind = kind_of(slice(index));
  if (kind && kind->is_written) {
    Copy& copy = copies_[static_cast<size_t>(index)];
    if (!copy.is_current) read_written(index);
    copy.is_asked = true;
  }
  return states_.at(static_cast<size_t>(index));
}

uint64_t ClientOptimizer::versions_of(int64_t index) const {
  uint64_t sum = 0;
  for (const auto& [name, values] : states_[static_cast<size_t>(index)]) sum += values._version();
  return sum;
}

void ClientOptimizer::read_written(int64_t index) {
  const at::NoGradGuard no_grad;
  const auto found = client_->state().find(leaf(index).unsafeGetTensorImpl());
  if (found != client_->state().end() && found->second) {
    if (const std::optional<WrittenState> written = written_state(*found->second)) {
      for (const auto& [name, values] : written->tensors) {
        for (const auto& [kept, copy] : states_[static_cast<size_t>(index)]) {
          if (kept == name) copy.copy_(values.reshape({-1}));
        }
      }
    }
  }
  copies_[static_cast<size_t>(index)] = {.is_current = true, .versions = versions_of(index)};
}

void ClientOptimizer::write_changed(int64_t index, int64_t steps) {
  Copy& copy = copies_[static_cast<size_t>(index)];
  if (copy.is_current && copy.versions == versions_of(index)) return;
  const ClientState& kind = *kind_of(slice(index));
  WrittenState values{.tensors = states_[static_cast<size_t>(index)], .numbers = {}};
  for (const std::string& counter : kind.counters) values.numbers[counter] = steps;
  std::unique_ptr<torch::optim::OptimizerParamState> state = kind.prototype->clone();
  read_state(*state, values);
  client_->state()[leaf(index).unsafeGetTensorImpl()] = std::move(state);
  copy = {.is_current = true, .versions = versions_of(index)};
}

void ClientOptimizer::adopt(int64_t index) {
  const auto found = client_->state().find(leaf(index).unsafeGetTensorImpl());
  if (found == client_->state().end() || !found->second) return;
  const std::optional<StateFields> fields = fields_of(*found->second);
  if (!fields) return;
  NamedStates& own = states_[static_cast<size_t>(index)];
  const bool in_rows = slice(index).row_width > 0;  // then a state is kept flat, and the optimizer has its rows
  for (const auto& [name, tensor] : fields->tensors) {
    if (!tensor->defined()) continue;
    const auto kept =
        std::find_if(own.begin(), own.end(), [&, &wanted = name](const auto& one) { return one.first == wanted; });
    if (kept == own.end()) {
      own.emplace_back(name, *tensor);  // of an option that has changed since
    } else if (!kept->second.is_same(*tensor) && !(in_rows && tensor->is_alias_of(kept->second))) {
      kept->second.copy_(*tensor);
      *tensor = kept->second;
    }
  }
}

OptimizerTraits ClientOptimizer::traits() const {
  constexpr size_t kFloat = 4;
  size_t most = 0;
  for (const ClientState& kind : kinds_) most = std::max(most, kind.names.size());
  return {.state_bytes_per_element = static_cast<int64_t>(most * kFloat)};
}

}  // namespace ds::optimizers
