// Optimizers that need whole parameters, on a device: Lamb in two passes over all slices, Muon with the matrices of one
// shape together. With the CPU's, which go through LibTorch's operators.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/text.h"
#include "optim/step_scale.h"
#include "tests/gpu/tested_device.h"
#include "tests/optim/sharded_model.h"

namespace ds::optimizers {
namespace {

using test::tested_device;

constexpr double kWholeScale = 0.3;
constexpr double kMuonError = 0.05;

// Pairs of one slice (see WholeModel). Matrices: some beyond a tile of the sums, some that begin where no vector does;
// two of one shape, of each kind of shape. Then more runs for each slice than one launch takes.
const std::vector<ParameterInfo>& parameters_of(bool matrices) {
  static const std::vector<ParameterInfo> whole = {
      {"a.weight", {120, 90}, 10800}, {"f.weight", {120, 90}, 10800},     {"b.weight", {33, 20}, 660},
      {"c.weight", {33, 20}, 660},    {"conv.weight", {6, 2, 3, 3}, 108}, {"conv2.weight", {6, 2, 3, 3}, 108},
      {"line.weight", {3, 5, 2}, 30}, {"line2.weight", {3, 5, 2}, 30},    {"d.weight", {7, 3}, 21},
      {"e.weight", {20, 33}, 660}};
  static const std::vector<ParameterInfo> all = [] {
    std::vector<ParameterInfo> more = whole;
    more.push_back({"a.bias", {4097}, 4097});
    more.push_back({"b.bias", {1}, 1});
    for (int64_t i = 0; i < 60; ++i) more.push_back({cat("small", i, ".bias"), {5 + i}, 5 + i});
    return more;
  }();
  return matrices ? whole : all;
}

// Two slices, whole buckets, with one place of padding between parameters and at the end.
class WholeModel {
 public:
  WholeModel(const OptimizerOptions& options, at::Device device, at::ScalarType gradient,
             std::optional<at::ScalarType> copy)
      : WholeModel(options, device, gradient, copy, parameters_of(options.type == "Muon")) {}
  // `parameters` outlive it.
  WholeModel(const OptimizerOptions& options, at::Device device, at::ScalarType gradient,
             std::optional<at::ScalarType> copy, const std::vector<ParameterInfo>& parameters)
      : device_(device), gradient_(gradient), optimizer_(make_optimizer(options)) {
    for (const bool odd : {false, true}) {
      std::vector<Segment> segments;
      int64_t offset = odd ? 1 : 0;
      for (size_t p = 0; p < parameters.size(); ++p) {
        if ((p / 2 % 2 == 1) != odd) continue;
        segments.push_back({static_cast<int64_t>(p), 0, offset, parameters[p].numel});
        offset += parameters[p].numel + 1;
      }
      const at::Tensor covered = at::zeros({offset}, at::kFloat);
      for (const Segment& segment : segments) covered.narrow(0, segment.slice_offset, segment.length).fill_(1.0);
      covered_.push_back(covered);
      optimizer_->add_slice({.master = (uniform(odd ? 3 : 4, offset) * covered).to(device),
                             .group = 0,
                             .segments = segments,
                             .bucket_segments = segments,
                             .parameters = &parameters,
                             .exchange = std::make_shared<Alone>()});
      copies_.push_back(copy ? at::zeros({offset}, at::TensorOptions().dtype(*copy).device(device)) : at::Tensor());
    }
  }

  void step(int64_t number, const StepScale& scale) {
    optimizer_->begin_step();
    std::vector<SliceUpdate> updates;
    for (size_t i = 0; i < covered_.size(); ++i) {
      const at::Tensor gradient = uniform(static_cast<uint64_t>(10 * number) + i, covered_[i].numel()) * covered_[i];
      updates.push_back({static_cast<int64_t>(i), gradient.to(gradient_).to(device_), copies_[i]});
    }
    optimizer_->update_all(updates, scale);
  }

  // Of each parameter: the master and the states.
  std::vector<at::Tensor> state() {
    std::vector<at::Tensor> all;
    for (int64_t i = 0; i < optimizer_->slice_count(); ++i) {
      const Slice& slice = optimizer_->slice(i);
      std::vector<at::Tensor> of_slice = {slice.master.cpu().clone()};
      for (const auto& [name, state] : optimizer_->states(i)) of_slice.push_back(state.cpu().clone());
      for (const Segment& segment : slice.segments) {
        for (const at::Tensor& values : of_slice) {
          all.push_back(values.numel() == slice.master.numel() ? values.narrow(0, segment.slice_offset, segment.length)
                                                               : values);
        }
      }
    }
    return all;
  }

  void expect_copies_of_masters() {
    for (size_t i = 0; i < copies_.size(); ++i) {
      if (!copies_[i].defined()) continue;
      const at::Tensor master = optimizer_->slice(static_cast<int64_t>(i)).master;
      EXPECT_TRUE(at::equal(copies_[i].cpu(), master.cpu().to(copies_[i].scalar_type())));
    }
  }

  SliceOptimizer& optimizer() { return *optimizer_; }

 private:
  at::Device device_;
  at::ScalarType gradient_;
  std::unique_ptr<SliceOptimizer> optimizer_;
  std::vector<at::Tensor> covered_;
  std::vector<at::Tensor> copies_;
};

struct WholeRule {
  std::string name;
  OptimizerOptions options;
  double tolerance;      // of each element
  double of_change = 0;  // of each parameter's change; Muon's products are in 16 bits on a device
};

std::vector<WholeRule> whole_rules() {
  const GroupOptions decay{.lr = 1e-2, .weight_decay = 0.1};
  GroupOptions muon = default_group_options("Muon");
  muon.lr = 0.02;
  muon.weight_decay = 0.1;
  return {{"Lamb", {.type = "Lamb", .groups = {decay}}, 1e-5},
          {"LambWithoutDecay", {.type = "Lamb", .groups = {{.lr = 1e-2, .beta1 = 0.3, .eps = 1e-3}}}, 1e-5},
          {"LambEpsInside",
           {.type = "Lamb",
            .groups = {decay},
            .values = {.bias_correction = false, .max_coeff = 0.5, .eps_inside_sqrt = true}},
           1e-5},
          {"MuonStandard", {.type = "Muon", .groups = {muon}, .values = {.ns_method = "standard"}}, 0, kMuonError},
          {"MuonGram", {.type = "Muon", .groups = {muon}, .values = {.ns_method = "gram"}}, 0, kMuonError}};
}

// `start`: before all steps, by which each parameter's own change is known.
void expect_close(WholeModel& found, WholeModel& expected, const WholeRule& rule, const std::vector<at::Tensor>& start,
                  const std::string& what) {
  const auto here = found.state();
  const auto there = expected.state();
  ASSERT_EQ(here.size(), there.size()) << what;
  ASSERT_EQ(start.size(), there.size()) << what;
  for (size_t t = 0; t < here.size(); ++t) {
    const double change = (there[t] - start[t]).norm().item<double>();
    EXPECT_GT(change, rule.tolerance) << what << ", tensor " << t << ": nothing happened";
    if (rule.of_change > 0) {
      EXPECT_LE((here[t] - there[t]).norm().item<double>(), rule.of_change * change) << what << ", tensor " << t;
    } else {
      EXPECT_LE((here[t] - there[t]).abs().max().item<double>(), rule.tolerance) << what << ", tensor " << t;
    }
  }
}

void expect_equal(WholeModel& found, WholeModel& expected, const std::string& what) {
  const auto here = found.state();
  const auto there = expected.state();
  ASSERT_EQ(here.size(), there.size()) << what;
  for (size_t t = 0; t < here.size(); ++t) EXPECT_TRUE(at::equal(here[t], there[t])) << what << ", tensor " << t;
}

TEST(GpuWholeUpdate, IsThatOfTheCpu) {
  for (const WholeRule& rule : whole_rules()) {
    for (const at::ScalarType gradient : {at::kFloat, at::kBFloat16, at::kHalf}) {
      for (const std::optional<at::ScalarType>& copy :
           std::vector<std::optional<at::ScalarType>>{std::nullopt, at::kBFloat16, at::kHalf}) {
        WholeModel here(rule.options, tested_device(), gradient, copy);
        WholeModel there(rule.options, at::kCPU, gradient, copy);
        EXPECT_EQ(here.optimizer().takes_device_scale(), tested_device().is_cuda()) << rule.name;
        const auto start = there.state();
        for (int64_t step = 1; step <= 3; ++step) {
          here.step(step, {.factor = kWholeScale, .device_factor = {}, .skip = {}});
          there.step(step, {.factor = kWholeScale, .device_factor = {}, .skip = {}});
        }
        expect_close(here, there, rule, start, rule.name + ", gradient " + at::toString(gradient));
        here.expect_copies_of_masters();
      }
    }
  }
}

// Three matrices of one shape, which are too many elements to be made orthogonal at once.
TEST(GpuWholeUpdate, LargeMatricesAreMadeOrthogonalAFewAtATime) {
  constexpr int64_t kLong = 6'000'000;
  static const std::vector<ParameterInfo> large = {{"a.weight", {2, kLong}, 2 * kLong},
                                                   {"b.weight", {2, kLong}, 2 * kLong},
                                                   {"other.weight", {4, 3}, 12},
                                                   {"other2.weight", {3, 4}, 12},
                                                   {"c.weight", {2, kLong}, 2 * kLong}};
  WholeRule rule = whole_rules().back();
  ASSERT_EQ(rule.options.type, "Muon");
  rule.options.groups[0].weight_decay = 0;  // which would be most of the change here
  WholeModel here(rule.options, tested_device(), at::kBFloat16, at::kBFloat16, large);
  WholeModel there(rule.options, at::kCPU, at::kBFloat16, at::kBFloat16, large);
  const auto start = there.state();
  for (WholeModel* const model : {&here, &there})
    model->step(1, {.factor = kWholeScale, .device_factor = {}, .skip = {}});
  expect_close(here, there, rule, start, "large");
  here.expect_copies_of_masters();
}

TEST(GpuWholeUpdate, FactorAndSkipComeFromTheDevice) {
  if (tested_device().is_cpu()) GTEST_SKIP() << "DS_TEST_DEVICE=cpu: the CPU's factor and skip are the host's";
  const at::TensorOptions on_device = torch::dtype(at::kFloat).device(tested_device());
  for (const WholeRule& rule : whole_rules()) {
    WholeModel here(rule.options, tested_device(), at::kBFloat16, at::kBFloat16);
    WholeModel there(rule.options, tested_device(), at::kBFloat16, at::kBFloat16);
    const at::Tensor factor = at::full({1}, kWholeScale, on_device);
    const at::Tensor no = at::zeros({1}, on_device);
    here.step(1, {.factor = 1.0, .device_factor = factor, .skip = no});
    there.step(1, {.factor = kWholeScale, .device_factor = {}, .skip = {}});
    here.step(2, {.factor = std::numeric_limits<double>::quiet_NaN(),
                  .device_factor = factor,
                  .skip = at::ones({1}, on_device)});
    here.optimizer().set_step_count(1);
    expect_equal(here, there, rule.name + ", skipped");
    here.step(3, {.factor = 1.0, .device_factor = factor, .skip = no});
    there.step(3, {.factor = kWholeScale, .device_factor = {}, .skip = {}});
    expect_equal(here, there, rule.name + ", after a skipped step");
    here.expect_copies_of_masters();
  }
}

}  // namespace
}  // namespace ds::optimizers
