// Rules of optimizers that have vector kernels, and slices that fit no vector.
#pragma once

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "tests/optim/sharded_model.h"

namespace ds::optimizers {

inline constexpr std::array kTypes = {at::kFloat, at::kBFloat16, at::kHalf};
inline constexpr int64_t kSteps = 3;

struct Rule {
  std::string name;
  OptimizerOptions options;
};

inline std::vector<Rule> rules() {
  const std::vector<GroupOptions> decay = {{.lr = 1e-2, .weight_decay = 0.1}};
  const std::vector<GroupOptions> plain = {{.lr = 1e-2, .beta1 = 0.3, .beta2 = 0.9, .eps = 1e-4}};
  return {
      {"AdamW", {.type = "AdamW", .groups = decay}},
      {"AdamWithL2", {.type = "Adam", .groups = decay, .values = {.adam_w_mode = false}}},
      {"AdamAmsgrad", {.type = "Adam", .groups = decay, .values = {.amsgrad = true}}},
      {"AdamWithoutBiasCorrection", {.type = "Adam", .groups = plain, .values = {.bias_correction = false}}},
      {"Adagrad", {.type = "Adagrad", .groups = decay, .values = {.lr_decay = 0.1, .initial_accumulator_value = 0.2}}},
      {"Lion", {.type = "Lion", .groups = decay}},
  };
}

// `values` that begin `offset` elements after an aligned address.
inline at::Tensor at_offset(const at::Tensor& values, int64_t offset) {
  return at::empty({values.numel() + offset}, values.options()).narrow(0, offset, values.numel()).copy_(values);
}

inline std::unique_ptr<SliceOptimizer> optimizer_of(const Rule& rule, const at::Tensor& master) {
  auto optimizer = make_optimizer(rule.options);
  optimizer->add_slice({.master = master, .exchange = std::make_shared<Alone>()});
  return optimizer;
}

inline at::Tensor gradient_at(int64_t step, int64_t numel, at::ScalarType type) {
  return uniform(100 + static_cast<uint64_t>(step), numel).to(type);
}

// NaN where `expected` is NaN, otherwise the same bits.
inline void expect_same_values(const at::Tensor& found, const at::Tensor& expected, const std::string& what) {
  EXPECT_EQ(found.scalar_type(), expected.scalar_type()) << what;
  const at::ScalarType bits = found.element_size() == 4 ? at::kInt : at::kShort;
  const at::Tensor nan = expected.isnan();
  EXPECT_TRUE(at::equal(found.isnan(), nan)) << what;
  const at::Tensor different = found.view(bits).ne(expected.view(bits)).logical_and(nan.logical_not());
  EXPECT_EQ(different.sum().item<int64_t>(), 0) << what;
}

}  // namespace ds::optimizers
