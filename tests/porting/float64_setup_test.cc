// float64 models with all that an engine can have around them, and what is refused with one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "dsengine/pipeline.h"
#include "tests/porting/float64_run.h"
#include "tests/support/gloo_threads.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

// Slices are cut while the model is built.
TEST(Float64Setup, AModelThatIsBuiltInSlicesTrainsAsOneThatIsNot) {
  SmallNet plain = double_net();
  torch::optim::AdamW optimizer(plain->parameters(), torch::optim::AdamWOptions(0.02).weight_decay(0.1));
  const PortedResult expected = run_plainly({.world = 2, .steps = 4}, plain, optimizer, 0);
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    zero::Init init(borrowed(communicator), {.max_live = 0, .smallest = 8});
    SmallNet model = double_net();
    const auto engine = initialize({.model = model.ptr(), .config = small_config(3, 1), .init = &init}).engine;
    expect_same(train_double(*engine, model, communicator, 4), expected, kSameDouble);
  });
}

TEST(Float64Setup, RanksMayTalkThroughGloo) {
  SmallNet plain = double_net();
  torch::optim::AdamW optimizer(plain->parameters(), torch::optim::AdamWOptions(0.02).weight_decay(0.1));
  const PortedResult expected = run_plainly({.world = 2, .steps = 4}, plain, optimizer, 0.3);
  for (const int stage : {0, 1, 2, 3}) {
    ordered_json config = small_config(stage, 1);
    config["gradient_clipping"] = 0.3;
    testing::on_gloo_threads(2, [&](comm::Communicator& communicator) {
      SmallNet model = double_net();
      const auto engine = start(model.ptr(), config, communicator).engine;
      expect_same(train_double(*engine, model, communicator, 4), expected, kSameDouble);
    });
  }
}

// As programs of physics begin: the engine's own tensors must not follow it, in a float32 model either.
TEST(Float64Setup, ADefaultDtypeOfFloat64ChangesNothing) {
  const State narrow = TorchRun{.world = 2, .steps = 4}.train_adamw();
  SmallNet plain = double_net();
  torch::optim::AdamW optimizer(plain->parameters(), torch::optim::AdamWOptions(0.02).weight_decay(0.1));
  const PortedResult wide = run_plainly({.world = 2, .steps = 4}, plain, optimizer, 0);
  torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kDouble));
  for (const int stage : {0, 2, 3}) {
    test::run_ranks(2, [&](comm::Communicator& communicator) {
      SmallNet model;
      EXPECT_EQ(model->first->weight.scalar_type(), at::kDouble);
      const auto engine = start(model.ptr(), small_config(stage, 1), communicator).engine;
      expect_same(train_double(*engine, model, communicator, 4), wide, kSameDouble);
      SmallNet converted;
      converted->to(torch::kFloat);
      fill(*converted);
      const auto other = start(converted.ptr(), small_config(stage, 1), communicator).engine;
      EXPECT_LT(largest_difference(train(*other, converted, 4), narrow), kSameResult * 10);
      EXPECT_EQ(converted->first->weight.scalar_type(), at::kFloat);
    });
  }
  torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kFloat));
}

TEST(Float64Setup, AProgramsOwnOptimizerStaysItsOwn) {
  SmallNet plain = double_net();
  torch::optim::SGD optimizer(plain->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  const PortedResult expected = run_plainly({.world = 2, .steps = 4}, plain, optimizer, 0.3);
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model = double_net();
    ordered_json config = small_config(0, 1);
    config.erase("optimizer");
    config["gradient_clipping"] = 0.3;
    const auto own =
        std::make_shared<torch::optim::SGD>(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
    const auto engine =
        initialize({.model = model.ptr(), .config = config, .optimizer = own, .communicator = borrowed(communicator)})
            .engine;
    expect_same(train_double(*engine, model, communicator, 4), expected, kSameDouble);
  });
}

ordered_json pipeline_config(int stage) {
  ordered_json config = small_config(stage, 2);
  config["pipeline"] = {{"stages", 2}};
  config["gradient_clipping"] = 0.3;
  return config;
}

pipeline::LayerSpec double_layer(int64_t in, int64_t out, at::ScalarType dtype = at::kDouble) {
  return pipeline::LayerSpec::made_by([=] {
    torch::nn::Linear layer(in, out);
    layer->to(dtype);
    fill(*layer);
    return layer.ptr();
  });
}

at::Tensor squares(const at::Tensor& output, const at::Tensor& target) { return (output - target).pow(2).mean(); }

TEST(Float64Setup, APipelineTrainsAsOneModule) {
  const auto input = [](int64_t micro) { return sample(micro, 0).to(torch::kDouble); };
  const auto target = [&](int64_t micro) { return input(micro).narrow(1, 0, 3).sin() * 3.0; };
  torch::nn::Linear first(6, 11);
  torch::nn::Linear last(11, 3);
  std::vector<at::Tensor> parameters;
  for (torch::nn::Linear layer : {first, last}) {
    layer->to(torch::kDouble);
    fill(*layer);
    for (const at::Tensor& parameter : layer->parameters()) parameters.push_back(parameter);
  }
  torch::optim::AdamW optimizer(parameters, torch::optim::AdamWOptions(0.02).weight_decay(0.1));
  std::vector<double> expected;
  for (int step = 0; step < 5; ++step) {
    optimizer.zero_grad();
    double loss = 0;
    for (int micro = 2 * step; micro < 2 * step + 2; ++micro) {
      const at::Tensor part = squares(last(first(input(micro)).tanh()), target(micro)) / 2;
      part.backward();
      loss += part.item<double>();
    }
    torch::nn::utils::clip_grad_norm_(parameters, 0.3);
    optimizer.step();
    expected.push_back(loss);
  }
  for (const int stage : {0, 1, 3}) {
    test::run_ranks(2, [&](comm::Communicator& communicator) {
      const std::vector<pipeline::LayerSpec> layers = {
          double_layer(6, 11), pipeline::LayerSpec::function([](const at::Tensor& x) { return x.tanh(); }),
          double_layer(11, 3)};
      const auto model = std::make_shared<pipeline::PipelineModule>(layers, pipeline::PipelineOptions{.loss = squares});
      const auto engine = start(model, pipeline_config(stage), communicator).engine;
      int64_t next = 0;
      for (int step = 0; step < 5; ++step) {
        next = 2 * step;  // also where this rank is asked for none
        const at::Tensor loss = engine->train_batch([&]() -> pipeline::MicroBatch {
          const int64_t micro = next++;
          return {{input(micro)}, {target(micro)}};
        });
        EXPECT_NEAR(loss.item<double>(), expected[static_cast<size_t>(step)], kSameDouble) << "stage " << stage;
      }
    });
  }
}

TEST(Float64Setup, StagesOfDifferentDtypesAreAnErrorOnAllRanks) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    const auto model = std::make_shared<pipeline::PipelineModule>(
        std::vector<pipeline::LayerSpec>{double_layer(6, 6, at::kFloat), double_layer(6, 6)},
        pipeline::PipelineOptions{.loss = squares});
    EXPECT_THAT([&] { start(model, pipeline_config(1), communicator); },
                ThrowsMessage<UsageError>(HasSubstr("layers of some stages are float64")));
  });
}

// Two copies of the model state on two ranks each, and nodes of two ranks that keep what was gathered.
TEST(Float64Setup, CopiesAndNodesTrainAsOneModule) {
  SmallNet plain = double_net();
  torch::optim::AdamW optimizer(plain->parameters(), torch::optim::AdamWOptions(0.02).weight_decay(0.1));
  const PortedResult expected = run_plainly({.world = 4, .steps = 4}, plain, optimizer, 0.3);
  for (const char* key : {"mics_shard_size", "zero_hpz_partition_size"}) {
    ordered_json config = small_config(3, 1);
    config["gradient_clipping"] = 0.3;
    config["zero_optimization"][key] = 2;
    test::run_ranks(4, [&](comm::Communicator& communicator) {
      SmallNet model = double_net();
      const auto engine = start(model.ptr(), config, communicator).engine;
      expect_same(train_double(*engine, model, communicator, 4), expected, kSameDouble);
    });
  }
}

TEST(Float64Setup, WhatWouldRoundItIsRefusedByName) {
  const auto with = [](const char* pointer, const ordered_json& value, int stage = 2) {
    ordered_json config = small_config(stage, 1);
    config[nlohmann::ordered_json::json_pointer(pointer)] = value;
    return config;
  };
  const std::vector<std::pair<ordered_json, std::string>> refused = {
      {with("/bf16/enabled", true), "bf16.enabled"},
      {with("/fp16/enabled", true), "fp16.enabled"},
      {with("/torch_autocast/enabled", true), "torch_autocast.enabled"},
      {with("/data_types/grad_accum_dtype", "fp32"), "data_types.grad_accum_dtype"},
      {with("/data_types/buffer_dtype", "bf16"), "data_types.buffer_dtype"},
      {with("/communication_data_type", "fp32"), "communication_data_type"},
      {with("/gradient_compression/method", "bf16"), "gradient_compression.method"},
      {with("/gradient_compression/method", "int8"), "gradient_compression.method"},
      {with("/zero_optimization/zero_quantized_gradients", true), "zero_quantized_gradients"},
      {with("/zero_optimization/zero_quantized_weights", true, 3), "zero_quantized_weights"},
      {with("/optimizer", {{"type", "OneBitAdam"}, {"params", {{"lr", 0.1}}}}), "optimizer.type: OneBitAdam"},
      {with("/optimizer", {{"type", "ZeroOneAdam"}, {"params", {{"lr", 0.1}}}}, 0), "optimizer.type: ZeroOneAdam"},
  };
  for (const auto& [config, key] : refused) {
    SCOPED_TRACE(config.dump());
    test::run_ranks(1, [&, &given = config, &name = key](comm::Communicator& communicator) {
      SmallNet model = double_net();
      EXPECT_THAT([&] { start(model.ptr(), given, communicator); },
                  ThrowsMessage<ConfigError>(AllOf(HasSubstr(name), HasSubstr("float64"), HasSubstr("first.weight"),
                                                   HasSubstr("model->to(torch::kFloat)"))));
    });
  }
}

TEST(Float64Setup, AModelThatIsFloat64InPartIsNamed) {
  test::run_ranks(1, [](comm::Communicator& communicator) {
    SmallNet model;
    model->last->to(torch::kDouble);
    EXPECT_THAT(
        [&] { start(model.ptr(), small_config(1, 1), communicator); },
        ThrowsMessage<UsageError>(AllOf(HasSubstr("2 of 6 parameters are float64 (first: last.weight)"),
                                        HasSubstr("first.weight: Float"), HasSubstr("model->to(torch::kDouble)"))));
  });
}

}  // namespace
}  // namespace ds::engine
