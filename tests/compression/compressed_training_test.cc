// Training with the optimizers of the 1-bit family, through the engine, against plain loops over plain arrays.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "optim/adam.h"
#include "optim/lamb_rule.h"
#include "tests/compression/exchange_reference.h"
#include "tests/compression/frozen_reference.h"
#include "tests/compression/zero_one_reference.h"
#include "tests/model/small_run.h"
#include "tests/support/thread_ranks.h"
#include "zero/slice_exchange.h"

namespace ds::engine {
namespace {

using compression::reference::Layout;
using compression::reference::Settings;
using compression::reference::Values;
using nlohmann::ordered_json;
using test::run_ranks;

constexpr int kSteps = 100;
constexpr int64_t kFreeze = 30;

// SmallNet as one array, each parameter from a multiple of 16 on.
class FlatModel {
 public:
  explicit FlatModel(int64_t multiple) {
    for (const at::Tensor& parameter : net_->parameters()) {
      const int64_t begin = (layout_.numel + 15) / 16 * 16;
      layout_.parameters.emplace_back(begin, begin + parameter.numel());
      layout_.numel = begin + parameter.numel();
    }
    layout_.numel = (layout_.numel + multiple - 1) / multiple * multiple;
  }
  const Layout& layout() const { return layout_; }

  Values weights() {
    Values flat(static_cast<size_t>(layout_.numel), 0.0F);
    visit(
        [&](at::Tensor& parameter, float* values) {
          std::memcpy(values, parameter.detach().contiguous().const_data_ptr(), parameter.nbytes());
        },
        flat);
    return flat;
  }
  // The gradient of one rank's micro-batches with these weights.
  Values gradient(Values weights, int64_t step, int rank, int accumulation) {
    visit(
        [&](at::Tensor& parameter, float* values) {
          torch::NoGradGuard no_grad;
          parameter.copy_(torch::from_blob(values, parameter.sizes()));
          parameter.mutable_grad().reset();
        },
        weights);
    for (int64_t micro = step * accumulation; micro < (step + 1) * accumulation; ++micro) {
      (net_->loss(sample(micro, rank)) / static_cast<double>(accumulation)).backward();
    }
    Values flat(static_cast<size_t>(layout_.numel), 0.0F);
    visit(
        [&](at::Tensor& parameter, float* values) {
          std::memcpy(values, parameter.grad().contiguous().const_data_ptr(), parameter.nbytes());
        },
        flat);
    return flat;
  }
  State state(const Values& weights) {
    State state;
    size_t p = 0;
    for (const auto& item : net_->named_parameters()) {
      state[item.key()] =
          torch::from_blob(const_cast<float*>(&weights[layout_.parameters[p++].first]), item.value().sizes()).clone();
    }
    return state;
  }

 private:
  template <class Use>
  void visit(const Use& use, Values& flat) {
    size_t p = 0;
    for (at::Tensor& parameter : net_->parameters()) use(parameter, &flat[layout_.parameters[p++].first]);
  }
  SmallNet net_;
  Layout layout_;
};

std::vector<Values> gradients_of(FlatModel& model, const Values& weights, int64_t step, int world, int accumulation) {
  std::vector<Values> gradients;
  for (int rank = 0; rank < world; ++rank) gradients.push_back(model.gradient(weights, step, rank, accumulation));
  return gradients;
}

// In rank order, then divided.
Values mean_of(const std::vector<Values>& gradients) {
  Values mean = gradients[0];
  for (size_t i = 0; i < mean.size(); ++i) {
    for (size_t rank = 1; rank < gradients.size(); ++rank) mean[i] += gradients[rank][i];
    mean[i] /= static_cast<float>(gradients.size());
  }
  return mean;
}

// One factor for all ranks, of the root mean square of their norms.
void clip(std::vector<Values>& gradients, double limit) {
  double squares = 0;
  for (const Values& gradient : gradients) {
    for (const float value : gradient) squares += static_cast<double>(value) * value;
  }
  const double norm = static_cast<float>(std::sqrt(squares / static_cast<double>(gradients.size())));
  const double factor = std::min(1.0, limit / (norm + 1e-6));
  if (factor == 1.0) return;
  for (Values& gradient : gradients) {
    for (float& value : gradient) value *= static_cast<float>(factor);
  }
}

at::Tensor view(Values& values) { return torch::from_blob(values.data(), {static_cast<int64_t>(values.size())}); }

struct Case {
  int world = 2;
  int stage = 0;
  int accumulation = 1;
  double clip_norm = 0;

  int64_t multiple() const { return stage == 0 ? 16 : 16 * world; }
  ordered_json config(const char* type) const {
    ordered_json config = small_config(stage, accumulation);
    config["gradient_clipping"] = clip_norm;
    config["zero_allow_untested_optimizer"] = true;
    config["optimizer"] = {{"type", type}, {"params", {{"lr", 0.02F}, {"weight_decay", 0.1}}}};
    return config;
  }
};

std::string name_of_case(const ::testing::TestParamInfo<Case>& info) {
  const Case& c = info.param;
  return cat("Ranks", c.world, "Stage", c.stage, "Accumulation", c.accumulation, c.clip_norm > 0 ? "Clipped" : "");
}

std::vector<Case> cases(int last_stage) {
  std::vector<Case> all;
  for (const int world : {2, 3, 4}) {
    for (int stage = 0; stage <= last_stage; ++stage) all.push_back({world, stage, 1, 0});
  }
  all.push_back({1, 0, 1, 0});
  all.push_back({3, 0, 2, 0});
  all.push_back({2, last_stage, 3, 0});
  all.push_back({4, last_stage, 2, 0.7});
  return all;
}

void expect_engine_gives(const Case& c, const ordered_json& config, const State& expected) {
  run_ranks(c.world, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), config, communicator).engine;
    EXPECT_EQ(largest_difference(train(*engine, model, kSteps), expected), 0.0);
  });
}

class OneBitAdamTraining : public ::testing::TestWithParam<Case> {};

TEST_P(OneBitAdamTraining, EqualsTheReferenceBitByBit) {
  const Case& c = GetParam();
  FlatModel model(c.multiple());
  const Settings settings{.freeze_step = kFreeze};
  compression::reference::Exchange exchange(model.layout(), c.world);
  Values weights = model.weights();
  Values average(weights.size(), 0.0F);
  Values variance(weights.size(), 0.0F);
  for (int64_t step = 1; step <= kSteps; ++step) {
    std::vector<Values> gradients = gradients_of(model, weights, step - 1, c.world, c.accumulation);
    if (step > kFreeze) {
      if (c.clip_norm > 0) clip(gradients, c.clip_norm);
      frozen_adam(weights, average, variance, gradients, step, settings, exchange);
      continue;
    }
    std::vector<Values> mean = {mean_of(gradients)};
    double factor = 1.0;
    if (c.clip_norm > 0) {
      double squares = 0;
      for (const float value : mean[0]) squares += static_cast<double>(value) * value;
      factor = std::min(1.0, c.clip_norm / (static_cast<float>(std::sqrt(squares)) + 1e-6));
    }
    const optimizers::GroupOptions group{.lr = 0.02F, .weight_decay = 0.1};
    optimizers::update_adam_slice(view(weights), view(mean[0]),
                                  {.count = step, .gradient_scale = factor, .group = group},
                                  {view(average), view(variance), {}}, {});
  }
  ordered_json config = c.config("OneBitAdam");
  config["optimizer"]["params"]["freeze_step"] = kFreeze;
  expect_engine_gives(c, config, model.state(weights));
}

INSTANTIATE_TEST_SUITE_P(Runs, OneBitAdamTraining, ::testing::ValuesIn(cases(2)), name_of_case);

class OneBitLambTraining : public ::testing::TestWithParam<Case> {};

TEST_P(OneBitLambTraining, EqualsTheReferenceBitByBit) {
  const Case& c = GetParam();
  FlatModel model(c.multiple());
  const Layout& layout = model.layout();
  compression::reference::LambSettings settings;
  settings.freeze_step = kFreeze;
  compression::reference::Exchange exchange(layout, c.world);
  Values weights = model.weights();
  Values average(weights.size(), 0.0F);
  Values variance(weights.size(), 0.0F);
  Values fresh;
  std::vector<double> coefficient(layout.parameters.size(), 0.0);
  std::vector<double> factor(layout.parameters.size(), 1.0);
  std::vector<ParameterInfo> infos;
  optimizers::Slice slice{.master = view(weights), .exchange = zero::make_whole_exchange()};
  for (const auto& [begin, end] : layout.parameters) {
    slice.segments.push_back({static_cast<int64_t>(infos.size()), 0, begin, end - begin});
    infos.push_back({"p", {end - begin}, end - begin});
  }
  slice.bucket_segments = slice.segments;
  slice.parameters = &infos;
  const optimizers::LambState lamb = optimizers::make_lamb_state(slice, view(average), view(variance), "test");
  const optimizers::LambRule rule;
  const optimizers::GroupOptions group{.lr = 0.02F, .weight_decay = 0.1};
  for (int64_t step = 1; step <= kSteps; ++step) {
    std::vector<Values> gradients = gradients_of(model, weights, step - 1, c.world, c.accumulation);
    if (step > kFreeze) {
      if (c.clip_norm > 0) clip(gradients, c.clip_norm);
      frozen_lamb(layout, weights, average, variance, fresh, coefficient, factor, gradients, step, settings, exchange);
      continue;
    }
    std::vector<Values> mean = {mean_of(gradients)};
    if (c.clip_norm > 0) clip(mean, c.clip_norm);
    const at::Tensor trust =
        optimizers::lamb_coefficients(rule, optimizers::advance_lamb(slice, lamb, rule, group, view(mean[0]), 1.0));
    optimizers::apply_lamb(slice, lamb, rule, group, trust, optimizers::lamb_step_size(rule, group, step, step));
    for (size_t p = 0; p < coefficient.size(); ++p) {
      const auto now = trust[static_cast<int64_t>(p)].item<double>();
      if (now != 1.0) coefficient[p] = coefficient[p] * 0.9 + now * (1 - 0.9);
    }
    fresh = variance;
  }
  ordered_json config = c.config("OneBitLamb");
  config["optimizer"]["params"]["freeze_step"] = kFreeze;
  expect_engine_gives(c, config, model.state(weights));
}

INSTANTIATE_TEST_SUITE_P(Runs, OneBitLambTraining, ::testing::ValuesIn(cases(2)), name_of_case);

class ZeroOneAdamTraining : public ::testing::TestWithParam<Case> {};

TEST_P(ZeroOneAdamTraining, EqualsTheReferenceBitByBit) {
  const Case& c = GetParam();
  FlatModel model(c.multiple());
  compression::reference::ZeroOneAdam expected(model.layout(), c.world, model.weights(), Settings{}, {});
  for (int64_t step = 1; step <= kSteps; ++step) {
    std::vector<Values> gradients;
    for (int rank = 0; rank < c.world; ++rank) {
      Values weights = expected.base;
      for (size_t i = 0; i < weights.size(); ++i) weights[i] += expected.stepped[static_cast<size_t>(rank)][i];
      gradients.push_back(model.gradient(weights, step - 1, rank, c.accumulation));
    }
    if (c.clip_norm > 0 && !expected.next_is_dense()) clip(gradients, c.clip_norm);
    expected.step(gradients, c.clip_norm);
  }
  ordered_json config = c.config("ZeroOneAdam");
  ordered_json& params = config["optimizer"]["params"];
  params["var_freeze_step"] = 40;
  params["var_update_scaler"] = 4;
  params["local_step_scaler"] = 16;
  params["local_step_clipper"] = 4;
  const State base = model.state(expected.base);
  run_ranks(c.world, [&](comm::Communicator& communicator) {
    SmallNet net;
    const auto engine = start(net.ptr(), config, communicator).engine;
    EXPECT_EQ(largest_difference(train(*engine, net, kSteps), base), 0.0);
    // What forward reads is the rank's own.
    Values own = expected.base;
    const Values& stepped = expected.stepped[static_cast<size_t>(communicator.rank())];
    for (size_t i = 0; i < own.size(); ++i) own[i] += stepped[i];
    FlatModel flat(c.multiple());
    EXPECT_EQ(largest_difference(parameters_of(*net), flat.state(own)), 0.0);
  });
}

INSTANTIATE_TEST_SUITE_P(Runs, ZeroOneAdamTraining, ::testing::ValuesIn(cases(0)), name_of_case);

}  // namespace
}  // namespace ds::engine
