// Optimizers as a program writes them: some that update each element by itself, and some that do not.
#pragma once

#include <torch/torch.h>

#include <atomic>
#include <cmath>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

namespace ds::engine {

struct OwnOptions : torch::optim::OptimizerCloneableOptions<OwnOptions> {
  OwnOptions(double lr = 0.1) : rate(lr) {}  // NOLINT(google-explicit-constructor): as torch's
  double get_lr() const override { return rate; }
  void set_lr(double lr) override { rate = lr; }
  double rate;
};

// Calls `update` for each parameter that has a gradient.
class OwnOptimizer : public torch::optim::Optimizer {
 public:
  OwnOptimizer(std::vector<at::Tensor> parameters, OwnOptions options)
      : Optimizer({torch::optim::OptimizerParamGroup(std::move(parameters))}, std::make_unique<OwnOptions>(options)) {}
  at::Tensor step(LossClosure /*closure*/ = nullptr) override {
    const torch::NoGradGuard no_grad;
    for (torch::optim::OptimizerParamGroup& group : param_groups_) {
      for (at::Tensor& parameter : group.params()) {
        if (parameter.grad().defined()) update(parameter, group.options().get_lr());
      }
    }
    return {};
  }

 protected:
  virtual void update(at::Tensor& parameter, double lr) = 0;
};

// The sign of a momentum, with the larger steps at the start: it counts by parameter.
class SignMomentum : public OwnOptimizer {
  using OwnOptimizer::OwnOptimizer;
  void update(at::Tensor& parameter, double lr) override {
    auto& entry = state_[parameter.unsafeGetTensorImpl()];
    if (!entry) entry = std::make_unique<torch::optim::AdamParamState>();
    auto& state = static_cast<torch::optim::AdamParamState&>(*entry);
    if (!state.exp_avg().defined()) state.exp_avg(parameter.grad().clone());
    state.step(state.step() + 1);
    state.exp_avg().mul_(0.9).add_(parameter.grad(), 0.1);
    parameter.sub_(state.exp_avg().sign(), lr / std::sqrt(static_cast<double>(state.step())));
  }
};

// A class of states of its own, which writes itself as torch's do.
template <class State>
struct WrittenState : torch::optim::OptimizerCloneableParamState<State> {
  void serialize(torch::serialize::OutputArchive& archive) const override {
    ++times_written;
    archive.write("seen", c10::IValue(seen));
    archive.write("speed", c10::IValue(speed));
  }
  static inline std::atomic<int> times_written = 0;  // of this class
  void serialize(torch::serialize::InputArchive& archive) override {
    c10::IValue value;
    archive.read("seen", value);
    seen = value.toInt();
    archive.read("speed", value);
    speed = value.toTensor();
  }
  int64_t seen = 0;
  at::Tensor speed;
};
struct OwnState : WrittenState<OwnState> {};

class OwnMomentum : public OwnOptimizer {
  using OwnOptimizer::OwnOptimizer;
  void update(at::Tensor& parameter, double lr) override {
    auto& entry = state_[parameter.unsafeGetTensorImpl()];
    if (!entry) entry = std::make_unique<OwnState>();
    auto& state = static_cast<OwnState&>(*entry);
    ++state.seen;
    // In new memory, each time.
    state.speed = state.speed.defined() ? state.speed * 0.9 + parameter.grad() : parameter.grad().clone();
    parameter.sub_(state.speed, lr / std::sqrt(static_cast<double>(state.seen)));
  }
};

// A momentum in a state of the program's own, which writes nothing.
struct SilentState : torch::optim::OptimizerCloneableParamState<SilentState> {
  at::Tensor speed;
};
class SilentMomentum : public OwnOptimizer {
  using OwnOptimizer::OwnOptimizer;
  void update(at::Tensor& parameter, double lr) override {
    auto& entry = state_[parameter.unsafeGetTensorImpl()];
    if (!entry) entry = std::make_unique<SilentState>();
    at::Tensor& speed = static_cast<SilentState&>(*entry).speed;
    speed = speed.defined() ? speed * 0.9 + parameter.grad() : parameter.grad().clone();
    parameter.sub_(speed, lr);
  }
};

// One of torch's states with more of its own, which the inherited clone(), or serialize(), leaves out.
struct SlicedState : torch::optim::AdamParamState {
  double mean = 0;
};
struct ForgetfulState : WrittenState<ForgetfulState> {
  double decay = 1;
};

class KeepsSliced : public OwnOptimizer {
  using OwnOptimizer::OwnOptimizer;
  void update(at::Tensor& parameter, double lr) override {
    auto& entry = state_[parameter.unsafeGetTensorImpl()];
    if (!entry) entry = std::make_unique<SlicedState>();
    auto& state = static_cast<SlicedState&>(*entry);
    state.mean = 0.9 * state.mean + 0.1;
    parameter.sub_(parameter.grad(), lr * state.mean);
  }
};

class Forgets : public OwnOptimizer {
  using OwnOptimizer::OwnOptimizer;
  void update(at::Tensor& parameter, double lr) override {
    auto& entry = state_[parameter.unsafeGetTensorImpl()];
    if (!entry) entry = std::make_unique<ForgetfulState>();
    auto& state = static_cast<ForgetfulState&>(*entry);
    ++state.seen;
    state.decay *= 0.7;
    state.speed = state.speed.defined() ? state.speed * 0.9 + parameter.grad() : parameter.grad().clone();
    parameter.sub_(state.speed, lr * state.decay);
  }
};

// An optimizer that keeps float64 states, in a class of its own or in torch's.
template <class State>
class Doubles : public OwnOptimizer {
  using OwnOptimizer::OwnOptimizer;
  void update(at::Tensor& parameter, double lr) override {
    auto& entry = state_[parameter.unsafeGetTensorImpl()];
    if (!entry) entry = std::make_unique<State>();
    const at::Tensor wide = parameter.grad().to(at::kDouble);
    if constexpr (std::is_same_v<State, OwnState>) {
      auto& state = static_cast<OwnState&>(*entry);
      ++state.seen;
      state.speed = state.speed.defined() ? state.speed * 0.9 + wide : wide;
    } else {
      auto& state = static_cast<torch::optim::AdamParamState&>(*entry);
      state.exp_avg(state.exp_avg().defined() ? state.exp_avg() * 0.9 + wide : wide);
    }
    parameter.sub_(parameter.grad(), lr);
  }
};

// A norm that small gradients do not reach.
class ClipsLargeNorms : public OwnOptimizer {
  using OwnOptimizer::OwnOptimizer;
  void update(at::Tensor& parameter, double lr) override {
    constexpr double kLargest = 1e3;
    const auto norm = parameter.grad().norm().item<double>();
    parameter.sub_(parameter.grad(), norm > kLargest ? lr * kLargest / norm : lr);
  }
};

// Scales large matrices by the means of their rows and columns, like Adafactor.
class FactorsLargeMatrices : public OwnOptimizer {
  using OwnOptimizer::OwnOptimizer;
  void update(at::Tensor& parameter, double lr) override {
    at::Tensor squares = parameter.grad().square() + 1e-30;
    if (squares.dim() == 2 && squares.size(0) >= 128 && squares.size(1) >= 128) {
      squares = squares.mean(1, true) * squares.mean(0, true) / squares.mean();
    }
    parameter.sub_(parameter.grad() / squares.sqrt(), lr);
  }
};

// Gradients rounded in blocks.
class RoundsInBlocks : public OwnOptimizer {
  using OwnOptimizer::OwnOptimizer;
  void update(at::Tensor& parameter, double lr) override {
    const at::Tensor flat = parameter.grad().flatten().clone();
    for (at::Tensor& block : flat.split(2048)) {
      if (block.numel() < 2048) continue;
      const at::Tensor step = block.abs().max() / 127;
      block.copy_((block / step).round() * step);
    }
    parameter.sub_(flat.view_as(parameter), lr);
  }
};

// Scales by the norms of a parameter and its gradient, like LARS.
class NormScaled : public OwnOptimizer {
  using OwnOptimizer::OwnOptimizer;
  void update(at::Tensor& parameter, double lr) override {
    const double ratio = (parameter.norm() / parameter.grad().norm()).item<double>();
    parameter.sub_(parameter.grad(), lr * ratio);
  }
};

// Matrices by their rows, vectors element by element.
class RowScaled : public OwnOptimizer {
  using OwnOptimizer::OwnOptimizer;
  void update(at::Tensor& parameter, double lr) override {
    const at::Tensor& gradient = parameter.grad();
    parameter.sub_(gradient.dim() > 1 ? gradient / gradient.norm(2, {1}, true) : gradient.sign(), lr);
  }
};

// A counter of its own, beside state().
class CountsItself : public OwnOptimizer {
  using OwnOptimizer::OwnOptimizer;
  void update(at::Tensor& parameter, double lr) override { parameter.sub_(parameter.grad(), lr / ++steps_); }
  int steps_ = 0;
};

class DrawsNoise : public OwnOptimizer {
  using OwnOptimizer::OwnOptimizer;
  void update(at::Tensor& parameter, double lr) override {
    parameter.sub_(parameter.grad() + torch::randn_like(parameter), lr);
  }
};

class DoesNothing : public OwnOptimizer {
  using OwnOptimizer::OwnOptimizer;
  void update(at::Tensor& /*parameter*/, double /*lr*/) override {}
};

class Throws : public OwnOptimizer {
  using OwnOptimizer::OwnOptimizer;
  void update(at::Tensor& /*parameter*/, double /*lr*/) override { throw std::runtime_error("wants a matrix"); }
};

}  // namespace ds::engine
