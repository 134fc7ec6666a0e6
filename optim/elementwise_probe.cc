#include "optim/elementwise_probe.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/isclose.h>
#include <ATen/ops/tensor.h>
#include <c10/core/ScalarType.h>

#include <exception>
#include <functional>
#include <typeinfo>
#include <utility>

#include "core/text.h"
#include "optim/written_states.h"

namespace ds::optimizers {
namespace {

constexpr int kSteps = 5;
constexpr double kRate = 0.05;  // at least: at the start of a warm-up nothing would show

// A trial of the optimizer, on a tensor of as many elements as a matrix of these sizes.
struct Trial {
  int64_t rows;
  int64_t columns;
  double gradient_size = 1.0;

  int64_t numel() const { return rows * columns; }
};
constexpr Trial kSmall = {.rows = 3, .columns = 4};
// For what begins with a size: factors of matrices from 128 x 128 on, blocks of up to 4096 elements, norms.
constexpr Trial kLarge = {.rows = 160, .columns = 144};
constexpr double kLargeGradients = 1e4;
constexpr int64_t kCutOfLarge = 9001;  // in no block's middle or end

// Values whose sizes differ by a factor of 100, so that a norm of all of them shows in each. Of the large trial those
// of one end are larger in some steps and those of the other in others, so that norms of parts go their own ways.
at::Tensor values_of(const Trial& trial, int step) {
  const at::Tensor numbers = at::arange(trial.numel(), at::kDouble);
  const at::Tensor sizes = numbers.remainder(3).mul(2.3).exp().mul(step < 0 ? 0.1 : 0.1 * trial.gradient_size);
  if (trial.numel() > kSmall.numel()) {
    sizes.mul_(numbers.mul(3.0 / static_cast<double>(trial.numel())).add(2.1 * step).sin().mul(0.9).add(1.0));
  }
  return numbers.mul(0.9).add(0.7 + 1.7 * step).sin().mul(sizes).to(at::kFloat);
}

using Shape = std::function<std::vector<at::Tensor>(const at::Tensor& flat)>;
using StateOwner = std::unique_ptr<torch::optim::OptimizerParamState>;

std::vector<at::Tensor> in_a_row(const at::Tensor& values) { return {values}; }

// The optimizer without its parameters and states, which it has again at the end.
class Emptied {
 public:
  explicit Emptied(torch::optim::Optimizer& optimizer) : optimizer_(optimizer) {
    std::swap(groups_, optimizer_.param_groups());
    std::swap(states_, optimizer_.state());
  }
  ~Emptied() {
    std::swap(groups_, optimizer_.param_groups());
    std::swap(states_, optimizer_.state());
  }
  Emptied(const Emptied&) = delete;
  Emptied& operator=(const Emptied&) = delete;

  const std::vector<torch::optim::OptimizerParamGroup>& groups() const { return groups_; }
  // From now on it steps with these.
  void use(const torch::optim::OptimizerOptions& options) {
    options_ = options.clone();
    if (options_->get_lr() >= 0 && options_->get_lr() < kRate) options_->set_lr(kRate);
  }

  // The values, flat, after some steps on the tensors that `shape` makes of them; with `in_turn` one by one.
  at::Tensor stepped(const Trial& trial, const Shape& shape, bool in_turn = false) {
    const std::vector<at::Tensor> parameters = begin(shape(values_of(trial, -1)));
    for (int step = 0; step < kSteps; ++step) make_step(parameters, shape(values_of(trial, step)), in_turn);
    std::vector<at::Tensor> flat;
    for (const at::Tensor& parameter : parameters) flat.push_back(parameter.detach().reshape({-1}));
    last_ = parameters.front();
    return at::cat(flat);
  }

  // Steps in a row as stepped() does, but puts a state that was written in the place of an earlier one.
  at::Tensor stepped_from_written() {
    const std::vector<at::Tensor> parameters = begin(in_a_row(values_of(kSmall, -1)));
    StateOwner early;
    for (int step = 0; step < kSteps; ++step) {
      make_step(parameters, in_a_row(values_of(kSmall, step)), /*in_turn=*/false);
      StateOwner& state = optimizer_.state()[parameters.front().unsafeGetTensorImpl()];
      if (step == 0) early = state->clone();
      if (step + 2 != kSteps) continue;
      read_state(*early, written_state(*state).value());
      state = early->clone();
    }
    return parameters.front().detach();
  }

  // Returns the state that the optimizer keeps for the tensor of the last run, in a row, and why slices cannot have it.
  std::pair<ClientState, std::string> state() const {
    const auto found = optimizer_.state().find(last_.unsafeGetTensorImpl());
    if (found == optimizer_.state().end() || !found->second) return {};
    const torch::optim::OptimizerParamState& own = *found->second;
    std::shared_ptr<torch::optim::OptimizerParamState> prototype = own.clone();
    ClientState state{.names = {}, .prototype = prototype};
    const torch::optim::OptimizerParamState& copy = *prototype;
    if (typeid(copy) != typeid(own)) {
      return {state,
              "keeps a state whose clone() makes one of another class; derive it from "
              "OptimizerCloneableParamState<it>"};
    }
    const std::optional<StateFields> fields = fields_of(*prototype);
    if (!fields) return {written(std::move(state)), {}};
    for (const auto& [name, tensor] : fields->tensors) {
      if (!tensor->defined()) continue;
      if (tensor->numel() != kSmall.numel()) {
        return {state, cat("keeps ", tensor->numel(), " elements of ", name, " for a parameter of ", kSmall.numel())};
      }
      if (tensor->scalar_type() != last_.scalar_type()) {
        return {state, cat("keeps ", name, " in ", c10::toString(tensor->scalar_type()), " for a parameter of ",
                           c10::toString(last_.scalar_type()))};
      }
      state.names.push_back(name);
      *tensor = at::Tensor();
    }
    return {state, {}};
  }

 private:
  std::vector<at::Tensor> begin(const std::vector<at::Tensor>& values) {
    std::vector<at::Tensor> parameters;
    for (const at::Tensor& part : values) parameters.push_back(part.clone());
    optimizer_.state().clear();
    optimizer_.param_groups().clear();
    optimizer_.param_groups().emplace_back(parameters, options_->clone());
    return parameters;
  }
  void make_step(const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& gradients, bool in_turn) {
    for (size_t i = 0; i < parameters.size(); ++i) {
      parameters[i].mutable_grad() = gradients[i].clone();
      if (in_turn || i + 1 == parameters.size()) optimizer_.step();
      if (in_turn) parameters[i].mutable_grad() = at::Tensor();
    }
  }
  // Completes the state of a class of the program's. It is known where it writes only tensors of the elements and
  // counts of steps.
  ClientState written(ClientState state) const {
    const std::optional<WrittenState> values = written_state(*state.prototype);
    state.is_written = true;
    state.is_known = values.has_value();
    if (!values) return state;
    for (const auto& [name, tensor] : values->tensors) {
      state.names.push_back(name);
      state.is_known = state.is_known && tensor.defined() && tensor.numel() == kSmall.numel() &&
                       tensor.scalar_type() == last_.scalar_type();
    }
    for (const auto& [name, number] : values->numbers) {
      state.counters.push_back(name);
      state.is_known = state.is_known && number == kSteps;
    }
    if (!state.is_known) state.names.clear();
    return state;
  }

  torch::optim::Optimizer& optimizer_;
  std::vector<torch::optim::OptimizerParamGroup> groups_;
  std::remove_reference_t<decltype(std::declval<torch::optim::Optimizer&>().state())> states_;
  std::unique_ptr<torch::optim::OptimizerOptions> options_;
  at::Tensor last_;
};

bool are_close(const at::Tensor& a, const at::Tensor& b) { return at::allclose(a, b, /*rtol=*/1e-5, /*atol=*/1e-7); }

// But for a few: what falls beside a bound, or on the other side of zero before its sign is taken, by a rounding.
bool are_mostly_close(const at::Tensor& a, const at::Tensor& b) {
  const auto largest = b.abs().nan_to_num(0.0, 0.0, 0.0).max().item<double>();
  const at::Tensor close = at::isclose(a, b, /*rtol=*/1e-5, /*atol=*/1e-6 * largest, /*equal_nan=*/true);
  return close.logical_not().sum().item<int64_t>() <= a.numel() / 1000;
}

// Why a group cannot be updated in slices, as far as few small elements say it; empty: it can.
std::string problem_of_few(Emptied& probe, ClientState& state) {
  const Shape matrix = [](const at::Tensor& values) {
    return std::vector<at::Tensor>{values.view({kSmall.rows, kSmall.columns})};
  };
  const Shape cut = [](const at::Tensor& values) { return values.split_with_sizes({5, values.numel() - 5}); };
  const at::Tensor order = at::tensor({7, 2, 11, 0, 5, 9, 1, 10, 3, 8, 6, 4}, at::kLong);
  const Shape permuted = [&](const at::Tensor& values) {
    return std::vector<at::Tensor>{values.index_select(0, order)};
  };
  const at::Tensor expected = probe.stepped(kSmall, in_a_row);
  std::string problem;
  std::tie(state, problem) = probe.state();
  if (!problem.empty()) return problem;
  if (expected.equal(values_of(kSmall, -1))) return "changes nothing, so that it cannot be tried";
  if (!probe.stepped(kSmall, in_a_row).equal(expected)) {
    return "gives other values when it begins anew: it keeps something beside state(), or draws random numbers. Keep "
           "it in state(), for each parameter";
  }
  if (!are_close(probe.stepped(kSmall, permuted), expected.index_select(0, order))) {
    return "gives other values when the elements of a parameter change places";
  }
  if (!are_close(probe.stepped(kSmall, matrix), expected)) {
    return "gives other values when a matrix of 3 x 4 lies in one row of 12";
  }
  if (!are_close(probe.stepped(kSmall, cut, /*in_turn=*/true), expected)) {
    return "gives other values when a parameter is cut in two that get their gradients in two calls of step()";
  }
  // State that it does not write would be lost.
  if (state.is_written && state.is_known && !are_close(probe.stepped_from_written(), expected)) {
    state.is_known = false;
    state.names.clear();
  }
  return {};
}

// Looks for a problem with many tensors, and with large ones.
std::string problem_of_many(Emptied& probe) {
  const Shape matrix = [](const at::Tensor& values) {
    return std::vector<at::Tensor>{values.view({kLarge.rows, kLarge.columns})};
  };
  const Shape cut = [](const at::Tensor& values) {
    return values.split_with_sizes({kCutOfLarge, values.numel() - kCutOfLarge});
  };
  for (const double size : {1.0, kLargeGradients}) {
    Trial trial = kLarge;
    trial.gradient_size = size;
    const std::string where = cat(", with gradients of up to about ", 10 * size);
    const at::Tensor expected = probe.stepped(trial, in_a_row);
    if (!are_mostly_close(probe.stepped(trial, matrix), expected)) {
      return cat("gives other values when a matrix of ", kLarge.rows, " x ", kLarge.columns, " lies in one row", where);
    }
    if (!are_mostly_close(probe.stepped(trial, cut, /*in_turn=*/true), expected)) {
      return cat("gives other values when a parameter of ", kLarge.numel(), " elements is cut in two that get their ",
                 "gradients in two calls of step()", where);
    }
  }
  return {};
}

}  // namespace

ElementwiseProbe probe_elementwise(torch::optim::Optimizer& optimizer) {
  const at::NoGradGuard no_grad;
  ElementwiseProbe result;
  Emptied probe(optimizer);
  try {
    for (const torch::optim::OptimizerParamGroup& group : probe.groups()) {
      probe.use(group.options());
      result.problem = problem_of_few(probe, result.states.emplace_back());
      if (result.problem.empty()) result.problem = problem_of_many(probe);
      if (!result.problem.empty()) break;
    }
  } catch (const std::exception& error) {  // of the program's class: whatever it throws is the answer
    const std::string text = error.what();
    result.problem = cat("throws when it is tried: ", text.substr(0, text.find('\n')));
  }
  if (!result.problem.empty()) result.states.clear();
  return result;
}

}  // namespace ds::optimizers
