// Models with BatchNorm in an engine: statistics over all ranks against one process with the joined batch, and buffers
// that follow rank 0.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "dsengine/activation_checkpoint.h"
#include "dsengine/engine.h"
#include "dsengine/errors.h"
#include "dsengine/sync_batch_norm.h"
#include "tests/model/small_run.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using test::run_ranks;
using ::testing::HasSubstr;

constexpr int64_t kSizes[] = {3, 5};  // samples of the ranks

struct ImageNetImpl : torch::nn::Module {
  ImageNetImpl() {
    body = register_module("body",
                           torch::nn::Sequential(torch::nn::Conv2d(torch::nn::Conv2dOptions(2, 4, 3).bias(false)),
                                                 torch::nn::BatchNorm2d(4), torch::nn::Tanh(), torch::nn::Flatten()));
    norm = register_module("norm", torch::nn::BatchNorm1d(torch::nn::BatchNormOptions(16).momentum(std::nullopt)));
    last = register_module("last", torch::nn::Linear(16, 3));
    fill(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return last(norm(body->forward(x))); }
  at::Tensor recomputed(const at::Tensor& x) {
    const auto part = [body = body, norm = norm](const at::Tensor& y) mutable { return norm(body->forward(y)); };
    return last(recompute::checkpoint(part, x));
  }
  torch::nn::Sequential body{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Linear last{nullptr};
};
TORCH_MODULE(ImageNet);

// [3 + 5, 2, 4, 4], of all ranks.
at::Tensor images(int64_t micro_batch) {
  const at::Tensor steps = torch::arange(8 * 32, torch::kDouble) * 1.3 + static_cast<double>(31 * micro_batch);
  return (torch::cos(steps) + torch::sin(steps * steps)).view({8, 2, 4, 4});
}

// In float64 rounding, which BatchNorm amplifies from step to step, is far below what is looked for.
ImageNet model_of(at::ScalarType type) {
  ImageNet model;
  model->to(type);
  fill(*model);
  return model;
}

at::Tensor part_of_rank(const at::Tensor& whole, int rank) {
  return whole.narrow(0, rank == 0 ? 0 : kSizes[0], kSizes[rank]);
}

// Of what a rank has.
at::Tensor loss_of(const at::Tensor& scores, const at::Tensor& x) {
  return (scores.to(x.scalar_type()) - x.select(1, 0).select(2, 0).narrow(1, 0, 3) * 2.0).pow(2).mean();
}

struct Trained {
  State parameters, buffers;
};

Trained with_torch(int accumulation, int steps) {
  ImageNet model = model_of(torch::kDouble);
  torch::optim::AdamW adamw(model->parameters(), torch::optim::AdamWOptions(0.02).weight_decay(0.1));
  for (int64_t step = 0; step < steps; ++step) {
    adamw.zero_grad();
    for (int64_t micro = step * accumulation; micro < (step + 1) * accumulation; ++micro) {
      const at::Tensor x = images(micro);
      const at::Tensor scores = model->forward(x);
      const at::Tensor loss = (loss_of(part_of_rank(scores, 0), part_of_rank(x, 0)) +
                               loss_of(part_of_rank(scores, 1), part_of_rank(x, 1))) /
                              2.0;
      (loss / accumulation).backward();
    }
    adamw.step();
  }
  return {parameters_of(*model), buffers_of(*model)};
}

// What a rank has of a micro-batch.
at::Tensor own_images(int64_t micro_batch, int rank, at::ScalarType type = torch::kFloat) {
  return part_of_rank(images(micro_batch), rank).to(type);
}

using Forward = std::function<at::Tensor(ImageNet&, const at::Tensor&)>;

at::Tensor plain_forward(ImageNet& model, const at::Tensor& x) { return model->forward(x); }

void train_rank(Engine& engine, ImageNet& model, int micro_batches, const Forward& forward) {
  for (int64_t micro = 0; micro < micro_batches; ++micro) {
    const bool exact = model->last->weight.scalar_type() == torch::kDouble;
    const at::Tensor x = own_images(micro, engine.global_rank(), exact ? torch::kDouble : torch::kFloat);
    engine.backward(loss_of(forward(model, x), x));
    engine.step();
  }
}

void expect_as_joined(const ordered_json& config, const Forward& forward, double tolerance, bool by_key = true) {
  const int accumulation = config["gradient_accumulation_steps"];
  constexpr int kSteps = 4;
  const Trained expected = with_torch(accumulation, kSteps);
  run_ranks(2, [&](comm::Communicator& ranks) {
    ImageNet model = model_of(torch::kDouble);
    if (!by_key) convert_sync_batchnorm(*model);
    const auto engine = start(model.ptr(), config, ranks).engine;
    train_rank(*engine, model, kSteps * accumulation, forward);
    EXPECT_LT(largest_difference(copy_of(engine->fp32_state_dict()), expected.parameters), tolerance) << config.dump();
    EXPECT_LT(largest_difference(buffers_of(*model), expected.buffers), tolerance) << config.dump();
    model->eval();
    const at::Tensor x = images(100);
    const at::Tensor scores = model->forward(x);  // on all ranks: at stage 3 parameters are gathered
    EXPECT_TRUE(scores.isfinite().all().item<bool>());
  });
}

ordered_json synchronized(int stage, int accumulation) {
  ordered_json config = small_config(stage, accumulation);
  config["sync_batchnorm"] = true;
  return config;
}

class SyncBatchNormStages : public ::testing::TestWithParam<int> {};

TEST_P(SyncBatchNormStages, TrainAsOneProcessWithTheJoinedBatch) {
  expect_as_joined(synchronized(GetParam(), 1), plain_forward, 1e-9);
  expect_as_joined(synchronized(GetParam(), 2), plain_forward, 1e-9);
}

TEST_P(SyncBatchNormStages, RecomputationCountsABatchOnce) {
  const auto forward = [](ImageNet& model, const at::Tensor& x) { return model->recomputed(x); };
  expect_as_joined(synchronized(GetParam(), 2), forward, 1e-9);
}

TEST_P(SyncBatchNormStages, ConvertedByTheProgramLayersGetTheEnginesRanks) {
  expect_as_joined(small_config(GetParam(), 1), plain_forward, 1e-9, /*by_key=*/false);
}

INSTANTIATE_TEST_SUITE_P(Engine, SyncBatchNormStages, ::testing::Values(0, 1, 2, 3));

// Slices are of one rank, the other one has a copy: statistics are those of both.
TEST(SyncBatchNormInEngine, JoinsCopiesOfAModelThatMicsMakes) {
  ordered_json config = synchronized(3, 2);
  config["zero_optimization"]["mics_shard_size"] = 1;
  expect_as_joined(config, plain_forward, 1e-9);
}

TEST(SyncBatchNormInEngine, KeepsFloat32StatisticsUnderAutocast) {
  ordered_json config = synchronized(2, 1);
  config["torch_autocast"] = {{"enabled", true}, {"dtype", "bfloat16"}};
  const Trained expected = with_torch(1, 4);
  run_ranks(2, [&](comm::Communicator& ranks) {
    ImageNet model;
    const auto engine = start(model.ptr(), config, ranks).engine;
    for (int64_t micro = 0; micro < 4; ++micro) {
      const at::Tensor x = own_images(micro, ranks.rank());
      engine->backward(loss_of(model->forward(x), x));
      engine->step();
    }
    EXPECT_LT(largest_difference(buffers_of(*model), expected.buffers), 5e-2);
    at::Tensor mean = model->norm->running_mean.clone();
    EXPECT_EQ(mean.scalar_type(), torch::kFloat);
    ranks.broadcast(mean, 0).wait();
    EXPECT_TRUE(mean.equal(model->norm->running_mean));
  });
}

TEST(SyncBatchNormInEngine, SendsTwoNumbersAChannelForwardAndBackward) {
  const auto bytes_of_step = [](const ordered_json& config) {
    int64_t sent = 0;
    run_ranks(2, [&](comm::Communicator& ranks) {
      ImageNet model;
      const auto engine = start(model.ptr(), config, ranks).engine;
      train_rank(*engine, model, 2, plain_forward);  // where buffers that differ are told
      const int64_t before = engine->comm_bytes_sent();
      train_rank(*engine, model, 1, plain_forward);
      if (ranks.rank() == 0) sent = engine->comm_bytes_sent() - before;
    });
    return sent;
  };
  int64_t expected = 0;
  for (const int64_t channels : {4, 16}) expected += (2 * channels + 1 + 2 * channels) * 8;
  EXPECT_EQ(bytes_of_step(synchronized(1, 1)) - bytes_of_step(small_config(1, 1)), expected);
}

TEST(SyncBatchNormInEngine, ModelsOfSixteenBits) {
  ordered_json config = synchronized(1, 1);
  config["bf16"] = {{"enabled", true}};
  const Trained expected = with_torch(1, 4);
  run_ranks(2, [&](comm::Communicator& ranks) {
    ImageNet model;
    const auto engine = start(model.ptr(), config, ranks).engine;
    const auto forward = [](ImageNet& of, const at::Tensor& x) { return of->forward(x.to(torch::kBFloat16)); };
    train_rank(*engine, model, 4, forward);
    EXPECT_LT(largest_difference(copy_of(engine->fp32_state_dict()), expected.parameters), 8e-2);
    EXPECT_LT(largest_difference(buffers_of(*model), expected.buffers), 8e-2);
  });
}

TEST(BroadcastBuffers, GivesAllRanksThoseOfRankZero) {
  ordered_json config = small_config(1, 2);
  config["broadcast_buffers"] = true;
  run_ranks(2, [&](comm::Communicator& ranks) {
    ImageNet model;
    const auto engine = start(model.ptr(), config, ranks).engine;
    const auto differs = [&] {
      at::Tensor mean = model->norm->running_mean.clone();
      ranks.broadcast(mean, 0).wait();
      at::Tensor any = torch::tensor(mean.equal(model->norm->running_mean) ? 0 : 1);
      ranks.all_reduce(any).wait();
      return any.item<int64_t>() > 0;
    };
    const at::Tensor x = own_images(0, ranks.rank());
    const at::Tensor loss = loss_of(model->forward(x), x);
    EXPECT_TRUE(differs());
    engine->backward(loss);
    EXPECT_FALSE(differs());
    EXPECT_EQ(model->norm->num_batches_tracked.item<int64_t>(), 1);
    engine->step();
    {
      const auto guard = engine->no_sync();
      engine->backward(loss_of(model->forward(x), x));
      EXPECT_TRUE(differs());
    }
  });
}

// What one run of two steps writes to the log.
std::string log_of(const ordered_json& config) {
  ::testing::internal::CaptureStderr();
  run_ranks(2, [&](comm::Communicator& ranks) {
    ImageNet model;
    const auto engine = start(model.ptr(), config, ranks).engine;
    train_rank(*engine, model, 2, plain_forward);
  });
  return ::testing::internal::GetCapturedStderr();
}

TEST(BroadcastBuffers, BuffersThatPartAreToldOnce) {
  const std::string text = log_of(small_config(1, 1));
  const size_t first = text.find("the model's buffers differ between data ranks");
  ASSERT_NE(first, std::string::npos) << text;
  EXPECT_EQ(text.find("the model's buffers differ between data ranks", first + 1), std::string::npos) << text;
  for (const char* key : {"sync_batchnorm", "broadcast_buffers"}) {
    ordered_json config = small_config(1, 1);
    config[key] = true;
    EXPECT_THAT(log_of(config), Not(HasSubstr("buffers differ"))) << key;
  }
}

// A queue and a hidden state beside a BatchNorm: what each rank keeps for itself.
struct StatefulImpl : torch::nn::Module {
  StatefulImpl() {
    layer = register_module("layer", torch::nn::Linear(4, 4));
    hidden = register_buffer("hidden", torch::zeros({4}));
    queue = register_buffer("queue", torch::zeros({2, 4}));
    fill(*this);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor out = torch::tanh(layer(x) + hidden);
    const torch::NoGradGuard no_grad;
    hidden.copy_(out.mean(0));
    return out;
  }
  torch::nn::Linear layer{nullptr};
  at::Tensor hidden, queue;
};
TORCH_MODULE(Stateful);

TEST(BuffersOfRanks, ThatPartAreNamedWithAdviceThatFits) {
  ::testing::internal::CaptureStderr();
  run_ranks(2, [&](comm::Communicator& ranks) {
    Stateful model;
    const auto engine = start(model.ptr(), small_config(1, 1), ranks).engine;
    for (int step = 0; step < 2; ++step) {
      engine->backward(model->forward(torch::full({3, 4}, 0.1 * (ranks.rank() + 1))).pow(2).mean());
      engine->step();
    }
  });
  const std::string text = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(text, HasSubstr("the model's buffers differ between data ranks: hidden (state of the program's"));
  EXPECT_THAT(text, Not(HasSubstr("queue,")));
  EXPECT_THAT(text, Not(HasSubstr("broadcast_buffers"))) << "which would destroy it";
  EXPECT_THAT(log_of(small_config(1, 1)),
              AllOf(HasSubstr("norm.running_mean, norm.running_var (running statistics of BatchNorm"),
                    HasSubstr("broadcast_buffers"), Not(HasSubstr("state of the program's"))));
}

TEST(BuffersOfRanks, ThatDifferBeforeInitializeAreToldBeforeRankZerosAreTaken) {
  const auto log_of_start = [](int stage, double by_rank) {
    ::testing::internal::CaptureStderr();
    run_ranks(2, [&](comm::Communicator& ranks) {
      Stateful model;
      model->queue.fill_(1.0 + by_rank * ranks.rank());
      start(model.ptr(), small_config(stage, 1), ranks);
      EXPECT_TRUE(model->queue.equal(torch::ones({2, 4})));
    });
    return ::testing::internal::GetCapturedStderr();
  };
  for (const int stage : {0, 3}) {
    EXPECT_THAT(log_of_start(stage, 0.5),
                HasSubstr("initialize: the model's buffers differ between data ranks: queue. "));
    EXPECT_THAT(log_of_start(stage, 0.0), Not(HasSubstr("buffers differ")));
  }
}

TEST(SyncBatchNormInEngine, RanksThatConvertOtherLayersAreNamed) {
  try {
    run_ranks(2, [&](comm::Communicator& ranks) {
      ImageNet model;
      if (ranks.rank() == 0) convert_sync_batchnorm(*model);
      start(model.ptr(), small_config(1, 1), ranks);
    });
    FAIL() << "no error";
  } catch (const test::RankFailure& failure) {
    EXPECT_THAT(failure.what(), HasSubstr("layers of convert_sync_batchnorm without a group"));
  }
}

}  // namespace
}  // namespace ds::engine
