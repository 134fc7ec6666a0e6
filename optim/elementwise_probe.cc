#include "optim/elementwise_probe.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/tensor.h>

#include <exception>
#include <functional>
#include <utility>

#include "core/text.h"
#include "optim/written_states.h"

namespace ds::optimizers {
namespace {

constexpr int64_t kElements = 12;
constexpr int kSteps = 5;
constexpr double kRate = 0.05;  // where the group's is 0, as at the start of a warm-up

// Values whose sizes differ by a factor of 100, so that a norm of all of them shows in each.
at::Tensor values_of(int step) {
  const at::Tensor numbers = at::arange(kElements, at::kDouble);
  const at::Tensor sizes = numbers.remainder(3).mul(2.3).exp().mul(0.1);
  return numbers.mul(0.9).add(0.7 + 1.7 * step).sin().mul(sizes).to(at::kFloat);
}

using Shape = std::function<std::vector<at::Tensor>(const at::Tensor& flat)>;

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

  // The values, flat, after some steps on the tensors that `shape` makes of them; with `in_turn` one by one.
  at::Tensor stepped(const torch::optim::OptimizerOptions& options, const Shape& shape, bool in_turn = false) {
    at::Tensor start = values_of(-1).clone();
    std::vector<at::Tensor> parameters;
    for (const at::Tensor& part : shape(start)) parameters.push_back(part.clone());
    optimizer_.state().clear();
    optimizer_.param_groups().clear();
    optimizer_.param_groups().emplace_back(parameters, rated(options));
    for (int step = 0; step < kSteps; ++step) {
      const std::vector<at::Tensor> gradients = shape(values_of(step));
      for (size_t i = 0; i < parameters.size(); ++i) {
        parameters[i].mutable_grad() = gradients[i].clone();
        if (in_turn || i + 1 == parameters.size()) optimizer_.step();
        if (in_turn) parameters[i].mutable_grad() = at::Tensor();
      }
    }
    std::vector<at::Tensor> flat;
    for (const at::Tensor& parameter : parameters) flat.push_back(parameter.detach().reshape({-1}));
    last_ = parameters.front();
    return at::cat(flat);
  }

  // What it keeps of the first tensor of the last run. Empty where that is not of its elements alone.
  std::pair<ClientState, std::string> state() const {
    const auto found = optimizer_.state().find(last_.unsafeGetTensorImpl());
    if (found == optimizer_.state().end() || !found->second) return {};
    std::shared_ptr<torch::optim::OptimizerParamState> prototype = found->second->clone();
    ClientState state{.names = {}, .prototype = prototype};
    const std::optional<StateFields> fields = fields_of(*prototype);
    if (!fields) return {written(std::move(state)), {}};
    for (const auto& [name, tensor] : fields->tensors) {
      if (!tensor->defined()) continue;
      if (tensor->numel() != kElements) {
        return {state, cat("keeps ", tensor->numel(), " elements of ", name, " for a parameter of ", kElements)};
      }
      state.names.push_back(name);
      *tensor = at::Tensor();
    }
    return {state, {}};
  }

 private:
  // Of a class of the program's: known where it writes tensors of the elements and counts of steps alone.
  static ClientState written(ClientState state) {
    const std::optional<WrittenState> values = written_state(*state.prototype);
    state.is_written = true;
    state.is_known = values.has_value();
    if (!values) return state;
    for (const auto& [name, tensor] : values->tensors) {
      state.names.push_back(name);
      state.is_known = state.is_known && tensor.numel() == kElements && at::isFloatingType(tensor.scalar_type());
    }
    for (const auto& [name, number] : values->numbers) {
      state.counters.push_back(name);
      state.is_known = state.is_known && number == kSteps;
    }
    if (!state.is_known) state.names.clear();
    return state;
  }
  static std::unique_ptr<torch::optim::OptimizerOptions> rated(const torch::optim::OptimizerOptions& options) {
    std::unique_ptr<torch::optim::OptimizerOptions> own = options.clone();
    if (own->get_lr() == 0) own->set_lr(kRate);
    return own;
  }

  torch::optim::Optimizer& optimizer_;
  std::vector<torch::optim::OptimizerParamGroup> groups_;
  std::remove_reference_t<decltype(std::declval<torch::optim::Optimizer&>().state())> states_;
  at::Tensor last_;
};

bool are_close(const at::Tensor& a, const at::Tensor& b) { return at::allclose(a, b, /*rtol=*/1e-5, /*atol=*/1e-7); }

// Why a group cannot be updated in slices; empty: it can.
std::string problem_of(Emptied& probe, const torch::optim::OptimizerOptions& options, ClientState& state) {
  const Shape flat = [](const at::Tensor& values) { return std::vector<at::Tensor>{values}; };
  const Shape matrix = [](const at::Tensor& values) { return std::vector<at::Tensor>{values.view({3, 4})}; };
  const Shape cut = [](const at::Tensor& values) { return values.split_with_sizes({5, kElements - 5}); };
  const at::Tensor order = at::tensor({7, 2, 11, 0, 5, 9, 1, 10, 3, 8, 6, 4}, at::kLong);
  const Shape permuted = [&](const at::Tensor& values) {
    return std::vector<at::Tensor>{values.index_select(0, order)};
  };
  const at::Tensor expected = probe.stepped(options, flat);
  std::string problem;
  std::tie(state, problem) = probe.state();
  if (!problem.empty()) return problem;
  if (expected.equal(values_of(-1))) return "changes nothing, so that it cannot be tried";
  if (!probe.stepped(options, flat).equal(expected)) {
    return "gives other values when it begins anew: it keeps something beside state(), or draws random numbers. Keep "
           "it in state(), for each parameter";
  }
  if (!are_close(probe.stepped(options, permuted), expected.index_select(0, order))) {
    return "gives other values when the elements of a parameter change places";
  }
  if (!are_close(probe.stepped(options, matrix), expected)) {
    return "gives other values when a matrix of 3 x 4 lies in one row of 12";
  }
  if (!are_close(probe.stepped(options, cut, /*in_turn=*/true), expected)) {
    return "gives other values when a parameter is cut in two that get their gradients in two calls of step()";
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
      result.problem = problem_of(probe, group.options(), result.states.emplace_back());
      if (!result.problem.empty()) break;
    }
  } catch (const std::exception& error) {  // of the program's class: whatever it throws is the answer
    const std::string text = error.what();
    result.problem = cat("throws on a small parameter: ", text.substr(0, text.find('\n')));
  }
  if (!result.problem.empty()) result.states.clear();
  return result;
}

}  // namespace ds::optimizers
