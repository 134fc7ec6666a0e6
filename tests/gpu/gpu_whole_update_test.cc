// Optimizers that need whole parameters, on a device: Lamb in two passes over all slices, Muon with the matrices of one
// shape together. With the CPU's, which go through LibTorch's operators.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "optim/step_scale.h"
#include "tests/gpu/tested_device.h"
#include "tests/optim/sharded_model.h"

namespace ds::optimizers {
namespace {

using test::tested_device;

constexpr double kWholeScale = 0.3;

// Some beyond a tile of the sums, some that begin where no vector does; several of one shape, of each kind of shape.
const std::vector<ParameterInfo>& parameters_of(bool matrices) {
  static const std::vector<ParameterInfo> all = {{"a.weight", {120, 90}, 10800},
                                                 {"b.weight", {33, 20}, 660},
                                                 {"c.weight", {33, 20}, 660},
                                                 {"d.weight", {7, 3}, 21},
                                                 {"conv.weight", {6, 2, 3, 3}, 108},
                                                 {"conv2.weight", {6, 2, 3, 3}, 108},
                                                 {"line.weight", {3, 5, 2}, 30},
                                                 {"line2.weight", {3, 5, 2}, 30},
                                                 {"e.weight", {20, 33}, 660},
                                                 {"a.bias", {4097}, 4097},
                                                 {"b.bias", {1}, 1},
                                                 {"f.weight", {120, 90}, 10800}};
  static const std::vector<ParameterInfo> whole = [] {
    std::vector<ParameterInfo> kept;
    for (const ParameterInfo& info : all)
      if (info.sizes.size() > 1) kept.push_back(info);
    return kept;
  }();
  return matrices ? whole : all;
}

// Two slices, whole buckets, with one place of padding between parameters and at the end.
class WholeModel {
 public:
  WholeModel(const OptimizerOptions& options, at::Device device, at::ScalarType gradient,
             std::optional<at::ScalarType> copy)
      : device_(device), gradient_(gradient), optimizer_(make_optimizer(options)) {
    const auto& parameters = parameters_of(options.type == "Muon");
    for (const bool odd : {false, true}) {
      std::vector<Segment> segments;
      int64_t offset = odd ? 1 : 0;
      for (size_t p = odd ? 1 : 0; p < parameters.size(); p += 2) {
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

  std::vector<at::Tensor> state() {
    std::vector<at::Tensor> all;
    for (int64_t i = 0; i < optimizer_->slice_count(); ++i) {
      all.push_back(optimizer_->slice(i).master.cpu().clone());
      for (const auto& [name, state] : optimizer_->states(i)) all.push_back(state.cpu().clone());
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

  ShardOptimizer& optimizer() { return *optimizer_; }

 private:
  at::Device device_;
  at::ScalarType gradient_;
  std::unique_ptr<ShardOptimizer> optimizer_;
  std::vector<at::Tensor> covered_;
  std::vector<at::Tensor> copies_;
};

struct WholeRule {
  std::string name;
  OptimizerOptions options;
  double tolerance;  // Muon's products are in 16 bits on a device
};

std::vector<WholeRule> whole_rules() {
  const GroupOptions decay{.lr = 1e-2, .weight_decay = 0.1};
  GroupOptions muon = default_group_options("Muon");
  muon.lr = 0.02;
  muon.weight_decay = 0.1;
  return {{"Lamb", {.type = "Lamb", .groups = {decay}}, 1e-5},
          {"LambWithoutDecay", {.type = "Lamb", .groups = {{.lr = 1e-2, .beta1 = 0.3, .eps = 1e-3}}}, 1e-5},
          {"LambEpsInside",
           {.type = "Lamb", .groups = {decay}, .bias_correction = false, .max_coeff = 0.5, .eps_inside_sqrt = true},
           1e-5},
          {"MuonStandard", {.type = "Muon", .groups = {muon}, .ns_method = NewtonSchulzMethod::kStandard}, 0.02},
          {"MuonGram", {.type = "Muon", .groups = {muon}, .ns_method = NewtonSchulzMethod::kGram}, 0.02}};
}

// A step of an orthogonal matrix is as large as its lr: what differs in 16 bits is a small part of that.
void expect_close(WholeModel& found, WholeModel& expected, double tolerance, const std::string& what) {
  const auto here = found.state();
  const auto there = expected.state();
  ASSERT_EQ(here.size(), there.size()) << what;
  for (size_t t = 0; t < here.size(); ++t) {
    EXPECT_LE((here[t] - there[t]).abs().max().item<double>(), tolerance) << what << ", tensor " << t;
  }
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
        expect_close(here, there, rule.tolerance, rule.name + ", gradient " + at::toString(gradient));
        here.expect_copies_of_masters();
        EXPECT_GT((there.state()[0] - start[0]).abs().max().item<double>(), rule.tolerance) << rule.name;
      }
    }
  }
}

TEST(GpuWholeUpdate, FactorAndSkipComeFromTheDevice) {
  if (tested_device().is_cpu()) return;  // the CPU's are the host's
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
    expect_close(here, there, 0.0, rule.name + ", skipped");
    here.step(3, {.factor = 1.0, .device_factor = factor, .skip = no});
    there.step(3, {.factor = kWholeScale, .device_factor = {}, .skip = {}});
    expect_close(here, there, 0.0, rule.name + ", after a skipped step");
    here.expect_copies_of_masters();
  }
}

}  // namespace
}  // namespace ds::optimizers
