// Masters and states of 16 bits: every step reads them into float32, updates as always, and rounds to nearest even what
// it writes. So a step is that of float32 copies, rounded, bit by bit.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/optim/plain_adamw.h"
#include "tests/optim/vector_rules.h"
#include "tests/optim/vector_targets.h"

namespace ds::optimizers {
namespace {

constexpr double kScale = 0.3;

struct Narrow {
  at::ScalarType master;
  at::ScalarType state;
};

const std::vector<Narrow> kNarrows = {{at::kBFloat16, at::kBFloat16}, {at::kBFloat16, at::kFloat},
                                      {at::kFloat, at::kBFloat16},    {at::kHalf, at::kHalf},
                                      {at::kHalf, at::kFloat},        {at::kFloat, at::kHalf}};

std::unique_ptr<SliceOptimizer> narrow_optimizer(const Rule& rule, const at::Tensor& master, at::ScalarType state) {
  auto optimizer = make_optimizer(rule.options);
  optimizer->set_state_dtype(state);
  optimizer->add_slice({.master = master, .exchange = std::make_shared<Alone>()});
  return optimizer;
}

// `found` after a step, from `before`: what the optimizer of float32 makes of it, rounded.
void expect_rounded_step(SliceOptimizer& found, const Rule& rule, const at::Tensor& gradient, const at::Tensor& copy,
                         const std::string& what) {
  const at::Tensor& master = found.slice(0).master;
  const auto wide = optimizer_of(rule, master.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true));
  const NamedStates exact = wide->states(0);
  const NamedStates rounded = found.states(0);
  for (size_t s = 0; s < exact.size(); ++s) exact[s].second.copy_(rounded[s].second);
  wide->set_step_count(found.step_count());
  for (SliceOptimizer* optimizer : {wide.get(), &found}) optimizer->begin_step();
  wide->update(0, gradient.clone(), kScale);
  found.update_into(0, gradient, kScale, copy);
  expect_same_values(master, wide->slice(0).master.to(master.scalar_type()), what + ", master");
  expect_same_values(copy, master.to(copy.scalar_type()), what + ", copy");
  for (size_t s = 0; s < exact.size(); ++s) {
    const at::Tensor& state = rounded[s].second;
    expect_same_values(state, exact[s].second.to(state.scalar_type()), what + ", " + rounded[s].first);
  }
}

class NarrowOnEveryTarget : public testing::TestWithParam<int64_t> {
 protected:
  const WithTarget target_{GetParam()};
};

TEST_P(NarrowOnEveryTarget, AStepIsThatOfFloat32Rounded) {
  for (const Rule& rule : rules()) {
    for (const auto& [master, state] : kNarrows) {
      for (const auto& [numel, offset] : {std::pair{1, 0}, {7, 1}, {1024, 0}, {4099, 5}}) {
        const at::ScalarType gradient = numel % 2 == 0 ? at::kFloat : master;
        const auto optimizer = narrow_optimizer(rule, at_offset(uniform(7, numel).to(master), offset), state);
        const at::Tensor copy = at::zeros({numel}, numel == 7 ? at::kFloat : at::kBFloat16);
        for (int64_t step = 1; step <= kSteps; ++step) {
          expect_rounded_step(*optimizer, rule, at_offset(gradient_at(step, numel, gradient), offset), copy,
                              rule.name + ", master " + at::toString(master) + ", states " + at::toString(state) +
                                  ", " + std::to_string(numel));
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Vectors, NarrowOnEveryTarget, testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const auto& test) { return std::string(hwy::TargetName(test.param)); });

// What has no vector kernel goes through LibTorch in chunks, with the same rounding.
TEST(NarrowUpdate, OtherOptimizersRoundAsWell) {
  for (const std::string type : {"SGD", "RMSprop", "Adamax", "NAdam", "RAdam", "Adadelta"}) {
    Rule rule{type, {.type = type, .groups = {default_group_options(type)}}};
    rule.options.groups[0].weight_decay = 0.1;
    if (type == "SGD" || type == "RMSprop") rule.options.groups[0].momentum = 0.9;
    for (const auto& [master, state] : kNarrows) {
      const auto optimizer = narrow_optimizer(rule, uniform(7, 300).to(master), state);
      for (int64_t step = 1; step <= kSteps; ++step) {
        if (type == "NAdam" && step > 1) break;  // its product of momenta is no state of a slice
        expect_rounded_step(*optimizer, rule, gradient_at(step, 300, at::kBFloat16), at::zeros({300}, at::kBFloat16),
                            type + ", master " + at::toString(master) + ", states " + at::toString(state));
      }
    }
  }
}

// In the second of its passes Lamb has means that are rounded; Muon makes a whole matrix orthogonal, in bfloat16.
TEST(NarrowUpdate, LambAndMuonStayWithinTheirRounding) {
  for (const std::string type : {"Lamb", "Muon"}) {
    const auto run = [&](at::ScalarType dtype) {
      OptimizerOptions options{.type = type, .groups = {default_group_options(type)}};
      options.groups[0].lr = 0.1;
      const std::vector<ParameterInfo> parameters = {{"h.weight", {6, 10}, 60}};
      const std::vector<Segment> segments = {{0, 0, 0, 60}};
      const auto optimizer = make_optimizer(options);
      optimizer->set_state_dtype(dtype);
      optimizer->add_slice({.master = uniform(7, 60).to(dtype),
                            .segments = segments,
                            .bucket_segments = segments,
                            .parameters = &parameters,
                            .exchange = std::make_shared<Alone>()});
      for (int64_t step = 1; step <= kSteps; ++step) {
        optimizer->begin_step();
        optimizer->update(0, gradient_at(step, 60, at::kFloat), kScale);
      }
      EXPECT_EQ(optimizer->states(0)[0].second.scalar_type(), dtype);
      return optimizer->slice(0).master.to(at::kFloat);
    };
    const double moved = (run(at::kFloat) - uniform(7, 60)).abs().max().item<double>();
    const double apart = (run(at::kBFloat16) - run(at::kFloat)).abs().max().item<double>();
    // A unit in the last place a step, of weights below 1.
    EXPECT_LT(apart, (kSteps + 1) * std::ldexp(1.0, -8)) << type;
    EXPECT_GT(moved, 2 * apart) << type;
  }
}

// The whole of it in plain code.
TEST(NarrowUpdate, IsTheFormulaOfAdamWRoundedOnEveryStore) {
  const PlainAdamW plain{.lr = 1e-2, .weight_decay = 0.1};
  const Rule rule{"AdamW", {.type = "AdamW", .groups = {{.lr = 1e-2, .weight_decay = 0.1}}}};
  const int64_t numel = 1003;
  const auto optimizer = narrow_optimizer(rule, uniform(7, numel).to(at::kBFloat16), at::kBFloat16);
  std::vector<c10::BFloat16> w(numel);
  std::vector<c10::BFloat16> m(numel, 0.0F);
  std::vector<c10::BFloat16> v(numel, 0.0F);
  for (size_t i = 0; i < w.size(); ++i) w[i] = uniform(7, numel).const_data_ptr<float>()[i];
  for (int64_t step = 1; step <= 20; ++step) {
    const at::Tensor gradient = gradient_at(step, numel, at::kBFloat16);
    for (size_t i = 0; i < w.size(); ++i) {
      float weight = w[i];
      float mean = m[i];
      float square = v[i];
      plain.step(step, static_cast<float>(gradient.const_data_ptr<c10::BFloat16>()[i]), weight, mean, square);
      w[i] = weight;
      m[i] = mean;
      v[i] = square;
    }
    optimizer->begin_step();
    optimizer->update(0, gradient.clone(), 1.0);
  }
  const auto found = [&](const at::Tensor& values, const std::vector<c10::BFloat16>& expected) {
    int64_t different = 0;
    for (size_t i = 0; i < expected.size(); ++i)
      different += values.const_data_ptr<c10::BFloat16>()[i].x != expected[i].x;
    return different;
  };
  EXPECT_EQ(found(optimizer->slice(0).master, w), 0);
  EXPECT_EQ(found(optimizer->states(0)[0].second, m), 0);
  EXPECT_EQ(found(optimizer->states(0)[1].second, v), 0);
}

TEST(NarrowUpdate, ANotANumberReachesTheWeightAndStays) {
  for (const Rule& rule : rules()) {
    const auto optimizer = narrow_optimizer(rule, uniform(7, 20).to(at::kBFloat16), at::kBFloat16);
    at::Tensor gradient = gradient_at(1, 20, at::kFloat);
    gradient[3] = std::numeric_limits<double>::quiet_NaN();
    optimizer->begin_step();
    optimizer->update(0, gradient, 1.0);
    EXPECT_TRUE(optimizer->slice(0).master[3].isnan().item<bool>()) << rule.name;
    EXPECT_EQ(optimizer->slice(0).master.isnan().sum().item<int64_t>(), 1) << rule.name;
  }
}

}  // namespace
}  // namespace ds::optimizers
