// ZeRO++: parameters gathered as 8-bit integers, gradients reduced as 4-bit integers, frozen parameters kept as 8-bit
// integers.
#include <gtest/gtest.h>

#include "core/numbers/block_codec.h"
#include "dsengine/engine.h"
#include "tests/model/small_run.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;

constexpr int kQuantizedRanks = 4;

// Wide enough for scales to be a small part of what is sent.
struct WideNetImpl : torch::nn::Module {
  WideNetImpl() {
    first = register_module("first", torch::nn::Linear(6, 512));
    last = register_module("last", torch::nn::Linear(512, 64));
    fill(*this);
  }
  at::Tensor loss(const at::Tensor& x) {
    const at::Tensor target = x.to(first->weight.scalar_type());
    return (last(torch::tanh(first(target))) * 0.05 - target.sum(1, true).tanh()).pow(2).mean();
  }
  torch::nn::Linear first{nullptr}, last{nullptr};
};
TORCH_MODULE(WideNet);

ordered_json quantized_config(int stage, const std::vector<std::string>& keys) {
  ordered_json config = small_config(stage, 1);
  config["optimizer"]["params"]["lr"] = 5e-3;
  config["zero_optimization"]["reduce_bucket_size"] = 40000;
  for (const std::string& key : keys) config["zero_optimization"][key] = true;
  return config;
}

struct QuantizedRun {
  std::vector<double> losses;
  int64_t sent = 0;  // by rank 0, in all steps
};

QuantizedRun run_quantized(const ordered_json& config, int64_t steps) {
  QuantizedRun run;
  test::run_ranks(kQuantizedRanks, [&](comm::Communicator& communicator) {
    WideNet model;
    const auto engine = start(model.ptr(), config, communicator).engine;
    for (int64_t step = 0; step < steps; ++step) {
      const at::Tensor loss = engine->backward(model->loss(sample(step % 5, communicator.rank())));
      engine->step();
      if (communicator.rank() == 0) run.losses.push_back(loss.item<double>());
    }
    if (communicator.rank() == 0) run.sent = engine->comm_bytes_sent();
    // What is saved is what the optimizer has, and the same on every rank.
    const State weights = copy_of(engine->module_state_dict());
    for (const auto& [name, master] : engine->fp32_state_dict()) {
      EXPECT_TRUE(weights.at(name).equal(master.to(weights.at(name).scalar_type()))) << name;
      const at::Tensor first = master.clone();
      communicator.broadcast(first, 0).wait();
      EXPECT_TRUE(first.equal(master)) << name << " on rank " << communicator.rank();
    }
  });
  return run;
}

void expect_near_curve(const QuantizedRun& found, const QuantizedRun& exact, double tolerance) {
  ASSERT_EQ(found.losses.size(), exact.losses.size());
  for (size_t i = 0; i < exact.losses.size(); ++i) {
    EXPECT_NEAR(found.losses[i], exact.losses[i], tolerance * exact.losses.front()) << "step " << i;
  }
  EXPECT_LT(exact.losses.back(), 0.7 * exact.losses.front());
}

constexpr int64_t kQuantizedSteps = 60;

TEST(QuantizedZero, WeightsAreGatheredInAQuarterOfTheBytes) {
  const QuantizedRun exact = run_quantized(quantized_config(3, {}), kQuantizedSteps);
  const QuantizedRun found = run_quantized(quantized_config(3, {"zero_quantized_weights"}), kQuantizedSteps);
  expect_near_curve(found, exact, 0.02);
  // A gather (backward begins with the last bucket and does not read the first) of 4 bytes an element becomes one of
  // 1.008 bytes; a reduction has 4.
  EXPECT_NEAR(static_cast<double>(found.sent) / static_cast<double>(exact.sent), 5.0 / 8.0, 0.02);
}

TEST(QuantizedZero, GradientsAreReducedInAnEighthOfTheBytes) {
  for (const int stage : {1, 2, 3}) {
    const QuantizedRun exact = run_quantized(quantized_config(stage, {}), kQuantizedSteps);
    const QuantizedRun found = run_quantized(quantized_config(stage, {"zero_quantized_gradients"}), kQuantizedSteps);
    expect_near_curve(found, exact, 0.05);
    EXPECT_NEAR(static_cast<double>(found.sent) / static_cast<double>(exact.sent), 4.5 / 8.0, 0.02) << stage;
  }
}

TEST(QuantizedZero, AllTogetherWithSecondarySlices) {
  const QuantizedRun exact = run_quantized(quantized_config(3, {}), kQuantizedSteps);
  ordered_json config = quantized_config(3, {"zero_quantized_weights", "zero_quantized_gradients"});
  config["zero_optimization"]["zero_hpz_partition_size"] = 2;
  expect_near_curve(run_quantized(config, kQuantizedSteps), exact, 0.05);
}

TEST(QuantizedZero, Accumulation) {
  for (const int stage : {1, 2, 3}) {
    ordered_json config = quantized_config(stage, {});
    config["gradient_accumulation_steps"] = 2;
    const QuantizedRun exact = run_quantized(config, kQuantizedSteps);
    config["zero_optimization"]["zero_quantized_gradients"] = true;
    config["zero_optimization"]["zero_quantized_weights"] = true;
    expect_near_curve(run_quantized(config, kQuantizedSteps), exact, 0.05);
  }
}

TEST(QuantizedZero, Bfloat16) {
  ordered_json config = quantized_config(3, {});
  config["bf16"]["enabled"] = true;
  const QuantizedRun exact = run_quantized(config, kQuantizedSteps);
  config["zero_optimization"]["zero_quantized_weights"] = true;
  config["zero_optimization"]["zero_quantized_gradients"] = true;
  test::run_ranks(kQuantizedRanks, [&](comm::Communicator& communicator) {
    WideNet model;
    const auto engine = start(model.ptr(), config, communicator).engine;
    double last = 0;
    for (int64_t step = 0; step < kQuantizedSteps; ++step) {
      last = engine->backward(model->loss(sample(step % 5, communicator.rank()))).item<double>();
      engine->step();
    }
    EXPECT_LT(last, 0.7 * exact.losses.front());
  });
}

TEST(QuantizedZero, ParametersAreGatheredExactlyToBeReadOrChanged) {
  test::run_ranks(kQuantizedRanks, [](comm::Communicator& communicator) {
    WideNet model;
    const at::Tensor before = model->first->weight.detach().clone();
    const auto engine = start(model.ptr(), quantized_config(3, {"zero_quantized_weights"}), communicator).engine;
    const at::Tensor seen = model->first->weight * 1.0;  // an operator's view of it
    EXPECT_FALSE(seen.equal(before));
    EXPECT_TRUE(seen.allclose(before, 0, 0.4 / 127));
    {
      const auto whole = engine->gathered_parameters({model->first->weight}, /*modifier_rank=*/3);
      EXPECT_TRUE(model->first->weight.equal(before));
      const torch::NoGradGuard no_grad;
      if (communicator.rank() == 3) model->first->weight.select(0, 0).fill_(0.125);
    }
    before.select(0, 0).fill_(0.125);
    EXPECT_TRUE(copy_of(engine->module_state_dict()).at("first.weight").equal(before));
  });
}

TEST(QuantizedZero, FrozenParametersAreKeptInAQuarterOfTheBytes) {
  test::run_ranks(kQuantizedRanks, [](comm::Communicator& communicator) {
    int64_t bytes[2];
    for (const bool quantized : {false, true}) {
      WideNet model;
      WideNet reference;
      model->last->weight.set_requires_grad(false);
      const at::Tensor before = model->last->weight.clone();
      ordered_json config = quantized_config(3, {});
      config["zero_optimization"]["zero_quantized_nontrainable_weights"] = quantized;
      const auto engine = start(model.ptr(), config, communicator).engine;
      const Engine::ModelStateBytes held = engine->model_state_bytes();
      EXPECT_EQ(held.parameters, engine->plan().bytes->parameters);
      bytes[quantized] = held.parameters;
      const at::Tensor x = sample(0, communicator.rank());
      EXPECT_TRUE(model->loss(x).allclose(reference->loss(x), 0.02, 1e-3));
      engine->backward(model->loss(x));
      engine->step();
      const at::Tensor after = copy_of(engine->module_state_dict()).at("last.weight");
      EXPECT_TRUE(after.allclose(before, 0, 0.41 / 254)) << (after - before).abs().max();
      EXPECT_EQ(after.equal(before), !quantized);
    }
    const int64_t trainable = (6 * 512 + 512 + 64) / kQuantizedRanks * 4;
    const int64_t frozen = 512 * 64 / kQuantizedRanks;
    EXPECT_NEAR(static_cast<double>(bytes[0]), static_cast<double>(trainable + 4 * frozen), 600);
    EXPECT_NEAR(static_cast<double>(bytes[1]), static_cast<double>(trainable) + 1.008 * static_cast<double>(frozen),
                600);
  });
}

}  // namespace
}  // namespace ds::engine
