// The kernels that update slices on a device: the bits of the CPU's vector kernels, for every optimizer that has them,
// for all types of gradient and copy, at lengths and places that fit no vector, many slices in a launch.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <ATen/record_function.h>

#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "optim/device_kernels.h"
#include "optim/step_scale.h"
#include "tests/gpu/tested_device.h"
#include "tests/optim/sharded_model.h"
#include "zero/square_sum.h"

namespace ds::optimizers {
namespace {

using test::tested_device;

constexpr int64_t kSteps = 3;
constexpr double kScale = 0.3;

struct Rule {
  std::string name;
  OptimizerOptions options;
  bool exact = true;  // the CPU has a vector kernel for it
};

std::vector<Rule> rules() {
  const std::vector<GroupOptions> decay = {{.lr = 1e-2, .weight_decay = 0.1},
                                           {.lr = 3e-2, .beta1 = 0.3, .beta2 = 0.9, .eps = 1e-4}};
  std::vector<GroupOptions> momentum = decay;
  momentum[0].momentum = 0.9;
  std::vector<GroupOptions> nesterov = momentum;
  nesterov[1].momentum = 0.5;
  return {
      {"AdamW", {.type = "AdamW", .groups = decay}},
      {"AdamWithL2", {.type = "Adam", .groups = decay, .values = {.adam_w_mode = false}}},
      {"AdamAmsgrad", {.type = "Adam", .groups = decay, .values = {.amsgrad = true}}},
      {"AdamWithoutBiasCorrection", {.type = "Adam", .groups = decay, .values = {.bias_correction = false}}},
      {"Adagrad", {.type = "Adagrad", .groups = decay, .values = {.lr_decay = 0.1, .initial_accumulator_value = 0.2}}},
      {"Lion", {.type = "Lion", .groups = decay}},
      {"Sgd", {.type = "SGD", .groups = decay}, false},
      {"SgdMomentum", {.type = "SGD", .groups = momentum, .values = {.dampening = 0.25}}, false},
      {"SgdNesterov", {.type = "SGD", .groups = nesterov, .values = {.nesterov = true}}, false},
  };
}

// The dtypes of masters and states.
struct Kept {
  at::ScalarType master = at::kFloat;
  at::ScalarType state = at::kFloat;
};

// Slices of one optimizer on one device, some of them not where a vector begins.
class Slices {
 public:
  Slices(const Rule& rule, at::Device device, at::ScalarType gradient, std::optional<at::ScalarType> copy,
         const Kept& kept = {})
      : device_(device), gradient_(gradient), optimizer_(make_optimizer(rule.options)) {
    optimizer_->set_state_dtype(kept.state);
    for (size_t i = 0; i < lengths().size(); ++i) {
      const at::Tensor master = placed(uniform(7 + i, lengths()[i]).to(kept.master), i);
      optimizer_->add_slice(
          {.master = master, .group = static_cast<int>(i % 2), .exchange = std::make_shared<Alone>()});
      copies_.push_back(copy ? placed(at::full({lengths()[i]}, 9.0, *copy), i) : at::Tensor());
    }
  }

  // More than a launch takes.
  static const std::vector<int64_t>& lengths() {
    static const std::vector<int64_t> kLengths = [] {
      std::vector<int64_t> lengths = {1, 7, 4096, 8192, 0, 4099, 100003, 64, 20000};
      for (int64_t i = 0; i < 20; ++i) lengths.push_back(333 + i);
      return lengths;
    }();
    return kLengths;
  }

  void step(int64_t number, const StepScale& scale) {
    optimizer_->begin_step();
    std::vector<SliceUpdate> updates;
    for (size_t i = 0; i < lengths().size(); ++i) {
      const at::Tensor gradient = uniform(static_cast<uint64_t>(1000 * number) + i, lengths()[i]).to(gradient_);
      updates.push_back({static_cast<int64_t>(i), placed(gradient, i), copies_[i]});
    }
    optimizer_->update_all(updates, scale);
  }

  // Of slice i: master, states and copy, on the host.
  std::vector<at::Tensor> state(size_t i) {
    std::vector<at::Tensor> all = {optimizer_->slice(static_cast<int64_t>(i)).master.cpu()};
    for (const auto& [name, state] : optimizer_->states(static_cast<int64_t>(i))) all.push_back(state.cpu());
    if (copies_[i].defined()) all.push_back(copies_[i].cpu());
    return all;
  }

  SliceOptimizer& optimizer() { return *optimizer_; }

 private:
  at::Tensor placed(const at::Tensor& values, size_t i) const {
    const int64_t offset = i % 3 == 2 ? static_cast<int64_t>(i) : 0;
    return at::empty({values.numel() + offset}, values.options().device(device_))
        .narrow(0, offset, values.numel())
        .copy_(values);
  }

  at::Device device_;
  at::ScalarType gradient_;
  std::unique_ptr<SliceOptimizer> optimizer_;
  std::vector<at::Tensor> copies_;
};

at::Tensor bits(const at::Tensor& values) { return values.view(values.element_size() == 4 ? at::kInt : at::kShort); }

// `apart`: where they are not exact, and near 0.
void expect_equal(Slices& found, Slices& expected, bool exact, const std::string& what, double apart = 1e-6) {
  for (size_t i = 0; i < Slices::lengths().size(); ++i) {
    const std::vector<at::Tensor> here = found.state(i);
    const std::vector<at::Tensor> there = expected.state(i);
    ASSERT_EQ(here.size(), there.size()) << what;
    for (size_t t = 0; t < here.size(); ++t) {
      const bool equal = exact ? at::equal(bits(here[t]), bits(there[t]))
                               : at::allclose(here[t].to(at::kFloat), there[t].to(at::kFloat), 1e-2, apart);
      EXPECT_TRUE(equal) << what << ", slice " << i << ", tensor " << t;
    }
  }
}

TEST(GpuUpdate, HasTheBitsOfTheCpuForMastersAndStatesOfSixteenBits) {
  const std::vector<Kept> all = {{at::kBFloat16, at::kBFloat16},
                                 {at::kBFloat16, at::kFloat},
                                 {at::kFloat, at::kBFloat16},
                                 {at::kHalf, at::kFloat}};
  for (const Rule& rule : rules()) {
    for (const Kept& kept : all) {
      for (const std::optional<at::ScalarType> copy : {std::optional<at::ScalarType>(), std::optional(at::kBFloat16)}) {
        Slices here(rule, tested_device(), kept.master, copy, kept);
        Slices there(rule, at::kCPU, kept.master, copy, kept);
        EXPECT_EQ(here.optimizer().takes_device_scale(), tested_device().is_cuda()) << rule.name;
        for (int64_t step = 1; step <= kSteps; ++step) {
          here.step(step, {.factor = kScale, .device_factor = {}, .skip = {}});
          there.step(step, {.factor = kScale, .device_factor = {}, .skip = {}});
        }
        expect_equal(here, there, rule.exact,
                     rule.name + ", masters " + at::toString(kept.master) + ", states " + at::toString(kept.state),
                     /*apart=*/1e-2);  // a unit in the last place of 1
      }
    }
  }
}

TEST(GpuUpdate, HasTheBitsOfTheCpu) {
  const std::vector<std::optional<at::ScalarType>> copies = {std::nullopt, at::kFloat, at::kBFloat16, at::kHalf};
  for (const Rule& rule : rules()) {
    for (const at::ScalarType gradient : {at::kFloat, at::kBFloat16, at::kHalf}) {
      for (const auto& copy : copies) {
        Slices here(rule, tested_device(), gradient, copy);
        Slices there(rule, at::kCPU, gradient, copy);
        EXPECT_EQ(here.optimizer().takes_device_scale(), tested_device().is_cuda()) << rule.name;
        for (int64_t step = 1; step <= kSteps; ++step) {
          here.step(step, {.factor = kScale, .device_factor = {}, .skip = {}});
          there.step(step, {.factor = kScale, .device_factor = {}, .skip = {}});
        }
        expect_equal(
            here, there, rule.exact,
            rule.name + ", gradient " + at::toString(gradient) + ", copy " + (copy ? at::toString(*copy) : "none"));
      }
    }
  }
}

TEST(GpuUpdate, SgdIsLibTorchs) {
  for (const Rule& rule : rules()) {
    if (rule.exact) continue;
    Slices here(rule, tested_device(), at::kFloat, std::nullopt);
    Slices there(rule, at::kCPU, at::kFloat, std::nullopt);
    for (int64_t step = 1; step <= kSteps; ++step) {
      here.step(step, {.factor = kScale, .device_factor = {}, .skip = {}});
      there.step(step, {.factor = kScale, .device_factor = {}, .skip = {}});
    }
    for (size_t i = 0; i < Slices::lengths().size(); ++i) {
      EXPECT_TRUE(at::allclose(here.state(i)[0], there.state(i)[0], 1e-6, 1e-7)) << rule.name << ", slice " << i;
    }
  }
}

TEST(GpuUpdate, FactorAndSkipComeFromTheDevice) {
  if (tested_device().is_cpu()) GTEST_SKIP() << "DS_TEST_DEVICE=cpu: the CPU's factor and skip are the host's";
  const at::TensorOptions on_device = torch::dtype(at::kFloat).device(tested_device());
  for (const Rule& rule : rules()) {
    Slices here(rule, tested_device(), at::kBFloat16, at::kBFloat16);
    Slices there(rule, at::kCPU, at::kBFloat16, at::kBFloat16);
    const StepScale scale{
        .factor = 1.0, .device_factor = at::full({1}, kScale, on_device), .skip = at::zeros({1}, on_device)};
    here.step(1, scale);
    there.step(1, {.factor = kScale, .device_factor = {}, .skip = {}});
    here.step(2, {.factor = 1.0, .device_factor = scale.device_factor, .skip = at::ones({1}, on_device)});
    here.optimizer().set_step_count(1);
    expect_equal(here, there, rule.exact, rule.name + ", skipped");
    here.step(3, scale);
    there.step(3, {.factor = kScale, .device_factor = {}, .skip = {}});
    expect_equal(here, there, rule.exact, rule.name + ", after a skipped step");
  }
}

// The largest number of float64 elements that an operator of this thread gave back, while it lives.
class LargestFloat64 {
 public:
  LargestFloat64() {
    largest_ = 0;
    handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&LargestFloat64::begin, &LargestFloat64::see)
                                             .needsOutputs(true)
                                             .scopes({at::RecordScope::FUNCTION}));
  }
  ~LargestFloat64() { at::removeCallback(handle_); }
  LargestFloat64(const LargestFloat64&) = delete;
  LargestFloat64& operator=(const LargestFloat64&) = delete;
  int64_t largest() const { return largest_; }

 private:
  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction&) { return nullptr; }
  static void see(const at::RecordFunction& function, at::ObserverContext*) {
    for (const c10::IValue& output : function.outputs()) {
      if (!output.isTensor() || !output.toTensor().defined() || output.toTensor().scalar_type() != at::kDouble)
        continue;
      largest_ = std::max(largest_, output.toTensor().numel());
    }
  }
  static thread_local int64_t largest_;
  at::CallbackHandle handle_ = 0;
};
thread_local int64_t LargestFloat64::largest_ = 0;

double square_sum_of(const at::Tensor& flat) {
  zero::SquareSum sum;
  sum.add(flat);
  return sum.total();
}

// An overflow at a loss scale is nothing rare; a copy of a bucket in float64 would be four times its size.
TEST(SquareSumOnADevice, AnOverflowIsFoundWithoutACopyInFloat64) {
  constexpr int64_t kNumel = (int64_t{3} << 16) + 1001;
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const at::Tensor flat = uniform(5, kNumel).to(type).to(tested_device());
    const double exact = flat.cpu().to(at::kDouble).square().sum().item<double>();
    EXPECT_NEAR(square_sum_of(flat), exact, 1e-4 * exact) << type;  // rows are added in float32
    for (const double bad : {std::numeric_limits<double>::infinity(), -std::numeric_limits<double>::infinity(),
                             std::numeric_limits<double>::quiet_NaN()}) {
      for (const int64_t place : {int64_t{0}, int64_t{70000}, kNumel - 1}) {
        at::Tensor broken = flat.clone();
        broken[place] = bad;
        const LargestFloat64 seen;
        EXPECT_FALSE(std::isfinite(square_sum_of(broken))) << bad << " at " << place << " of " << type;
        EXPECT_LT(seen.largest(), 1000) << type;
      }
    }
  }
}

TEST(SquareSumOnADevice, SquaresBeyondFloat32AreAddedInFloat64) {
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    const at::Tensor flat = (uniform(5, 70000) * 1e30).to(type).to(tested_device());
    const double exact = flat.cpu().to(at::kDouble).square().sum().item<double>();
    EXPECT_NEAR(square_sum_of(flat), exact, 1e-9 * exact) << type;
  }
}

}  // namespace
}  // namespace ds::optimizers
