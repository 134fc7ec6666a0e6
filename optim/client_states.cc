#include "optim/client_states.h"

#include <c10/util/Exception.h>
#include <c10/util/Type.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <optional>
#include <tuple>
#include <type_traits>
#include <typeinfo>

#include "dsengine/fused_optimizers.h"

namespace ds::optimizers {
namespace {

namespace to = torch::optim;

// Null for a class that is derived from it: it may keep more than we know of.
template <class State>
State* exactly(to::OptimizerParamState& state) {
  return typeid(state) == typeid(State) ? static_cast<State*>(&state) : nullptr;
}

template <class State>
StateFields adam_fields(State& state) {
  return {
      {{"exp_avg", &state.exp_avg()}, {"exp_avg_sq", &state.exp_avg_sq()}, {"max_exp_avg_sq", &state.max_exp_avg_sq()}},
      &state.step()};
}

template <class State>
ClientState kind_of(const std::vector<std::string>& names, bool from_start = true) {
  return {.names = names, .prototype = std::make_shared<State>(), .from_start = from_start};
}

// Describes the options of an optimizer of torch's; `State` is what it keeps.
template <class State, class Options>
ClientState adam_state(const Options& options) {
  std::vector<std::string> names = {"exp_avg", "exp_avg_sq"};
  if (options.amsgrad()) names.emplace_back("max_exp_avg_sq");
  return kind_of<State>(names);
}

ClientState rmsprop_state(const to::RMSpropOptions& options) {
  std::vector<std::string> names = {"square_avg"};
  if (options.momentum() > 0) names.emplace_back("momentum_buffer");
  if (options.centered()) names.emplace_back("grad_avg");
  return kind_of<to::RMSpropParamState>(names);
}

// The first step makes the buffer, from the gradient alone.
ClientState sgd_state(const to::SGDOptions& options) {
  if (options.momentum() == 0) return {};
  return kind_of<to::SGDParamState>({"momentum_buffer"}, /*from_start=*/false);
}

template <class Options, class Make>
std::vector<ClientState> of_groups(const to::Optimizer& optimizer, const Make& make) {
  std::vector<ClientState> result;
  for (const to::OptimizerParamGroup& group : optimizer.param_groups()) {
    result.push_back(make(static_cast<const Options&>(group.options())));
  }
  return result;
}

// Calls `use` with the options as what they are, and returns whether they are some of torch's.
template <class Options, class Use>
bool with_options(Options& options, const Use& use) {
  const auto as = [&](auto* typed) {
    if (typed) use(*typed);
    return typed != nullptr;
  };
  const auto is = [&]<class Typed>(Typed*) {
    return as(dynamic_cast<std::conditional_t<std::is_const_v<Options>, const Typed*, Typed*>>(&options));
  };
  return is(static_cast<to::SGDOptions*>(nullptr)) || is(static_cast<to::AdamOptions*>(nullptr)) ||
         is(static_cast<to::AdamWOptions*>(nullptr)) || is(static_cast<to::RMSpropOptions*>(nullptr)) ||
         is(static_cast<to::AdagradOptions*>(nullptr));
}

}  // namespace

std::optional<StateFields> fields_of(to::OptimizerParamState& state) {
  if (auto* const adam = exactly<to::AdamParamState>(state)) return adam_fields(*adam);
  if (auto* const adamw = exactly<to::AdamWParamState>(state)) return adam_fields(*adamw);
  if (auto* const sgd = exactly<to::SGDParamState>(state)) {
    return StateFields{{{"momentum_buffer", &sgd->momentum_buffer()}}, nullptr};
  }
  if (auto* const adagrad = exactly<to::AdagradParamState>(state)) {
    return StateFields{{{"sum", &adagrad->sum()}}, &adagrad->step()};
  }
  if (auto* const rmsprop = exactly<to::RMSpropParamState>(state)) {
    return StateFields{{{"square_avg", &rmsprop->square_avg()},
                        {"momentum_buffer", &rmsprop->momentum_buffer()},
                        {"grad_avg", &rmsprop->grad_avg()}},
                       &rmsprop->step()};
  }
  return std::nullopt;
}

std::string client_name(const to::Optimizer& optimizer) {
  const std::type_info& type = typeid(optimizer);
  if (type == typeid(to::SGD)) return "SGD";
  if (type == typeid(to::Adam) || type == typeid(FusedAdam)) return "Adam";
  if (type == typeid(to::AdamW) || type == typeid(FusedAdamW)) return "AdamW";
  if (type == typeid(to::RMSprop)) return "RMSprop";
  if (type == typeid(to::Adagrad)) return "Adagrad";
  if (type == typeid(to::LBFGS)) return "LBFGS";
  return c10::demangle(type.name());
}

std::optional<std::vector<ClientState>> states_of_torch(const to::Optimizer& optimizer) {
  const std::type_info& type = typeid(optimizer);
  if (type == typeid(to::SGD)) return of_groups<to::SGDOptions>(optimizer, sgd_state);
  if (type == typeid(to::Adam) || type == typeid(FusedAdam)) {
    return of_groups<to::AdamOptions>(optimizer, adam_state<to::AdamParamState, to::AdamOptions>);
  }
  if (type == typeid(to::AdamW) || type == typeid(FusedAdamW)) {
    return of_groups<to::AdamWOptions>(optimizer, adam_state<to::AdamWParamState, to::AdamWOptions>);
  }
  if (type == typeid(to::RMSprop)) return of_groups<to::RMSpropOptions>(optimizer, rmsprop_state);
  if (type == typeid(to::Adagrad)) {
    return of_groups<to::AdagradOptions>(
        optimizer, [](const to::AdagradOptions&) { return kind_of<to::AdagradParamState>({"sum"}); });
  }
  return std::nullopt;
}

GroupOptions group_options_of(const to::OptimizerOptions& options) {
  GroupOptions result{.lr = options.get_lr()};
  with_options(options, [&](const auto& typed) {
    result.weight_decay = typed.weight_decay();
    if constexpr (requires { typed.betas(); }) std::tie(result.beta1, result.beta2) = typed.betas();
    if constexpr (requires { typed.momentum(); }) result.momentum = typed.momentum();
    if constexpr (requires { typed.eps(); }) result.eps = typed.eps();
  });
  return result;
}

void visit_options(const to::OptimizerOptions& options,
                   const std::function<void(const char* name, double value)>& visit) {
  std::optional<double> lr;
  try {
    lr = options.get_lr();
  } catch (const c10::Error&) {  // a class of the program's need not say it
    return;
  }
  visit("lr", *lr);
  if (const auto* const lbfgs = dynamic_cast<const to::LBFGSOptions*>(&options)) {
    constexpr int64_t kNotGiven = -1;
    visit("max_iter", static_cast<double>(lbfgs->max_iter()));
    visit("max_eval", static_cast<double>(lbfgs->max_eval().value_or(kNotGiven)));
    visit("tolerance_grad", lbfgs->tolerance_grad());
    visit("tolerance_change", lbfgs->tolerance_change());
    visit("history_size", static_cast<double>(lbfgs->history_size()));
    visit("line_search_fn", lbfgs->line_search_fn() ? 1.0 : 0.0);
    return;
  }
  with_options(options, [&](const auto& typed) {
    visit("weight_decay", typed.weight_decay());
    if constexpr (requires { typed.betas(); }) {
      visit("beta1", std::get<0>(typed.betas()));
      visit("beta2", std::get<1>(typed.betas()));
    }
    if constexpr (requires { typed.amsgrad(); }) visit("amsgrad", typed.amsgrad());
    if constexpr (requires { typed.momentum(); }) visit("momentum", typed.momentum());
    if constexpr (requires { typed.dampening(); }) visit("dampening", typed.dampening());
    if constexpr (requires { typed.nesterov(); }) visit("nesterov", typed.nesterov());
    if constexpr (requires { typed.alpha(); }) visit("alpha", typed.alpha());
    if constexpr (requires { typed.centered(); }) visit("centered", typed.centered());
    if constexpr (requires { typed.lr_decay(); }) visit("lr_decay", typed.lr_decay());
    if constexpr (requires { typed.eps(); }) visit("eps", typed.eps());
  });
}

int64_t counted_steps(const to::Optimizer& optimizer, const to::OptimizerParamGroup& group) {
  int64_t sum = 0;
  for (const at::Tensor& parameter : group.params()) {
    const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
    if (found == optimizer.state().end() || !found->second) continue;
    const to::OptimizerParamState& state = *found->second;
    const auto count = [&]<class State>(const State* /*kind*/) {
      if (typeid(state) != typeid(State)) return false;
      sum += static_cast<const State&>(state).step();
      return true;
    };
    count(static_cast<const to::AdamWParamState*>(nullptr)) || count(static_cast<const to::AdamParamState*>(nullptr)) ||
        count(static_cast<const to::AdagradParamState*>(nullptr)) ||
        count(static_cast<const to::RMSpropParamState*>(nullptr));
  }
  return sum;
}

void set_group_options(to::OptimizerOptions& options, const GroupOptions& values) {
  options.set_lr(values.lr);
  with_options(options, [&](auto& typed) {
    typed.weight_decay(values.weight_decay);
    if constexpr (requires { typed.betas(); }) typed.betas({values.beta1, values.beta2});
    if constexpr (requires { typed.momentum(); }) typed.momentum(values.momentum);
    if constexpr (requires { typed.eps(); }) typed.eps(values.eps);
  });
}

}  // namespace ds::optimizers
