// The runner of one rank's stages without an engine: its messages, their memory, and whom it asks for micro-batches.
#include "pipeline/stage_runner.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <vector>

#include "core/check.h"
#include "tests/pipeline/layered_model.h"
#include "tests/support/gloo_threads.h"
#include "tests/support/thread_ranks.h"

namespace ds::pipeline {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr int kMicroBatches = 4;

// One rank of a pipeline with a stage on each.
struct StageRank {
  StageRank(comm::Communicator& world, ScheduleKind kind, const std::vector<LayerSpec>& layers = layers_of(6, false))
      : ranks(world),
        shape{.ranks = world.size(), .chunks = default_chunks(kind), .micro_batches = kMicroBatches},
        training(make_schedule(kind, shape)),
        inference(make_schedule(ScheduleKind::kInference, {.ranks = world.size(), .micro_batches = kMicroBatches})),
        module(layers, {.loss = cross_entropy}) {
    torch::set_num_threads(1);
    module.build({.rank = world.rank(), .rank_of = training.rank_of, .ranks = &world, .partition = "uniform"});
    runner = std::make_unique<StageRunner>(module, world, MessageOptions{});
  }

  StageCallbacks callbacks(const BatchSource& next) const {
    return {.next = next,
            .root = [](const at::Tensor& loss) { return loss / kMicroBatches; },
            .accumulate = [](const Action&, bool, const std::function<void()>& pass) { pass(); },
            .inputs_only = [](const std::function<void()>& pass) { pass(); }};
  }
  // Tokens [2, length] each.
  BatchSource source(int64_t length = 5) {
    return [this, length, m = int64_t{0}]() mutable {
      ++asked;
      MicroBatch batch = tokens_of(m++, 0);
      batch.inputs[0] = batch.inputs[0].narrow(1, 0, length).contiguous();
      batch.labels[0] = batch.labels[0].narrow(1, 0, length).contiguous();
      return batch;
    };
  }
  StageRunner::Result train(int64_t length = 5) { return runner->run(training, callbacks(source(length))); }
  StageRunner::Result evaluate(int64_t length = 5, bool with_loss = true) {
    return runner->run(inference, callbacks(source(length)), with_loss, /*keep_outputs=*/!with_loss);
  }

  comm::Communicator& ranks;
  ScheduleShape shape;
  Schedule training;
  Schedule inference;
  PipelineModule module;
  std::unique_ptr<StageRunner> runner;
  int asked = 0;
};

TEST(StageRunner, TrainsAfterPairsWereOpened) {
  Curve plain;
  {
    PipelineModule whole(layers_of(6, false), {.loss = cross_entropy});
    whole.build({});
    for (int m = 0; m < kMicroBatches; ++m) {
      const MicroBatch batch = tokens_of(m, 0);
      const at::Tensor loss = cross_entropy(whole.forward(batch.inputs[0]), batch.labels[0]);
      plain.losses.push_back(loss.item<double>());
      (loss / kMicroBatches).backward();
    }
    for (const auto& item : whole.named_parameters()) plain.parameters[item.key()] = item.value().grad().clone();
  }
  for (const ScheduleKind kind : {ScheduleKind::kGPipe, ScheduleKind::kInterleaved, ScheduleKind::kZbV}) {
    SCOPED_TRACE(name_of(kind));
    const auto body = [&](comm::Communicator& world) {
      StageRank rank(world, kind);
      const auto sent = [&rank] {
        int64_t bytes = 0;
        for (const auto& group : rank.runner->messages().groups()) bytes += group->counters().total_bytes_sent();
        return bytes;
      };
      const int64_t before = sent();
      rank.runner->messages().open(rank.module.placement());
      const int neighbours = kind == ScheduleKind::kInterleaved || world.rank() == 1 ? 2 : 1;
      EXPECT_EQ(sent() - before, 4 * neighbours);
      const StageRunner::Result result = rank.train();
      for (size_t m = 0; m < result.losses.size(); ++m) {
        EXPECT_NEAR(result.losses[m].item<double>(), plain.losses[m], 1e-6);
      }
      for (const auto& item : rank.module.named_parameters()) {
        EXPECT_TRUE(torch::allclose(item.value().grad(), plain.parameters.at(item.key()), 1e-4, 1e-7)) << item.key();
      }
    };
    test::run_ranks(3, body);
    ds::testing::on_gloo_threads(3, body);
  }
}

TEST(StageRunner, FirstAndLastStageAreAskedInEachBatch) {
  test::run_ranks(3, [](comm::Communicator& world) {
    StageRank rank(world, ScheduleKind::k1F1B);
    const int of_a_batch = world.rank() == 1 ? 0 : kMicroBatches;
    rank.evaluate(5, /*with_loss=*/true);
    EXPECT_EQ(rank.asked, of_a_batch);
    rank.evaluate(5, /*with_loss=*/false);
    EXPECT_EQ(rank.asked, 2 * of_a_batch);
    rank.train();
    EXPECT_EQ(rank.asked, 3 * of_a_batch);
  });
}

TEST(StageRunner, BuffersOfFormerShapesAreGivenBack) {
  test::run_ranks(2, [](comm::Communicator& world) {
    StageRank rank(world, ScheduleKind::kGPipe);
    StageMessages& messages = rank.runner->messages();
    rank.train();
    const int64_t training = messages.buffer_bytes();
    EXPECT_GT(training, 0);
    for (const int64_t length : {1, 2, 3, 4}) {
      rank.evaluate(length);
      EXPECT_EQ(messages.buffer_bytes(), training) << "after an evaluation of length " << length;
    }
    rank.train();
    EXPECT_EQ(messages.buffer_bytes(), training) << "the same buffers are used again";
    messages.reset_shapes();
    EXPECT_EQ(messages.buffer_bytes(), 0);
    rank.train(/*length=*/2);
    EXPECT_EQ(5 * messages.buffer_bytes(), 2 * training);
  });
}

// One that leaves itself out of a micro-batch, whose graph then cannot be split.
struct LeftOutImpl : MixerImpl {
  using MixerImpl::MixerImpl;
  at::Tensor forward(const at::Tensor& x) { return calls++ == 1 ? x : MixerImpl::forward(x); }
  int calls = 0;
};
TORCH_MODULE(LeftOut);

TEST(StageRunner, APassSaysItsMicroBatchWhereOneCannotBeSplit) {
  test::run_ranks(3, [](comm::Communicator& world) {
    std::vector<LayerSpec> layers = layers_of(1, false);
    layers[1] = LayerSpec::of<LeftOut>("h.0").named("h.0");
    StageRank rank(world, ScheduleKind::kZbH1, layers);
    const auto sum = [&rank] {
      double all = 0;
      for (const at::Tensor& weight : rank.module.parameters()) {
        if (weight.grad().defined()) all += weight.grad().abs().sum().item<double>();
      }
      return all;
    };
    std::vector<int> changed;
    std::vector<int> unchanged;
    StageCallbacks callbacks = rank.callbacks(rank.source());
    callbacks.accumulate = [&](const Action& action, bool, const std::function<void()>& pass) {
      const double before = sum();
      pass();
      (sum() == before ? unchanged : changed).push_back(action.micro_batch);
    };
    rank.runner->run(rank.training, callbacks);
    const bool leaves_out = world.rank() == 1;
    EXPECT_EQ(unchanged, leaves_out ? std::vector{1} : std::vector<int>{});
    EXPECT_EQ(changed, leaves_out ? (std::vector{0, 2, 3}) : (std::vector{0, 1, 2, 3}));
  });
}

TEST(StageRunner, APipelineOfSeveralRanksEndsWithAFailedBatch) {
  test::run_ranks(2, [](comm::Communicator& world) {
    StageRank rank(world, ScheduleKind::k1F1B);
    rank.train();
    if (world.rank() == 0) {
      EXPECT_THROW(rank.train(), CommError);  // the other one has left
    } else {
      const auto broken = rank.callbacks([]() -> MicroBatch { throw std::runtime_error("no more data"); });
      EXPECT_THAT([&] { rank.runner->run(rank.training, broken); },
                  ThrowsMessage<std::runtime_error>(HasSubstr("no more data")));
    }
    EXPECT_THAT([&] { rank.train(); }, ThrowsMessage<UsageError>(AllOf(
                                           HasSubstr("2 ranks cannot go on"), HasSubstr("last checkpoint"),
                                           HasSubstr(world.rank() == 1 ? "no more data" : "What the batch said"))));
    EXPECT_THAT([&] { rank.evaluate(); }, ThrowsMessage<UsageError>(HasSubstr("cannot go on")));
  });
}

}  // namespace
}  // namespace ds::pipeline
