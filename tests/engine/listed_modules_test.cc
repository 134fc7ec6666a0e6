// torch_autocast.lower_precision_safe_modules: what ranks send of parameters of listed classes has autocast's dtype.
#include <ATen/core/grad_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "config/plan/plan.h"
#include "core/check.h"
#include "dsengine/engine.h"
#include "model/state/autocast.h"
#include "tests/model/small_run.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::ThrowsMessage;

constexpr double kRate = 0.25;

ordered_json listed_config(int stage, const std::vector<std::string>& listed) {
  ordered_json config = small_config(stage, 1);
  config["optimizer"] = {{"type", "SGD"}, {"params", {{"lr", kRate}}}};
  config["zero_allow_untested_optimizer"] = true;
  config["torch_autocast"] = {{"enabled", true}, {"dtype", "bfloat16"}, {"lower_precision_safe_modules", listed}};
  return config;
}

bool any_begins(const std::string& name, const std::vector<std::string>& layers) {
  return std::any_of(layers.begin(), layers.end(), [&](const auto& layer) { return name.starts_with(layer); });
}

// One step of SGD by the formula w - lr * avg(g_0, g_1), where gradients of parameters of layers in `rounded` are
// rounded to bfloat16, and so is their sum. Half a bfloat16 is one. `gathered`: operators see their weights rounded,
// too.
State step_of_two(const std::vector<std::string>& rounded, bool gathered) {
  SmallNet model;
  const State before = parameters_of(*model);
  for (const auto& item : model->named_parameters()) {
    const at::NoGradGuard no_grad;
    if (gathered && any_begins(item.key(), rounded)) item.value().copy_(item.value().to(at::kBFloat16));
  }
  State sum;
  for (int rank = 0; rank < 2; ++rank) {
    model->zero_grad();
    at::Tensor loss;
    {
      const Autocast on(at::kCPU, at::kBFloat16);
      loss = model->loss(sample(0, rank));
    }
    loss.backward();
    for (const auto& item : model->named_parameters()) {
      const std::string& name = item.key();
      const auto dtype = any_begins(name, rounded) ? at::kBFloat16 : at::kFloat;
      const at::Tensor own = item.value().grad().to(dtype);
      sum[name] = rank == 0 ? own : sum[name] + own;
    }
  }
  State result;
  for (const auto& [name, value] : before) result[name] = value - kRate * (sum.at(name) / 2).to(at::kFloat);
  return result;
}

State engine_step(const ordered_json& config) {
  State result;
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), config, communicator).engine;
    State state = train(*engine, model, 1);
    if (communicator.rank() == 0) result = std::move(state);
  });
  return result;
}

TEST(ListedModules, WhatIsSentOfTheirParametersIsRoundedAndNothingElse) {
  for (const int stage : {0, 1, 2, 3}) {
    const auto expect = [&](const std::vector<std::string>& listed, const std::vector<std::string>& rounded) {
      const State found = engine_step(listed_config(stage, listed));
      EXPECT_EQ(largest_difference(found, step_of_two(rounded, /*gathered=*/stage == 3)), 0.0)
          << "stage " << stage << ", " << (listed.empty() ? "none" : listed.front());
    };
    expect({"torch.nn.Linear"}, {"first", "last"});
    expect({"torch::nn::LayerNorm"}, {"norm"});
    expect({"torch.nn.modules.linear.Linear", "LayerNorm"}, {"first", "last", "norm"});
    expect({"torch.nn.Conv2d"}, {});
    expect({}, {});
  }
  EXPECT_GT(largest_difference(step_of_two({}, false), step_of_two({"first", "last"}, false)), 1e-5);
  EXPECT_GT(largest_difference(step_of_two({"norm"}, false), step_of_two({"norm"}, true)), 1e-5);
}

// Wide enough for padding to be a small part of what is sent.
struct WideLayersImpl : torch::nn::Module {
  WideLayersImpl() {
    first = register_module("first", torch::nn::Linear(6, 512));
    last = register_module("last", torch::nn::Linear(512, 64));
    fill(*this);
  }
  at::Tensor loss(const at::Tensor& x) {
    return (last(torch::tanh(first(x))) * 0.05 - x.sum(1, true).tanh()).pow(2).mean();
  }
  torch::nn::Linear first{nullptr}, last{nullptr};
};
TORCH_MODULE(WideLayers);

struct ListedRun {
  std::vector<double> losses;
  int64_t sent = 0;
};

ListedRun run_listed(ordered_json config, int ranks) {
  config["zero_optimization"]["reduce_bucket_size"] = 40000;
  ListedRun run;
  test::run_ranks(ranks, [&](comm::Communicator& communicator) {
    WideLayers model;
    const auto engine = start(model.ptr(), config, communicator).engine;
    for (int64_t step = 0; step < 8; ++step) {
      const at::Tensor loss = engine->backward(model->loss(sample(step % 2, communicator.rank())));
      engine->step();
      if (communicator.rank() == 0) run.losses.push_back(loss.item<double>());
    }
    if (communicator.rank() == 0) run.sent = engine->comm_bytes_sent();
    // What is read is what the optimizer has, never what has travelled.
    const State weights = copy_of(engine->module_state_dict());
    for (const auto& [name, master] : engine->fp32_state_dict()) {
      EXPECT_TRUE(weights.at(name).equal(master)) << name;
      const at::Tensor first = master.clone();
      communicator.broadcast(first, 0).wait();
      EXPECT_TRUE(first.equal(master)) << name << " on rank " << communicator.rank();
    }
  });
  return run;
}

TEST(ListedModules, TravelInHalfTheBytes) {
  const std::vector<std::string> linear = {"torch.nn.Linear"};
  for (const auto& [stage, share] : {std::pair(0, 0.5), std::pair(2, 0.75), std::pair(3, 0.5)}) {
    const ListedRun whole = run_listed(listed_config(stage, {}), 4);
    const ListedRun listed = run_listed(listed_config(stage, linear), 4);
    for (size_t i = 0; i < whole.losses.size(); ++i) {
      EXPECT_NEAR(listed.losses[i], whole.losses[i], 0.01 * whole.losses.front()) << stage << " " << i;
    }
    EXPECT_NEAR(static_cast<double>(listed.sent) / static_cast<double>(whole.sent), share, 0.02) << stage;
  }
  // Copies join their sums in it, too, and secondary slices are of what has come.
  for (const char* key : {"mics_shard_size", "zero_hpz_partition_size"}) {
    ordered_json config = listed_config(3, {});
    config["zero_optimization"][key] = 2;
    const ListedRun whole = run_listed(config, 4);
    config["torch_autocast"]["lower_precision_safe_modules"] = linear;
    const ListedRun listed = run_listed(config, 4);
    EXPECT_LT(listed.sent, whole.sent * 7 / 10) << key;
    EXPECT_NEAR(listed.losses.back(), whole.losses.back(), 0.01 * whole.losses.front()) << key;
  }
}

namespace kinds {
struct OwnLayerImpl : torch::nn::LinearImpl {
  OwnLayerImpl() : LinearImpl(3, 2) {}
};
TORCH_MODULE(OwnLayer);
}  // namespace kinds

TEST(ListedModules, AreFoundByTheirExactClass) {
  torch::nn::Sequential model(torch::nn::Linear(2, 3), kinds::OwnLayer());
  EXPECT_EQ(class_of(*model->children().at(0)), "torch::nn::Linear");
  EXPECT_THAT(class_of(*model->children().at(1)), AllOf(HasSubstr("kinds::OwnLayer"), Not(HasSubstr("Impl"))));
  const auto count = [&](const std::vector<std::string>& names) {
    return tensors_of_classes(*model, names, "listed").size();
  };
  EXPECT_EQ(count({"Linear"}), 2);
  EXPECT_EQ(count({"OwnLayer"}), 2);
  EXPECT_EQ(count({class_of(*model->children().at(1)), "torch.nn.Linear"}), 4);
  EXPECT_EQ(count({"torch.nn.Conv3d"}), 0);
}

TEST(ListedModules, AnUnknownClassIsAnErrorThatListsThoseFound) {
  for (const int ranks : {1, 2}) {
    test::run_ranks(ranks, [&](comm::Communicator& communicator) {
      SmallNet model;
      const auto begin = [&] { start(model.ptr(), listed_config(2, {"torch.nn.Linear", "my.Linnear"}), communicator); };
      EXPECT_THAT(begin, ThrowsMessage<ConfigError>(AllOf(HasSubstr("lower_precision_safe_modules/1"),
                                                          HasSubstr("my.Linnear"), HasSubstr("torch::nn::LayerNorm"))));
    });
  }
}

TEST(ListedModules, ThePlanNamesThemAndWhatTheyExclude) {
  const auto plan_of = [](const ordered_json& config, int64_t ranks) {
    return make_plan(config::parse(config, {.dp_world_size = ranks}), {.world_size = ranks, .dp = ranks});
  };
  const ordered_json config = listed_config(3, {"torch.nn.Linear"});
  EXPECT_THAT(to_table(plan_of(config, 2)),
              AllOf(HasSubstr("of listed modules in bf16"), HasSubstr("gathered parameters travel in bf16")));
  EXPECT_THAT(to_table(plan_of(config, 1)), HasSubstr("no ranks share gradients"));
  ordered_json both = config;
  both["zero_optimization"]["zero_quantized_gradients"] = true;
  EXPECT_THAT([&] { plan_of(both, 2); }, ThrowsMessage<ConfigError>(HasSubstr("zero_quantized_gradients")));
}

}  // namespace
}  // namespace ds::engine
