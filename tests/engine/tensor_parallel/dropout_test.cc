// Dropout draws what plain torch draws in one process: ranks of a tensor axis go on from one seed. Ranks are processes,
// since threads share a generator.
#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/functional/dropout.h>
#include <torch/nn/module.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/types.h>

#include <cmath>
#include <vector>

#include "dsengine/activation_checkpoint.h"
#include "dsengine/engine.h"
#include "dsengine/errors.h"
#include "dsengine/init_distributed.h"
#include "tests/comm/meeting/launcher_environment.h"
#include "tests/support/process_ranks.h"

namespace ds::engine {
namespace {

constexpr int64_t kWide = 24;
constexpr int kSteps = 50;
constexpr int64_t kSeed = 77;

struct Net : torch::nn::Module {
  Net() {
    const auto values = [](std::vector<int64_t> sizes, double shift) {
      return at::arange(c10::multiply_integers(sizes), at::kFloat).add(shift).mul(0.7).sin().mul(0.3).view(sizes);
    };
    first = register_parameter("first", values({2 * kWide, kWide}, 1));
    second = register_parameter("second", values({kWide, 2 * kWide}, 2));
  }
  at::Tensor loss(const at::Tensor& x) {
    // Of parts, of what is whole, and of whole inputs.
    const at::Tensor inner = at::dropout(at::tanh(at::linear(at::dropout(x, 0.1, true), first)), 0.3, true);
    const at::Tensor out = at::dropout(at::linear(inner, second), 0.2, true);
    return (out - x.sin()).pow(2).mean();
  }
  at::Tensor first, second;
};

at::Tensor batch(int64_t step, int data_rank) {
  return at::arange(4 * kWide, at::kFloat).add(static_cast<double>(11 * step + 5 * data_rank)).cos().view({4, kWide});
}

struct Curve {
  std::vector<double> losses, norms;
};

// One process with a stream of random numbers for each data-parallel rank.
Curve plain(int data) {
  Net net;
  torch::optim::AdamW optimizer(net.parameters(), torch::optim::AdamWOptions(1e-3).weight_decay(0.01));
  at::Generator generator = at::globalContext().defaultGenerator(at::kCPU);
  std::vector<at::Tensor> streams;
  for (int rank = 0; rank < data; ++rank) {
    torch::manual_seed(static_cast<uint64_t>(kSeed + rank));
    streams.push_back(generator.get_state());
  }
  Curve curve;
  for (int64_t step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    double sum = 0;
    for (int rank = 0; rank < data; ++rank) {
      auto& stream = streams[static_cast<size_t>(rank)];
      generator.set_state(stream);
      const at::Tensor loss = net.loss(batch(step, rank)) / static_cast<double>(data);
      stream = generator.get_state();
      loss.backward();
      sum += loss.item<double>();
    }
    curve.losses.push_back(sum);
    curve.norms.push_back(torch::nn::utils::clip_grad_norm_(net.parameters(), 0.5));
    optimizer.step();
  }
  return curve;
}

struct DropoutCell {
  int tensor = 2;
  int stage = 0;
  bool regions = false;    // forward is computed again in backward, its input is cut over the axis
  bool sequences = false;  // Megatron's sequence parallelism: masks of parts of the rows
};

void expect_masks_of_one_process(const ds::testing::ProcessRank& ranks, const DropoutCell& cell) {
  at::set_num_threads(1);
  const comm::Rendezvous meeting = ranks.meet();
  test::set_launcher_environment(meeting);
  const nlohmann::json config = {
      {"train_micro_batch_size_per_gpu", 4},
      {"gradient_clipping", 0.5},
      {"seed", kSeed},
      {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 1e-3}, {"weight_decay", 0.01}}}}},
      {"zero_optimization", {{"stage", cell.stage}, {"stage3_param_persistence_threshold", 0}}},
      {"tensor_parallel", {{"autotp_size", cell.tensor}, {"sequence_parallel", cell.sequences}}},
      {"activation_checkpointing", {{"partition_activations", cell.regions}}},
      {"log_level", "warning"}};
  const auto net = std::make_shared<Net>();
  using enum parallel::Style;
  const auto engine =
      initialize({.model = net, .config = config, .split = {{"first", kColumn}, {"second", kRow}}}).engine;
  Curve found;
  for (int64_t step = 0; step < kSteps; ++step) {
    const at::Tensor x = batch(step, engine->communicator().rank());
    const auto forward = [net](const at::Tensor& input) { return net->loss(input); };
    const at::Tensor loss = cell.regions ? recompute::checkpoint(forward, x) : forward(x);
    at::Tensor mean = engine->backward(loss).to(at::kDouble).view({1}) / engine->dp_world_size();
    engine->step();
    if (engine->dp_world_size() > 1) engine->communicator().all_reduce(mean).wait();
    found.losses.push_back(mean.item<double>());
    found.norms.push_back(*engine->get_global_grad_norm());
  }
  const Curve expected = plain(engine->dp_world_size());
  for (size_t i = 0; i < kSteps; ++i) {
    EXPECT_NEAR(found.losses[i], expected.losses[i], 5e-6) << "step " << i;
    EXPECT_NEAR(found.norms[i], expected.norms[i], 2e-5 * expected.norms[i]) << "step " << i;
  }
  engine->world().barrier();
}

DS_PROCESS_TEST(TensorParallelDropout, OverTwoRanks, 2) { expect_masks_of_one_process(ranks, {}); }
DS_PROCESS_TEST(TensorParallelDropout, OverTwoRanksTwice, 4) { expect_masks_of_one_process(ranks, {.stage = 3}); }
DS_PROCESS_TEST(TensorParallelDropout, InRegions, 2) {
  expect_masks_of_one_process(ranks, {.stage = 1, .regions = true});
}
DS_PROCESS_TEST(TensorParallelDropout, InRegionsOfPartsOfSequences, 4) {
  expect_masks_of_one_process(ranks, {.tensor = 4, .stage = 3, .regions = true, .sequences = true});
}

// Ranks of an axis that draw other numbers: their masks are not one model's. Where a rank draws alone, or the ranks are
// seeded otherwise and nobody draws, nothing is wrong.
DS_PROCESS_TEST(TensorParallelDropout, FromOtherRandomNumbersIsFoundByCheckReplicas, 2) {
  at::set_num_threads(1);
  test::set_launcher_environment(ranks.meet());
  const nlohmann::json config = {{"train_micro_batch_size_per_gpu", 4},
                                 {"check_replicas", 1},
                                 {"optimizer", {{"type", "SGD"}, {"params", {{"lr", 0.0}}}}},
                                 {"tensor_parallel", {{"autotp_size", 2}}},
                                 {"log_level", "warning"}};
  const auto net = std::make_shared<Net>();
  using enum parallel::Style;
  const auto engine =
      initialize({.model = net, .config = config, .split = {{"first", kColumn}, {"second", kRow}}}).engine;
  const auto step = [&](bool drops) {
    const at::Tensor x = batch(0, 0);
    engine->backward(drops ? net->loss(x) : at::linear(at::linear(x, net->first), net->second).pow(2).mean());
    engine->step();
  };
  step(true);
  step(true);
  if (ranks.rank() == 1) at::rand({3});
  EXPECT_NO_THROW(step(false));
  torch::manual_seed(static_cast<uint64_t>(ranks.rank()));
  EXPECT_NO_THROW(step(false));
  at::rand({3});  // which no loss shows
  EXPECT_THAT([&] { step(false); },
              ::testing::ThrowsMessage<UsageError>(::testing::AllOf(
                  ::testing::HasSubstr("after step 5, of the ranks of one tensor axis, the default generator of the "
                                       "CPU is not the same on ranks 0 and 1"),
                  ::testing::HasSubstr("torch::manual_seed(seed + engine->communicator().rank())"))));
  engine->world().barrier();
}

// The two halves of Net as stages of a pipeline, each with its own stream of random numbers.
struct FirstHalf : torch::nn::Module {
  FirstHalf() { first = register_parameter("first", Net().first.detach().clone()); }
  at::Tensor forward(const at::Tensor& x) {
    return at::dropout(at::tanh(at::linear(at::dropout(x, 0.1, true), first)), 0.3, true);
  }
  at::Tensor first;
};

struct SecondHalf : torch::nn::Module {
  SecondHalf() { second = register_parameter("second", Net().second.detach().clone()); }
  at::Tensor forward(const at::Tensor& inner) { return at::dropout(at::linear(inner, second), 0.2, true); }
  at::Tensor second;
};

at::Tensor loss_of(const at::Tensor& out, const at::Tensor& x) { return (out - x.sin()).pow(2).mean(); }

constexpr int kBatchesOfAStep = 2;

// One process with a stream of random numbers for each stage, which draws for one micro-batch after another.
Curve plain_stages() {
  FirstHalf first;
  SecondHalf second;
  std::vector<at::Tensor> parameters = first.parameters();
  parameters.push_back(second.second);
  torch::optim::AdamW optimizer(parameters, torch::optim::AdamWOptions(1e-3).weight_decay(0.01));
  at::Generator generator = at::globalContext().defaultGenerator(at::kCPU);
  std::vector<at::Tensor> streams;
  for (const uint64_t stage : {0, 1}) {
    torch::manual_seed(static_cast<uint64_t>(kSeed) + stage);
    streams.push_back(generator.get_state());
  }
  const auto drawing = [&](size_t stage, const auto& forward) {
    generator.set_state(streams[stage]);
    const at::Tensor result = forward();
    streams[stage] = generator.get_state();
    return result;
  };
  Curve curve;
  for (int64_t step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    double sum = 0;
    for (int64_t micro = step * kBatchesOfAStep; micro < (step + 1) * kBatchesOfAStep; ++micro) {
      const at::Tensor x = batch(micro, 0);
      const at::Tensor inner = drawing(0, [&] { return first.forward(x); });
      const at::Tensor loss = loss_of(drawing(1, [&] { return second.forward(inner); }), x) / kBatchesOfAStep;
      loss.backward();
      sum += loss.item<double>();
    }
    curve.losses.push_back(sum);
    curve.norms.push_back(torch::nn::utils::clip_grad_norm_(parameters, 0.5));
    optimizer.step();
  }
  return curve;
}

// Between the stages the activation is split over the axis. What is computed again in backward, when the stage has
// drawn for other micro-batches, has the masks of its forward.
DS_PROCESS_TEST(TensorParallelDropout, InStagesOfAPipeline, 4) {
  at::set_num_threads(1);
  test::set_launcher_environment(ranks.meet());
  const Distributed job = init_distributed();
  const Curve expected = plain_stages();
  for (const int interval : {0, 1}) {
    SCOPED_TRACE(::testing::Message() << "activation_checkpoint_interval " << interval);
    const nlohmann::json config = {
        {"train_micro_batch_size_per_gpu", 4},
        {"gradient_accumulation_steps", kBatchesOfAStep},
        {"gradient_clipping", 0.5},
        {"seed", kSeed},
        {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 1e-3}, {"weight_decay", 0.01}}}}},
        {"tensor_parallel", {{"autotp_size", 2}}},
        {"pipeline", {{"stages", 2}, {"partition", "uniform"}, {"activation_checkpoint_interval", interval}}},
        {"log_level", "warning"}};
    const auto model = std::make_shared<pipeline::PipelineModule>(
        std::vector<pipeline::LayerSpec>{pipeline::LayerSpec::of<FirstHalf>().named("a"),
                                         pipeline::LayerSpec::of<SecondHalf>().named("b")},
        pipeline::PipelineOptions{.loss = loss_of});
    using enum parallel::Style;
    const auto engine = initialize({.model = model,
                                    .config = config,
                                    .split = {{"a\\.first", kColumn}, {"b\\.second", kRow}},
                                    .distributed = job})
                            .engine;
    int64_t next = 0;
    const auto source = [&] {
      const at::Tensor x = batch(next++, 0);
      return pipeline::MicroBatch{.inputs = {x}, .labels = {x}};
    };
    for (size_t step = 0; step < kSteps; ++step) {
      EXPECT_NEAR(engine->train_batch(source).item<double>(), expected.losses[step], 5e-6) << "step " << step;
      EXPECT_NEAR(*engine->get_global_grad_norm(), expected.norms[step], 2e-5 * expected.norms[step])
          << "step " << step;
    }
    engine->world().barrier();
  }
}

}  // namespace
}  // namespace ds::engine
