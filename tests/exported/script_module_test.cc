// TorchScript modules are trained as models of this library.
#include "dsengine/script_module.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/check.h"
#include "dsengine/engine.h"
#include "tests/support/borrowed.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"
#include "tests/support/thrown.h"

namespace ds {
namespace {

using testing::HasSubstr;

constexpr int kScriptSteps = 6;

torch::jit::Module layer(int64_t in, int64_t out, double start) {
  torch::jit::Module module("Layer");
  module.register_parameter("weight", (torch::arange(out * in) * 0.7 + start).sin().view({out, in}) * 0.5, false);
  module.register_parameter("bias", torch::zeros({out}), false);
  module.define("def forward(self, x):\n  return torch.linear(x, self.weight, self.bias)\n");
  return module;
}

// What torch.jit.script makes of a module with two layers, a dropout and a buffer.
torch::jit::Module net() {
  torch::jit::Module module("Net");
  module.register_attribute("training", c10::BoolType::get(), true);
  module.register_module("first", layer(4, 8, 0.1));
  module.register_module("last", layer(8, 2, 0.3));
  module.register_buffer("calls", torch::zeros({}));
  module.define(R"(
    def forward(self, x):
      if self.training:
        self.calls += 1
      y = torch.dropout(torch.tanh(self.first.forward(x)), 0.0, self.training)
      return self.last.forward(y)
    def both(self, x):
      return self.forward(x), x
  )");
  for (const at::Tensor& parameter : module.parameters()) at::Tensor(parameter).requires_grad_();
  return module;
}

at::Tensor inputs_of(int step) { return (torch::arange(32) * 1.3 + step).cos().view({8, 4}); }
at::Tensor loss_of(const at::Tensor& y) { return (y - 0.25).square().mean(); }

std::vector<double> train_alone(torch::jit::Module module) {
  std::vector<at::Tensor> parameters;
  for (const at::Tensor& parameter : module.parameters()) parameters.push_back(parameter);
  torch::optim::SGD optimizer(parameters, 0.1);
  std::vector<double> losses;
  for (int step = 0; step < kScriptSteps; ++step) {
    optimizer.zero_grad();
    const at::Tensor loss = loss_of(module.forward({inputs_of(step)}).toTensor());
    loss.backward();
    optimizer.step();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

TEST(ScriptModule, HasPythonsNamesAndSharesTheTensors) {
  const torch::jit::Module script = net();
  const std::shared_ptr<ScriptModule> model = adapt(script);
  std::vector<std::string> names;
  for (const auto& item : model->named_parameters()) names.push_back(item.key());
  EXPECT_THAT(names, testing::UnorderedElementsAre("first.weight", "first.bias", "last.weight", "last.bias"));
  EXPECT_TRUE(model->named_parameters()["last.bias"].is_same(script.attr("last").toModule().attr("bias").toTensor()));
  EXPECT_TRUE(model->named_buffers().contains("calls"));
  model->forward(inputs_of(0));
  model->eval();
  EXPECT_FALSE(model->script().is_training());
  model->forward(inputs_of(0));
  EXPECT_EQ(model->named_buffers()["calls"].item<double>(), 1);
  model->train();
  EXPECT_TRUE(model->script().is_training());
}

TEST(ScriptModule, TrainsAtEveryStageAndIsSaved) {
  const std::vector<double> expected = train_alone(net());
  for (const int stage : {0, 1, 2, 3}) {
    SCOPED_TRACE(cat("stage ", stage));
    const test::ScratchFolder folder;
    test::run_ranks(2, [&](comm::Communicator& ranks) {
      const std::shared_ptr<ScriptModule> model = adapt(net());
      nlohmann::ordered_json config = {{"train_micro_batch_size_per_gpu", 4},
                                       {"zero_allow_untested_optimizer", true},
                                       {"optimizer", {{"type", "SGD"}, {"params", {{"lr", 0.1}}}}},
                                       {"zero_optimization", {{"stage", stage}}}};
      if (stage == 3) config["zero_optimization"]["stage3_release_always"] = true;
      const auto parts = engine::initialize({.model = model, .config = config, .communicator = test::borrowed(ranks)});
      for (int step = 0; step < kScriptSteps; ++step) {
        const at::Tensor loss = loss_of(model->forward(inputs_of(step).chunk(2)[ranks.rank()]));
        parts.engine->backward(loss);
        parts.engine->step();
        at::Tensor sum = loss.detach().to(at::kDouble).clone();
        ranks.all_reduce(sum).wait();
        EXPECT_NEAR(sum.item<double>() / 2, expected[static_cast<size_t>(step)], 1e-6);
      }
      parts.engine->synchronize_parameters();
      if (stage == 3 || ranks.rank() != 0) return;
      model->script().save(folder / "trained.pt");
      torch::jit::Module again = torch::jit::load(folder / "trained.pt");
      EXPECT_TRUE(again.forward({inputs_of(0)}).toTensor().allclose(model->forward(inputs_of(0)), 1e-6, 1e-6));
    });
  }
}

TEST(ScriptModule, WhatCannotBeTrainedIsTold) {
  const auto said = [](const auto& call) { return test::thrown_by<UsageError>(call); };
  torch::jit::Module empty("Empty");
  EXPECT_THAT(said([&] { adapt(empty); }), HasSubstr("has no method forward"));
  empty.define("def forward(self, x):\n  return x, x\n");
  EXPECT_THAT(said([&] { adapt(empty); }), HasSubstr("has no parameters; torch.jit.freeze"));
  torch::jit::Module pair = layer(4, 2, 0);
  pair.register_module("inner", layer(4, 2, 1));
  torch::jit::Module two("Two");
  two.register_module("inner", pair);
  two.define("def forward(self, x):\n  return self.inner.forward(x), x\n");
  const std::shared_ptr<ScriptModule> model = adapt(two);
  EXPECT_THAT(said([&] { model->forward(inputs_of(0)); }), HasSubstr("forward returns Tuple, not one tensor"));
  EXPECT_TRUE(model->run({inputs_of(0)}).isTuple());
}

}  // namespace
}  // namespace ds
