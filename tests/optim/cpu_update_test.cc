// The vector kernels of Adam, Adagrad and Lion: against LibTorch's kernels in float64, on every instruction set that
// this machine has, for all types of gradient and copy, at lengths and offsets that fit no vector.
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>

#include <cmath>

#include "optim/kernels/slice_arrays.h"
#include "tests/optim/vector_rules.h"
#include "tests/optim/vector_targets.h"

namespace ds::optimizers {
namespace {

void run(SliceOptimizer& optimizer, at::ScalarType gradient, int64_t offset, const at::Tensor& copy = {},
         int64_t steps = kSteps) {
  const int64_t numel = optimizer.slice(0).master.numel();
  for (int64_t step = 1; step <= steps; ++step) {
    optimizer.begin_step();
    const at::Tensor values = at_offset(gradient_at(step, numel, gradient), offset);
    copy.defined() ? optimizer.update_into(0, values, 0.3, copy) : optimizer.update(0, values, 0.3);
  }
}

// Each step rounds the weight twice and uses rounded constants: one and a half units in the last place of the weight,
// or of 0.1 where it came from there.
void expect_near(const at::Tensor& found, const at::Tensor& exact, const std::string& what) {
  const at::Tensor bound = (exact.abs() + 0.1) * (1.5 * kSteps * std::ldexp(1.0, -23));
  EXPECT_TRUE(((found - exact).abs() <= bound).all().item<bool>())
      << what << ": error " << (found - exact).abs().max().item<double>();
}

class EveryTarget : public testing::TestWithParam<int64_t> {
 protected:
  const WithTarget target_{GetParam()};
};

TEST_P(EveryTarget, AgreesWithFloat64) {
  for (const Rule& rule : rules()) {
    for (const at::ScalarType type : kTypes) {
      for (const auto& [numel, offset] : {std::pair{1, 0}, {7, 1}, {64, 3}, {1000, 0}, {4099, 5}}) {
        const at::Tensor start = uniform(7, numel);
        const auto vectors = optimizer_of(rule, at_offset(start, offset));
        const auto exact = optimizer_of(rule, start.to(at::kDouble));
        run(*vectors, type, offset);
        run(*exact, type, 0);
        const std::string what = rule.name + ", gradient " + at::toString(type) + ", " + std::to_string(numel);
        expect_near(vectors->slice(0).master, exact->slice(0).master, what);
        for (size_t s = 0; s < exact->states(0).size(); ++s) {
          EXPECT_TRUE(
              at::allclose(vectors->states(0)[s].second.to(at::kDouble), exact->states(0)[s].second, 1e-6, 1e-7))
              << what << ", state " << exact->states(0)[s].first;
        }
      }
    }
  }
}

TEST_P(EveryTarget, CopiesTheNewWeights) {
  for (const Rule& rule : rules()) {
    for (const at::ScalarType gradient : kTypes) {
      for (const at::ScalarType type : kTypes) {
        const int64_t numel = 1003;
        const auto plain = optimizer_of(rule, uniform(7, numel));
        const auto copying = optimizer_of(rule, uniform(7, numel));
        const at::Tensor around = at::full({numel + 6}, 9.0, type);
        const at::Tensor copy = around.narrow(0, 3, numel);
        run(*plain, gradient, 0);
        run(*copying, gradient, 0, copy);
        EXPECT_TRUE(at::equal(plain->slice(0).master, copying->slice(0).master)) << rule.name;
        expect_same_values(copy, plain->slice(0).master.to(type), rule.name);
        EXPECT_TRUE(around.narrow(0, 0, 3).eq(9).all().item<bool>()) << rule.name;
        EXPECT_TRUE(around.narrow(0, numel + 3, 3).eq(9).all().item<bool>()) << rule.name;
      }
    }
  }
}

// Every float32 with one of these lower halves: zeros, subnormals, ties, what overflows, infinities, NaNs.
at::Tensor all_kinds_of_float32() {
  std::vector<at::Tensor> parts;
  for (const int64_t low : {0, 1, 0x0FFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xF000, 0xFFFF}) {
    parts.push_back(at::arange(int64_t{1} << 16, at::kLong).mul_(1 << 16).add_(low));
  }
  return at::cat(parts).to(at::kInt).view(at::kFloat);
}

TEST_P(EveryTarget, RoundsCopiesAsLibTorchDoes) {
  // Without gradient and momentum the weights stay.
  const Rule still{"Lion", {.type = "Lion", .groups = {{.lr = 1.0}}}};
  for (const at::ScalarType type : kTypes) {
    const auto optimizer = optimizer_of(still, all_kinds_of_float32());
    const int64_t numel = optimizer->slice(0).master.numel();
    const at::Tensor copy = at::zeros({numel}, type);
    optimizer->begin_step();
    optimizer->update_into(0, at::zeros({numel}), 1.0, copy);
    expect_same_values(optimizer->slice(0).master, all_kinds_of_float32(), "master");
    expect_same_values(copy, all_kinds_of_float32().to(type), at::toString(type));
  }
}

TEST_P(EveryTarget, ReadsEveryValueOfSixteenBits) {
  // With beta2 = 0 the momentum becomes the gradient.
  const Rule keeps{"Lion", {.type = "Lion", .groups = {{.lr = 0.0, .beta2 = 0.0}}}};
  for (const at::ScalarType type : {at::kBFloat16, at::kHalf}) {
    const at::Tensor gradient = at::arange(int64_t{1} << 16, at::kLong).to(at::kShort).view(type);
    const auto optimizer = optimizer_of(keeps, at::zeros({int64_t{1} << 16}));
    optimizer->begin_step();
    optimizer->update(0, gradient, 1.0);
    expect_same_values(optimizer->states(0)[0].second, gradient.to(at::kFloat).add(0.0F), at::toString(type));
  }
}

INSTANTIATE_TEST_SUITE_P(Vectors, EveryTarget, testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const auto& test) { return std::string(hwy::TargetName(test.param)); });

TEST(VectorUpdate, ThreadsAndCutsDoNotChangeABit) {
  const int64_t numel = 300001;
  const int threads = at::get_num_threads();
  for (const Rule& rule : rules()) {
    std::vector<at::Tensor> results;
    for (const int count : {1, 2, 3}) {
      at::set_num_threads(count);
      const at::Tensor copy = at::empty({numel}, at::kBFloat16);
      const auto optimizer = optimizer_of(rule, uniform(7, numel));
      run(*optimizer, at::kBFloat16, 0, copy);
      results.push_back(optimizer->slice(0).master);
      EXPECT_TRUE(at::equal(copy, results.back().to(at::kBFloat16))) << rule.name;
    }
    at::set_num_threads(threads);
    const auto cut = make_optimizer(rule.options);
    const std::vector<int64_t> lengths = {1, 100002, 13, 70005, 129980};
    int64_t begin = 0;
    const at::Tensor whole = uniform(7, numel);
    for (const int64_t length : lengths) {
      cut->add_slice({.master = whole.narrow(0, begin, length), .exchange = std::make_shared<Alone>()});
      begin += length;
    }
    ASSERT_EQ(begin, numel);
    for (int64_t step = 1; step <= kSteps; ++step) {
      cut->begin_step();
      begin = 0;
      for (int64_t s = 0; s < cut->slice_count(); ++s) {
        const int64_t length = lengths[static_cast<size_t>(s)];
        cut->update(s, gradient_at(step, numel, at::kBFloat16).narrow(0, begin, length), 0.3);
        begin += length;
      }
    }
    results.push_back(whole);
    for (const at::Tensor& result : results) EXPECT_TRUE(at::equal(result, results[0])) << rule.name;
  }
}

TEST(VectorUpdate, FiftyStepsOfTorchAdamW) {
  const int64_t numel = 1001;
  const Rule rule{"AdamW", {.type = "AdamW", .groups = {{.lr = 1e-2, .weight_decay = 0.1}}}};
  const auto ours = optimizer_of(rule, uniform(7, numel));
  const at::Tensor weights = uniform(7, numel).requires_grad_();
  torch::optim::AdamW theirs({weights}, torch::optim::AdamWOptions(1e-2).weight_decay(0.1));
  for (int64_t step = 1; step <= 50; ++step) {
    const at::Tensor gradient = gradient_at(step, numel, at::kFloat);
    ours->begin_step();
    ours->update(0, gradient, 1.0);
    weights.mutable_grad() = gradient;
    theirs.step();
  }
  EXPECT_LE((ours->slice(0).master - weights.detach()).abs().max().item<double>(), 5e-7);
}

// What the kernels do not take still ends up in the copy.
TEST(VectorUpdate, CopiesOfOtherKinds) {
  for (const std::string type : {"AdamW", "Adagrad", "Lion", "SGD", "Muon"}) {
    OptimizerOptions options{.type = type, .groups = {default_group_options(type)}};
    options.groups[0].lr = 0.01;
    for (const at::ScalarType master : {at::kFloat, at::kDouble, at::kBFloat16}) {
      const auto expect_copy = [&](const at::Tensor& copy) {
        const auto optimizer = optimizer_of({type, options}, uniform(7, 37).to(master));
        optimizer->begin_step();
        optimizer->update_into(0, gradient_at(1, 37, at::kFloat), 0.5, copy);
        EXPECT_FALSE(at::equal(optimizer->slice(0).master, uniform(7, 37).to(master))) << type;
        EXPECT_TRUE(at::equal(copy, optimizer->slice(0).master.to(copy.scalar_type()))) << type;
      };
      expect_copy(at::zeros({37}, at::kDouble));
      expect_copy(at::zeros({37}, at::kBFloat16));
      expect_copy(at::zeros({37, 2}, at::kFloat).select(1, 0));
    }
  }
}

TEST(VectorUpdate, ANotANumberReachesTheWeight) {
  for (const Rule& rule : rules()) {
    for (const at::ScalarType type : {at::kFloat, at::kDouble}) {  // double: LibTorch's operators
      const auto optimizer = optimizer_of(rule, uniform(7, 20).to(type));
      at::Tensor gradient = gradient_at(1, 20, type);
      gradient[3] = std::numeric_limits<double>::quiet_NaN();
      optimizer->begin_step();
      optimizer->update(0, gradient, 1.0);
      const at::Tensor nan = optimizer->slice(0).master.isnan();
      EXPECT_TRUE(nan[3].item<bool>()) << rule.name << type;
      EXPECT_EQ(nan.sum().item<int64_t>(), 1) << rule.name << type;
    }
  }
}

}  // namespace
}  // namespace ds::optimizers
