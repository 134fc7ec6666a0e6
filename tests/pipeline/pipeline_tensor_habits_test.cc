// What programs do with layers, sources and configs on a pipeline with a tensor axis, where it does not follow one
// process by itself: it trains alike, or says with numbers what is wrong.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/pipeline/split_job.h"
#include "tests/support/thrown.h"

namespace ds::pipeline {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

// Returns the options that a program passes to initialize() for a job.
engine::InitializeOptions options_of(const SplitJob& job, const std::vector<LayerSpec>& layers,
                                     comm::Communicator& world) {
  const auto loss = [](const at::Tensor& output, const at::Tensor& label) { return (output - label).square().mean(); };
  engine::InitializeOptions options;
  options.model = std::make_shared<PipelineModule>(layers, PipelineOptions{.loss = loss});
  options.config = job.config();
  options.split = {{".*wide", parallel::Style::kColumn}, {".*narrow", parallel::Style::kRow}};
  options.communicator = test::borrowed(world);
  return options;
}

// A column and a row layer, one for each stage.
std::vector<LayerSpec> two_halves() {
  return {LayerSpec::of<torch::nn::Linear>(kWidth, 2 * kWidth).named("wide"),
          LayerSpec::of<torch::nn::Linear>(2 * kWidth, kWidth).named("narrow")};
}

at::Tensor numbers() { return torch::arange(2 * kWidth).cos().view({2, kWidth}); }

constexpr int64_t kLargeRows = int64_t{1} << 16;  // of kWidth floats: 4 MiB, which no ring of messages holds

// Counts its forwards in two tensors that it keeps and sends along, one of them split over the axis.
struct KeepingImpl : torch::nn::Module {
  explicit KeepingImpl(std::atomic<int>* of_all_ranks) : forwards(of_all_ranks) {
    wide = register_module("wide", torch::nn::Linear(kWidth, 2 * kWidth));
    fill_by_name(*this, "keeping");
  }
  Tensors forward(const at::Tensor& x) {
    {
      const torch::NoGradGuard no_grad;
      if (!parts.defined()) parts = at::linear(torch::zeros({kLargeRows, kWidth}), wide->weight);
      parts.add_(1);
      whole.add_(1);
    }
    ++*forwards;
    return {torch::tanh(wide(x)), whole, parts};
  }
  std::atomic<int>* forwards;
  at::Tensor parts, whole = torch::zeros({2 * kLargeRows, kWidth});
  torch::nn::Linear wide{nullptr};
};
TORCH_MODULE(Keeping);

// Notes elements of both ends of what it was given.
struct ReadingImpl : torch::nn::Module {
  explicit ReadingImpl(std::vector<double>* of_rank) : notes(of_rank) {
    narrow = register_module("narrow", torch::nn::Linear(2 * kWidth, kWidth));
    fill_by_name(*this, "reading");
  }
  at::Tensor forward(const Tensors& inputs) {
    EXPECT_TRUE(parallel::is_split(inputs.at(2)));
    const at::Tensor last = inputs[2][-1];
    for (const at::Tensor& one : {inputs[1][0][0], inputs[1][-1][-1], last[0], last[-1]}) {
      notes->push_back(one.item<double>());
    }
    return narrow(inputs[0]);
  }
  std::vector<double>* notes;
  torch::nn::Linear narrow{nullptr};
};
TORCH_MODULE(Reading);

TEST(PipelineTensorHabits, AStageMayChangeWhatItSendsInItsNextForward) {
  for (const bool in_pieces : {false, true}) {
    SCOPED_TRACE(testing::Message() << "pipe_partitioned " << in_pieces);
    SplitJob job{.schedule = "gpipe"};
    job.more["pipeline"] = {{"pipe_partitioned", in_pieces}};
    std::atomic<int> forwards{0};
    std::vector<std::vector<double>> read(static_cast<size_t>(job.world()));
    test::run_ranks(job.world(), [&](comm::Communicator& world) {
      torch::set_num_threads(1);
      std::vector<double>& own = read[static_cast<size_t>(world.rank())];
      const std::vector<LayerSpec> layers = {LayerSpec::of<Keeping>(&forwards).named("up"),
                                             LayerSpec::of<Reading>(&own).named("down")};
      const auto engine = engine::initialize(options_of(job, layers, world)).engine;
      // Both ranks of the first stage have computed on before anybody takes their first messages.
      const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(20);
      while (!engine->is_first_stage() && forwards < 2 * job.tensor && std::chrono::steady_clock::now() < limit) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      EXPECT_TRUE(engine->is_first_stage() || forwards >= 2 * job.tensor);
      engine->train_batch([] { return MicroBatch{.inputs = {numbers()}, .labels = {numbers()}}; });
    });
    for (const size_t rank : {2, 3}) {
      EXPECT_THAT(read[rank], ElementsAre(1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4)) << "rank " << rank;
    }
  }
}

TEST(PipelineTensorHabits, OtherNumbersOnARankAreToldAndOtherLastBitsAreNot) {
  const SplitJob job;
  test::run_ranks(job.world(), [&](comm::Communicator& world) {
    torch::set_num_threads(1);
    const auto engine = engine::initialize(options_of(job, two_halves(), world)).engine;
    // Ranks from `first` to `last` take other numbers.
    const auto step = [&](int first, int last, const at::Tensor& inputs, const at::Tensor& labels) {
      const bool other = first <= world.rank() && world.rank() <= last;
      engine->train_batch(
          [&] { return MicroBatch{.inputs = {other ? inputs : numbers()}, .labels = {other ? labels : numbers()}}; });
    };
    const auto told = [&](int first, int last, const at::Tensor& inputs, const at::Tensor& labels) {
      return test::thrown_by<UsageError>([&] { step(first, last, inputs, labels); });
    };
    step(1, 3, numbers() * (1 + 1e-6), numbers() * (1 - 1e-6));
    const at::Tensor flipped = numbers().flip({1});
    EXPECT_THAT(told(1, 1, flipped, numbers()),
                HasSubstr("ranks 0 and 1 of one tensor axis took different inputs for micro-batch 0"));
    EXPECT_THAT(told(3, 3, numbers(), flipped),
                HasSubstr("ranks 2 and 3 of one tensor axis took different labels for micro-batch 0"));
    EXPECT_THAT(told(2, 3, numbers(), flipped),
                HasSubstr("ranks 0 and 2, the first and the last stage of a pipeline took different labels"));
    step(0, 3, flipped, numbers());
    EXPECT_EQ(engine->global_steps(), 2);
  });
}

// The targets belong to the inputs of the same draw.
struct Drawn {
  struct Example {
    at::Tensor data, target;
  };
  Example get(size_t /*index*/) const {
    const at::Tensor x = torch::randn({kWidth});
    return {x, 2 * x};
  }
  size_t size() const { return 64; }
};

TEST(PipelineTensorHabits, ADatasetThatDrawsRandomNumbersIsTold) {
  for (const int tensor : {1, 2}) {
    const SplitJob job{.tensor = tensor};
    test::run_ranks(job.world(), [&](comm::Communicator& world) {
      torch::set_num_threads(1);
      engine::InitializeOptions options = options_of(job, two_halves(), world);
      options.training_data = Drawn();
      const auto engine = engine::initialize(options).engine;
      EXPECT_THAT(test::thrown_by<UsageError>([&] { engine->train_batch(); }),
                  AllOf(HasSubstr(tensor == 1 ? "ranks 0 and 1, the first and the last stage of a pipeline took "
                                                "different labels for micro-batch 0"
                                              : "of one tensor axis took different inputs for micro-batch 0"),
                        HasSubstr("seeded alike")));
    });
  }
}

TEST(PipelineTensorHabits, AGroupHasToMatchOnSomeStage) {
  const SplitJob job;
  test::run_ranks(job.world(), [&](comm::Communicator& world) {
    const auto refusal = [&](const std::string& name) {
      engine::InitializeOptions options = options_of(job, two_halves(), world);
      engine::ParameterGroup group;
      group.parameters = {name};
      group.lr = 1e-4;
      options.parameter_groups = {group};
      return test::thrown_by<UsageError>([&] { engine::initialize(options); }, "none");
    };
    EXPECT_THAT(refusal("blocks.*"), HasSubstr("\"blocks.*\" matches no trainable parameter of any stage"));
    EXPECT_EQ(refusal("narrow.*"), "none");
  });
}

TEST(PipelineTensorHabits, AxesHaveToMultiplyToTheRanks) {
  const auto expect_refused = [](int ranks, const std::string& key, const std::string& found) {
    test::run_ranks(ranks, [&](comm::Communicator& world) {
      EXPECT_THAT(
          test::thrown_by<ConfigError>([&] { SplitJob().start(world); }),
          AllOf(HasSubstr(key), HasSubstr(found), HasSubstr("start a multiple of 4 ranks (pipeline.stages x tensor")))
          << "rank " << world.rank();
    });
  };
  expect_refused(6, "tensor_parallel.autotp_size", "a divisor of the 3 ranks of a stage, found 2");
  expect_refused(5, "pipeline.stages", "a divisor of the 5 ranks, found 2");
}

// Begins a job without training; returns what it writes to the log.
std::string told_at_the_start(SplitJob job, const std::vector<LayerSpec>& layers, bool by_names = false) {
  job.more["log_level"] = "warning";
  testing::internal::CaptureStderr();
  test::run_ranks(job.world(), [&](comm::Communicator& world) {
    engine::InitializeOptions options = options_of(job, layers, world);
    if (by_names) options.split.clear();
    engine::initialize(options);
  });
  return testing::internal::GetCapturedStderr();
}

TEST(PipelineTensorHabits, AStageOfWhichNothingIsSplitIsToldWithItsSizes) {
  std::vector<LayerSpec> layers = two_halves();
  const std::string quiet = told_at_the_start({}, layers);
  EXPECT_THAT(quiet, Not(HasSubstr("nothing is split")));
  for (const char* name : {"tail.0", "tail.1"}) {
    layers.push_back(LayerSpec::of<torch::nn::Linear>(kWidth, kWidth).named(name));
  }
  const std::string log = told_at_the_start({.data = 2}, layers);
  EXPECT_THAT(log, AllOf(HasSubstr("pipeline rank 1 of 2 nothing is split: 4 parameters, 544 elements, as tail.0."),
                         HasSubstr("no rule matches its name"), HasSubstr("Each of the 2 ranks of its axis"),
                         HasSubstr("pipeline.partition"), Not(HasSubstr("pipeline rank 0"))));
  EXPECT_EQ(log.find("nothing is split"), log.rfind("nothing is split")) << "once: " << log;
  // Ranks that have parts of the sequence share the work.
  EXPECT_THAT(told_at_the_start({.sequence = true}, layers), Not(HasSubstr("nothing is split")));
}

TEST(PipelineTensorHabits, AModelOfWhichNothingIsSplitIsAnErrorOfAllRanks) {
  const SplitJob job;
  test::run_ranks(job.world(), [&](comm::Communicator& world) {
    std::vector<LayerSpec> layers;
    for (const char* name : {"gate", "scores"}) {
      layers.push_back(LayerSpec::of<torch::nn::Linear>(kWidth, kWidth).named(name));
    }
    engine::InitializeOptions options = options_of(job, layers, world);
    options.split.clear();
    EXPECT_THAT(test::thrown_by<ConfigError>([&] { engine::initialize(options); }),
                HasSubstr("each of the 2 ranks would compute all of it"))
        << "rank " << world.rank();
  });
}

// The first rank tells of the heads of another stage.
TEST(PipelineTensorHabits, HeadsThatAreCutInTheMiddleAreToldWithTheRanks) {
  const auto layers = [](int64_t heads_width) {
    return std::vector<LayerSpec>{LayerSpec::of<torch::nn::Linear>(kWidth, 2 * kWidth).named("l.0.fc1"),
                                  LayerSpec::of<torch::nn::Linear>(2 * kWidth, kWidth).named("l.0.fc2"),
                                  LayerSpec::of<torch::nn::Linear>(kWidth, heads_width).named("l.1.q_proj"),
                                  LayerSpec::of<torch::nn::Linear>(heads_width, kWidth).named("l.1.o_proj")};
  };
  EXPECT_THAT(told_at_the_start({}, layers(15), /*by_names=*/true),
              AllOf(HasSubstr("2 ranks do not divide l.1.q_proj.weight"), HasSubstr("tp_grain_size")));
  EXPECT_THAT(told_at_the_start({}, layers(16), /*by_names=*/true), Not(HasSubstr("do not divide")));
}

}  // namespace
}  // namespace ds::pipeline
