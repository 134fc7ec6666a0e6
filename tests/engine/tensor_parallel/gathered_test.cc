// Split parameters shown whole: in scopes of gathered_parameters(), and by the calls on one parameter.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <string>
#include <vector>

#include "core/split/split_tensor.h"
#include "core/text.h"
#include "tests/engine/tensor_parallel/split_training.h"

namespace ds::engine {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

using Values = std::map<std::string, at::Tensor>;

Values values_of(Engine& engine) {
  Values values;
  for (auto& [name, tensor] : engine.module_state_dict()) values[name] = tensor;
  return values;
}

// With the engine after two steps, on T = 2 and two data-parallel ranks.
class GatheredSplitTest : public testing::TestWithParam<int> {
 protected:
  void run(const std::function<void(Engine&, gpt::Gpt&, int rank)>& body) const {
    GptRun run{.tensor = 2, .data = 2, .stage = GetParam(), .steps = 2};
    run.model.vocab = 51;
    test::run_ranks(run.world(), [&](comm::Communicator& world) {
      const auto net = run.make();
      const auto [engine, optimizer, loader, schedule] = run.start(world, net);
      run.train(*engine, *net);
      body(*engine, *net, world.rank());
      run.train(*engine, *net);  // and on
    });
  }
};

INSTANTIATE_TEST_SUITE_P(Stages, GatheredSplitTest, testing::Values(0, 2, 3),
                         [](const auto& stage) { return cat("stage", stage.param); });

TEST_P(GatheredSplitTest, ArePlainAndWholeInsideTheScope) {
  run([](Engine& engine, gpt::Gpt& net, int rank) {
    const Values expected = values_of(engine);
    auto parameters = net.named_parameters();
    {
      const auto whole = engine.gathered_parameters(net.parameters());
      for (const auto& item : parameters) {
        EXPECT_FALSE(is_split(item.value())) << item.key();
        if (rank > 0) continue;  // one rank alone may read
        EXPECT_TRUE(torch::equal(item.value().detach(), expected.at(item.key()))) << item.key();
        EXPECT_EQ(item.value().data_ptr<float>()[0], expected.at(item.key()).data_ptr<float>()[0]);
      }
      EXPECT_THAT([&] { engine.module_state_dict(); }, ThrowsMessage<UsageError>(HasSubstr("gathered_parameters")));
    }
    EXPECT_TRUE(is_split(parameters["wte.weight"]));
    EXPECT_FALSE(is_split(parameters["wpe.weight"]));
    EXPECT_ANY_THROW(parameters["wte.weight"].data_ptr());
    const Values after = values_of(engine);
    for (const auto& [name, values] : expected) EXPECT_TRUE(torch::equal(after.at(name), values)) << name;
  });
}

// Split and whole ones; what one rank changes, all have.
TEST_P(GatheredSplitTest, ChangesOfTheFirstRankReachAllParts) {
  run([](Engine& engine, gpt::Gpt& net, int rank) {
    const Values before = values_of(engine);
    auto parameters = net.named_parameters();
    const std::vector<std::string> changed = {"wte.weight", "h.1.attn.qkv.weight", "h.0.mlp.proj.weight",
                                              "ln_f.weight"};
    std::vector<at::Tensor> wanted;
    for (const std::string& name : changed) wanted.push_back(parameters[name]);
    {
      const auto whole = engine.gathered_parameters(wanted, /*modifier_rank=*/0);
      const torch::NoGradGuard no_grad;
      if (rank == 0) {
        for (const std::string& name : changed) parameters[name].mul_(2).add_(1);
      } else {
        for (const std::string& name : changed) parameters[name].fill_(77);  // lost
      }
    }
    const Values after = values_of(engine);
    const Values masters = [&] {
      Values values;
      for (auto& [name, tensor] : engine.fp32_state_dict()) values[name] = tensor;
      return values;
    }();
    for (const auto& [name, values] : before) {
      const bool is_changed = std::find(changed.begin(), changed.end(), name) != changed.end();
      EXPECT_TRUE(torch::equal(after.at(name), is_changed ? values * 2 + 1 : values)) << name;
      EXPECT_TRUE(torch::equal(masters.at(name), after.at(name))) << name;
    }
  });
}

TEST_P(GatheredSplitTest, AChangeWithoutAModifierIsAnError) {
  run([](Engine& engine, gpt::Gpt& net, int) {
    auto parameters = net.named_parameters();
    for (const bool by_data : {false, true}) {
      zero::GatheredParameters whole = engine.gathered_parameters({parameters["h.0.mlp.fc.weight"]});
      {
        const torch::NoGradGuard no_grad;
        at::Tensor target = by_data ? parameters["h.0.mlp.fc.weight"].data() : parameters["h.0.mlp.fc.weight"];
        target.fill_(3);
      }
      EXPECT_THAT([&] { whole.close(); }, ThrowsMessage<UsageError>(HasSubstr("h.0.mlp.fc.weight")));
      EXPECT_TRUE(is_split(parameters["h.0.mlp.fc.weight"]));
    }
  });
}

TEST_P(GatheredSplitTest, AGradientInTheScopeIsRefused) {
  run([](Engine& engine, gpt::Gpt& net, int) {
    auto parameters = net.named_parameters();
    at::Tensor sum;
    {
      const auto whole = engine.gathered_parameters({parameters["h.0.mlp.fc.weight"]});
      sum = parameters["h.0.mlp.fc.weight"].square().sum();
      EXPECT_THAT([&] { sum.backward({}, /*retain_graph=*/true); },
                  ThrowsMessage<UsageError>(HasSubstr("h.0.mlp.fc.weight")));
    }
    EXPECT_THAT([&] { sum.backward(); }, ThrowsMessage<UsageError>(HasSubstr("h.0.mlp.fc.weight")));
  });
}

TEST_P(GatheredSplitTest, AnExceptionLeavesWhatWas) {
  run([](Engine& engine, gpt::Gpt& net, int) {
    const Values before = values_of(engine);
    auto parameters = net.named_parameters();
    try {
      const auto whole = engine.gathered_parameters({parameters["wte.weight"]}, /*modifier_rank=*/0);
      const torch::NoGradGuard no_grad;
      parameters["wte.weight"].fill_(3);
      throw std::runtime_error("the program's");
    } catch (const std::runtime_error&) {
    }
    EXPECT_TRUE(is_split(parameters["wte.weight"]));
    EXPECT_TRUE(torch::equal(values_of(engine).at("wte.weight"), before.at("wte.weight")));
  });
}

// State that was in host memory for a while.
TEST_P(GatheredSplitTest, MovedStatesComeBack) {
  run([](Engine& engine, gpt::Gpt& net, int) {
    const Values before = values_of(engine);
    engine.offload_states();
    engine.reload_states();
    const Values after = values_of(engine);
    for (const auto& [name, values] : before) EXPECT_TRUE(torch::equal(after.at(name), values)) << name;
    EXPECT_TRUE(is_split(net.named_parameters()["wte.weight"]));
  });
}

// Masters, states and gradients of one parameter: whole ones are those of the model, local ones this rank's slice of
// its part.
TEST_P(GatheredSplitTest, CallsOnOneParameter) {
  run([](Engine& engine, gpt::Gpt& net, int) {
    auto parameters = net.named_parameters();
    const Values expected = values_of(engine);
    for (const std::string name : {"wte.weight", "h.0.attn.qkv.weight", "h.0.attn.proj.weight", "ln_f.bias"}) {
      const at::Tensor& parameter = parameters[name];
      EXPECT_TRUE(torch::equal(engine.safe_get_full_fp32_param(parameter), expected.at(name))) << name;
      const at::Tensor state = engine.safe_get_full_optimizer_state(parameter, "exp_avg");
      EXPECT_EQ(state.sizes(), parameter.sizes());
      const at::Tensor local = engine.safe_get_local_fp32_param(parameter);
      const int64_t part = is_split(parameter) ? leaf_of(parameter).numel() : parameter.numel();
      EXPECT_LE(local.numel(), part) << name;
      engine.safe_set_full_fp32_param(parameter, expected.at(name) * 3);
      EXPECT_TRUE(torch::equal(engine.safe_get_full_fp32_param(parameter), expected.at(name) * 3)) << name;
      engine.safe_set_full_optimizer_state(parameter, state * 2, "exp_avg");
      EXPECT_TRUE(torch::equal(engine.safe_get_full_optimizer_state(parameter, "exp_avg"), state * 2)) << name;
      engine.safe_set_local_fp32_param(parameter, local);
      EXPECT_TRUE(torch::equal(engine.safe_get_full_fp32_param(parameter), expected.at(name))) << name;
      EXPECT_TRUE(torch::equal(values_of(engine).at(name), expected.at(name))) << name;
    }
  });
}

}  // namespace
}  // namespace ds::engine
