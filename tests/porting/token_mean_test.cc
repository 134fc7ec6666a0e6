// backward_mean(): losses per token whose counts differ between ranks and micro-batches, beside plain LibTorch's mean
// over all tokens.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "dsengine/errors.h"
#include "dsengine/layer_spec.h"
#include "dsengine/pipeline.h"
#include "tests/porting/ported_run.h"
#include "tests/support/scratch_folder.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

// A number as second argument of backward() does not compile, nor does a tensor as a count.
template <class Number>
concept BackwardTakes = requires(Engine& engine, const at::Tensor& loss, Number number) {
  engine.backward(loss, number);
};
template <class Count>
concept MeanTakes = requires(Engine& engine, const at::Tensor& sum, Count count) {
  engine.backward_mean(sum, count);
};
static_assert(BackwardTakes<bool> && BackwardTakes<at::Tensor>);
static_assert(!BackwardTakes<int> && !BackwardTakes<int64_t> && !BackwardTakes<size_t> && !BackwardTakes<double>);
static_assert(MeanTakes<int> && MeanTakes<int64_t> && MeanTakes<double> && !MeanTakes<at::Tensor>);

constexpr int kTokenSteps = 4;

// How many of the 4 tokens of a micro-batch count: 0 to 4, other ones on each rank; none at all in some.
int64_t tokens_of(int64_t micro, int rank) { return (3 * micro + 2 * rank + 1) % 5; }

at::Tensor sum_over_tokens(SmallNet& model, int64_t micro, int rank) {
  const at::Tensor x = sample(micro, rank).to(model->first->weight.scalar_type());
  const at::Tensor losses = (model->forward(x) - x.narrow(1, 0, 3).sin() * 3.0).pow(2).mean(1);
  return losses.narrow(0, 0, tokens_of(micro, rank)).sum();
}

struct TokenRun {
  int world = 2;
  int accumulation = 2;
  double clip_norm = 0.0;
  torch::Dtype dtype = torch::kFloat;
};

// All tokens of a step in one graph.
PortedResult train_tokens_plainly(const TokenRun& run) {
  SmallNet model;
  model->to(run.dtype);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.02).weight_decay(0.1));
  PortedResult result;
  for (int step = 0; step < kTokenSteps; ++step) {
    at::Tensor sum = torch::zeros({}, run.dtype);
    int64_t count = 0;
    for (int64_t micro = step * run.accumulation; micro < (step + 1) * run.accumulation; ++micro) {
      for (int rank = 0; rank < run.world; ++rank) {
        sum = sum + sum_over_tokens(model, micro, rank);
        count += tokens_of(micro, rank);
      }
    }
    optimizer.zero_grad();
    const at::Tensor loss = sum / std::max<int64_t>(count, 1);
    loss.backward();
    if (run.clip_norm > 0) torch::nn::utils::clip_grad_norm_(model->parameters(), run.clip_norm);
    optimizer.step();
    result.losses.push_back(loss.item<double>());
  }
  result.weights = parameters_of(*model);
  return result;
}

using Backward = std::function<void(Engine&, SmallNet&, int64_t micro, int rank)>;

void mean_backward(Engine& engine, SmallNet& model, int64_t micro, int rank) {
  engine.backward_mean(sum_over_tokens(model, micro, rank), static_cast<double>(tokens_of(micro, rank)));
}

// The losses of the result are those of the monitor.
PortedResult train_tokens(const TokenRun& run, ordered_json config, const Backward& backward = mean_backward) {
  const test::ScratchFolder folder;
  config["csv_monitor"] = {{"enabled", true}, {"output_path", folder.path().string()}, {"job_name", "run"}};
  PortedResult result;
  test::run_ranks(run.world, [&](comm::Communicator& communicator) {
    SmallNet model;
    model->to(run.dtype);
    const auto engine = start(model.ptr(), config, communicator).engine;
    for (int64_t micro = 0; micro < int64_t{kTokenSteps} * run.accumulation; ++micro) {
      backward(*engine, model, micro, communicator.rank());
      engine->step();
    }
    const State weights = copy_of(engine->fp32_state_dict());
    if (communicator.rank() == 0) result.weights = weights;
  });
  std::ifstream csv(folder / "run/Train_Samples_train_loss.csv");
  std::string line;
  std::getline(csv, line);
  while (std::getline(csv, line)) result.losses.push_back(std::stod(line.substr(line.find(',') + 1)));
  return result;
}

class TokenMean : public ::testing::TestWithParam<int> {};

TEST_P(TokenMean, IsTheMeanOverAllRanksAndMicroBatches) {
  for (const int world : {1, 2, 3}) {
    for (const int accumulation : {1, 3}) {
      for (const double clip_norm : {0.0, 0.1}) {
        SCOPED_TRACE(cat(world, " ranks, accumulation ", accumulation, ", clipped to ", clip_norm));
        const TokenRun run{.world = world, .accumulation = accumulation, .clip_norm = clip_norm};
        ordered_json config = small_config(GetParam(), accumulation);
        config["gradient_clipping"] = clip_norm;
        expect_same(train_tokens(run, config), train_tokens_plainly(run));
      }
    }
  }
}

TEST_P(TokenMean, WorksInNoSyncAndInSeveralPassesOfAMicroBatch) {
  const TokenRun run{.accumulation = 2};
  const Backward backward = [](Engine& engine, SmallNet& model, int64_t micro, int rank) {
    const at::Tensor sum = sum_over_tokens(model, micro, rank);
    const auto count = static_cast<double>(tokens_of(micro, rank));
    engine.backward_mean(sum * 0.25, count, /*retain_graph=*/true);
    if (engine.is_gradient_accumulation_boundary()) {
      engine.backward_mean(sum * 0.75, 0);
    } else {
      const auto guard = engine.no_sync();
      engine.backward_mean(sum * 0.75, 0);
    }
  };
  expect_same(train_tokens(run, small_config(GetParam(), 2), backward), train_tokens_plainly(run));
}

// What is read between backward and step() is the mean, too.
TEST_P(TokenMean, ShowsMeansToReadersOfGradients) {
  SmallNet plain;
  const at::Tensor sum = sum_over_tokens(plain, 0, 0) + sum_over_tokens(plain, 0, 1);
  (sum / (tokens_of(0, 0) + tokens_of(0, 1))).backward();
  const double norm = torch::nn::utils::clip_grad_norm_(plain->parameters(), 1e9);
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(GetParam(), 1), communicator).engine;
    mean_backward(*engine, model, 0, communicator.rank());
    EXPECT_LT(
        (engine->safe_get_full_grad(model->first->weight) - plain->first->weight.grad()).abs().max().item<float>(),
        1e-6);
    const at::Tensor shown = model->first->weight.grad();
    EXPECT_THROW(shown.sum().item<float>(), std::exception) << "step() has not divided it yet";
    EXPECT_NEAR(engine->clip_grad_norm_(1e9), norm, 1e-5);
    engine->step();
    EXPECT_NEAR(engine->get_global_grad_norm().value(), norm, 1e-5);
  });
}

TEST_P(TokenMean, MixesWithNoOtherBackwardInAStep) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(GetParam(), 2), communicator).engine;
    const int rank = communicator.rank();
    const auto with_mean = [&] { mean_backward(*engine, model, 1, rank); };
    const auto with_loss = [&] { engine->backward(model->loss(sample(1, rank))); };
    with_mean();
    EXPECT_THAT(with_loss, ThrowsMessage<UsageError>(AllOf(HasSubstr("backward(): expected one kind of loss"),
                                                           HasSubstr("has had backward_mean(sum, count)"))));
    engine->step();
    with_mean();
    engine->step();
    EXPECT_TRUE(engine->was_step_applied());
    with_loss();
    EXPECT_THAT(with_mean, ThrowsMessage<UsageError>(AllOf(HasSubstr("backward_mean(): expected one kind of loss"),
                                                           HasSubstr("has had backward()"))));
    engine->zero_grad();
    with_mean();
  });
}

// One rank that divides by itself is named before anything is applied.
TEST_P(TokenMean, IsOnAllRanksOrNone) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(GetParam(), 1), communicator).engine;
    const int rank = communicator.rank();
    mean_backward(*engine, model, 0, rank);
    engine->step();
    if (rank == 0) {
      mean_backward(*engine, model, 1, rank);
    } else {
      engine->backward(model->loss(sample(1, rank)));
    }
    EXPECT_THAT([&] { engine->step(); }, ThrowsMessage<UsageError>(AllOf(HasSubstr("different settings"),
                                                                         HasSubstr("backward_mean() in the step"),
                                                                         HasSubstr("Nothing was applied"))));
    mean_backward(*engine, model, 1, rank);
    engine->step();
    EXPECT_EQ(engine->global_steps(), 2);
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, TokenMean, ::testing::Values(0, 1, 2, 3), stage_name);

// Homes, dtypes and optimizers that treat gradients otherwise.
TEST(TokenMeans, AreTheSameWhereverGradientsGo) {
  struct Kind {
    const char* name;
    int stage;
    ordered_json more;
    double tolerance = kSameResult;
  };
  const ordered_json on_host = {{"device", "cpu"}};
  const std::vector<Kind> kinds = {
      {"sums over ranks", 0, {{"gradient_allreduce_op", "sum"}}},
      {"no norm", 2, {{"gradient_clipping", 0.0}, {"zero_optimization", {{"stage", 2}, {"compute_grad_norm", false}}}}},
      {"prescaled", 1, {{"prescale_gradients", true}, {"gradient_predivide_factor", 2.0}}},
      {"on the host", 2, {{"zero_optimization", {{"stage", 2}, {"offload_optimizer", on_host}}}}},
      {"on the host, stage 3", 3, {{"zero_optimization", {{"stage", 3}, {"offload_optimizer", on_host}}}}},
      {"speculative",
       3,
       {{"zero_optimization", {{"stage", 3}, {"offload_optimizer", {{"device", "cpu"}, {"super_offload", true}}}}}}},
      {"bf16", 2, {{"bf16", {{"enabled", true}}}}, 3e-2},
      {"fp16", 2, {{"fp16", {{"enabled", true}, {"initial_scale_power", 12}}}}, 2e-2},
      {"fp16, one scale", 0, {{"fp16", {{"enabled", true}, {"loss_scale", 1024}}}}, 2e-2},
  };
  for (const Kind& kind : kinds) {
    SCOPED_TRACE(kind.name);
    TokenRun run{.accumulation = 2, .clip_norm = kind.stage == 3 ? 0.0 : 0.5};
    ordered_json config = small_config(kind.stage, run.accumulation);
    config["gradient_clipping"] = run.clip_norm;
    config.update(kind.more);
    run.clip_norm = config["gradient_clipping"];
    expect_same(train_tokens(run, config), train_tokens_plainly(run), kind.tolerance);
  }
}

TEST(TokenMeans, RefuseWhatHasNoMean) {
  test::run_ranks(1, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(0, 1), communicator).engine;
    const at::Tensor sum = sum_over_tokens(model, 0, 0);
    EXPECT_THAT([&] { engine->backward_mean(model->forward(sample(0, 0)), 4); },
                ThrowsMessage<UsageError>(HasSubstr("reduce it with loss.sum()")));
    EXPECT_THAT([&] { engine->backward_mean(sum, -1); }, ThrowsMessage<UsageError>(HasSubstr("0 or more, found -1")));
    EXPECT_THAT([&] { engine->backward_mean(sum, std::nan("")); }, ThrowsMessage<UsageError>(HasSubstr("found nan")));
    EXPECT_THAT([&] { engine->backward_mean(sum.detach(), 1); }, ThrowsMessage<UsageError>(HasSubstr("has no graph")));
    for (const at::Tensor& count : {torch::tensor(4), torch::tensor(4.0)}) {
      EXPECT_THAT([&] { engine->backward(sum, count); },
                  ThrowsMessage<UsageError>(HasSubstr("a mean over a count is backward_mean(sum, count)")));
    }
    EXPECT_NEAR(engine->backward_mean(sum, 1).item<double>(), sum.item<double>(), 1e-6) << "nothing of it has happened";
  });
}

// A step without any token changes nothing but by decay, and its loss is 0.
TEST(TokenMeans, OfNothingAreZero) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(2, 1), communicator).engine;
    const at::Tensor own = engine->backward_mean(model->forward(sample(0, 0)).narrow(0, 0, 0).sum(), 0);
    EXPECT_EQ(own.item<double>(), 0.0);
    engine->step();
    EXPECT_EQ(engine->get_global_grad_norm().value(), 0.0);
  });
}

TEST(TokenMeans, AreRefusedForPipelines) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    std::vector<pipeline::LayerSpec> layers;
    for (const char* const name : {"first", "last"}) {
      layers.push_back(pipeline::LayerSpec::of<torch::nn::Linear>(6, 6).named(name));
    }
    const auto module = std::make_shared<pipeline::PipelineModule>(
        std::move(layers),
        pipeline::PipelineOptions{.loss = [](const at::Tensor& out, const at::Tensor&) { return out.sum(); },
                                  .stages = 2});
    const auto engine = start(module, small_config(0, 2), communicator).engine;
    EXPECT_THAT([&] { engine->backward_mean(torch::ones({1}), 1); },
                ThrowsMessage<UsageError>(HasSubstr("backward_mean(): the model is a pipeline")));
  });
}

}  // namespace
}  // namespace ds::engine
