// data_efficiency.data_sampling in the engine: its loader, programs that load data themselves, pipelines, checkpoints.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <mutex>
#include <set>
#include <tuple>

#include "core/check.h"
#include "dsengine/efficiency.h"
#include "tests/model/small_run.h"
#include "tests/pipeline/layered_model.h"
#include "tests/support/metric_writer.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using test::run_ranks;
using testing::HasSubstr;

constexpr int64_t kSamples = 48;
constexpr int kRunSteps = 9;

// Difficulty of sample i: 1 to 8, six samples each.
int64_t difficulty_of(int64_t sample) { return sample * 5 % 8 + 1; }

// Sample i is a row of SmallNet's input, made of i.
struct Rows {
  torch::data::Example<> get(size_t index) {
    const at::Tensor steps = torch::arange(6, torch::kDouble) * 1.3 + static_cast<double>(index);
    return {torch::cos(steps).to(torch::kFloat), torch::tensor(static_cast<int64_t>(index))};
  }
  std::optional<size_t> size() const { return kSamples; }
};

// The difficulty grows by one every step.
class DataSampling : public testing::Test {
 protected:
  DataSampling() {
    std::vector<int64_t> values;
    for (int64_t i = 0; i < kSamples; ++i) values.push_back(difficulty_of(i));
    paths_ = test::write_metric(folder_.path().string(), "hard", values);
  }
  ordered_json metric(const std::string& clustering) const {
    ordered_json metric = {{"index_to_sample_path", paths_.index_to_sample},
                           {"index_to_metric_path", paths_.index_to_metric},
                           {"difficulty_type", "value"},
                           {"clustering_type", clustering},
                           {"min_difficulty", 1},
                           {"max_difficulty", 8},
                           {"schedule_type", "fixed_linear"}};
    metric["schedule_config"] = {{"total_curriculum_step", 7}, {"difficulty_step", 1}};
    return metric;
  }
  // 16 samples a step.
  ordered_json config(int world, int accumulation, int stage = 1,
                      const std::string& clustering = "schedule_based") const {
    ordered_json config = small_config(stage, accumulation);
    config["train_micro_batch_size_per_gpu"] = 16 / world / accumulation;
    config["log_level"] = "error";
    ordered_json& data = config["data_efficiency"];
    data = {{"enabled", true}, {"seed", 5}};
    data["data_sampling"] = {{"enabled", true}, {"num_epochs", 50}};
    data["data_sampling"]["curriculum_learning"] = {{"enabled", true}};
    data["data_sampling"]["curriculum_learning"]["curriculum_metrics"] = {{"hard", metric(clustering)}};
    return config;
  }

  test::ScratchFolder folder_;
  test::MetricPaths paths_;
};

struct Trained {
  std::vector<std::multiset<int64_t>> samples;  // of each step, of all ranks
  State weights;
};

// Trains by the engine's loader from step `first` on.
void train_by_loader(const Initialized& parts, SmallNet& net, int first, Trained& run, std::mutex& mutex) {
  const int64_t accumulation = parts.engine->gradient_accumulation_steps();
  auto next = parts.loader->begin();
  for (int64_t micro = first * accumulation; micro < kRunSteps * accumulation; ++micro) {
    if (micro > first * accumulation) ++next;
    {
      const std::lock_guard lock(mutex);
      auto& step = run.samples.at(static_cast<size_t>(micro / accumulation));
      for (const int64_t index : parts.loader->indices()) step.insert(index);
    }
    parts.engine->backward(net->loss(next->data));
    parts.engine->step();
  }
  const State weights = copy_of(parts.engine->fp32_state_dict());
  if (parts.engine->global_rank() == 0) run.weights = weights;
}

Initialized start_with_rows(SmallNet& net, const ordered_json& config, comm::Communicator& communicator) {
  return initialize(
      {.model = net.ptr(), .config = config, .training_data = Rows(), .communicator = borrowed(communicator)});
}

TEST_F(DataSampling, StepsHaveSamplesOfTheirDifficultyAndAreTheSameOnAnyRanks) {
  const auto run_on = [&](int world, int accumulation, int stage) {
    Trained run{.samples = std::vector<std::multiset<int64_t>>(kRunSteps), .weights = {}};
    std::mutex mutex;
    run_ranks(world, [&](comm::Communicator& communicator) {
      SmallNet net;
      train_by_loader(start_with_rows(net, config(world, accumulation, stage), communicator), net, 0, run, mutex);
    });
    return run;
  };
  const Trained one = run_on(1, 1, 0);
  std::set<int64_t> seen;
  for (int step = 1; step <= kRunSteps; ++step) {
    const auto& samples = one.samples[static_cast<size_t>(step - 1)];
    ASSERT_EQ(samples.size(), 16U);
    for (const int64_t sample : samples) {
      EXPECT_LE(difficulty_of(sample), std::min<int64_t>(8, 1 + step)) << "step " << step;
      seen.insert(difficulty_of(sample));
    }
  }
  EXPECT_EQ(seen.size(), 8U) << "in the end all";
  for (const auto& [world, accumulation, stage] : {std::tuple{1, 2, 1}, {2, 1, 2}, {2, 2, 3}, {4, 2, 1}}) {
    const Trained other = run_on(world, accumulation, stage);
    EXPECT_EQ(other.samples, one.samples) << world << " ranks";
    EXPECT_LT(largest_difference(other.weights, one.weights), 1e-5) << world << " ranks, stage " << stage;
  }
}

// DeepSpeed keeps the state of another generator than its sampler's, so that a resumed run has other samples.
TEST_F(DataSampling, AResumedRunHasTheSamplesOfTheRunOnOtherRanksToo) {
  const test::ScratchFolder saved;
  const std::string dir = saved.path().string();
  constexpr int kSaved = 4;
  Trained whole{.samples = std::vector<std::multiset<int64_t>>(kRunSteps), .weights = {}};
  std::mutex mutex;
  run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet net;
    const Initialized parts = start_with_rows(net, config(2, 2), communicator);
    auto next = parts.loader->begin();
    for (int micro = 0; micro < 2 * kSaved; ++micro) {
      if (micro > 0) ++next;
      parts.engine->backward(net->loss(next->data));
      parts.engine->step();
    }
    parts.engine->save_checkpoint(dir, "boundary");
    ++next;  // inside an accumulation: what is resumed begins it anew
    parts.engine->backward(net->loss(next->data));
    parts.engine->step();
    parts.engine->save_checkpoint(dir, "inside");
    SmallNet again;
    const Initialized resumed = start_with_rows(again, config(2, 2), communicator);
    ASSERT_TRUE(static_cast<bool>(resumed.engine->load_checkpoint(dir, "boundary")));
    train_by_loader(resumed, again, kSaved, whole, mutex);
  });
  // What the run itself would have had.
  Trained plain{.samples = std::vector<std::multiset<int64_t>>(kRunSteps), .weights = {}};
  run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet net;
    train_by_loader(start_with_rows(net, config(2, 2), communicator), net, 0, plain, mutex);
  });
  for (int step = 0; step < kSaved; ++step) plain.samples[static_cast<size_t>(step)].clear();
  EXPECT_EQ(whole.samples, plain.samples);
  EXPECT_EQ(largest_difference(whole.weights, plain.weights), 0) << "bit for bit";
  for (const auto& [world, accumulation, tag] :
       {std::tuple{2, 2, "inside"}, {1, 1, "boundary"}, {4, 1, "boundary"}, {1, 4, "inside"}}) {
    Trained other{.samples = std::vector<std::multiset<int64_t>>(kRunSteps), .weights = {}};
    run_ranks(world, [&, world = world, accumulation = accumulation, tag = tag](comm::Communicator& communicator) {
      SmallNet net;
      const Initialized parts = start_with_rows(net, config(world, accumulation), communicator);
      ASSERT_TRUE(static_cast<bool>(parts.engine->load_checkpoint(dir, tag)));
      train_by_loader(parts, net, kSaved, other, mutex);
    });
    EXPECT_EQ(other.samples, plain.samples) << world << " ranks, " << tag;
    EXPECT_LT(largest_difference(other.weights, plain.weights), 1e-5);
  }
}

TEST_F(DataSampling, AProgramThatLoadsDataItself) {
  const test::ScratchFolder saved;
  const auto batches_of = [&](int first, bool resumed) {
    std::vector<std::vector<int64_t>> batches;
    std::mutex mutex;
    run_ranks(2, [&](comm::Communicator& communicator) {
      SmallNet net;
      const Initialized parts = start(net.ptr(), config(2, 1), communicator);
      const auto sampler = data_sampler(parts.engine, kSamples);
      if (resumed) parts.engine->load_checkpoint(saved.path());
      EXPECT_EQ(data_sampler(parts.engine)->difficulty("hard"), std::min(8, 2 + first)) << "of the step to come";
      for (int step = first; step < kRunSteps; ++step) {
        if (step == 5 && !resumed) parts.engine->save_checkpoint(saved.path());
        const std::vector<int64_t> batch = sampler->next_batch();
        EXPECT_EQ(sampler->difficulty("hard"), std::min(8, 2 + step));
        std::vector<at::Tensor> rows;
        for (const int64_t index : batch) rows.push_back(Rows().get(static_cast<size_t>(index)).data);
        parts.engine->backward(net->loss(torch::stack(rows)));
        parts.engine->step();
        const std::lock_guard lock(mutex);
        if (communicator.rank() == 1 && step >= 5) batches.push_back(batch);
      }
    });
    return batches;
  };
  const auto plain = batches_of(0, false);
  EXPECT_EQ(plain.size(), static_cast<size_t>(kRunSteps - 5));
  EXPECT_EQ(batches_of(5, true), plain);
}

// Stages read the same batches, epochs and all.
TEST_F(DataSampling, APipelineReadsWhatTheCurriculumChooses) {
  struct Tokens {
    torch::data::Example<> get(size_t index) {
      const pipeline::MicroBatch batch = pipeline::tokens_of(static_cast<int64_t>(index), 0);
      return {batch.inputs[0][0], batch.labels[0][0]};
    }
    std::optional<size_t> size() const { return kSamples; }
  };
  const auto losses = [&](int stages) {
    std::vector<double> found;
    run_ranks(stages, [&](comm::Communicator& world) {
      ordered_json text = config(1, 4);
      text["pipeline"] = {{"stages", stages}, {"schedule", "1f1b"}};
      text["optimizer"]["params"]["lr"] = 1e-3;
      const auto model = std::make_shared<pipeline::PipelineModule>(
          pipeline::layers_of(4, true), pipeline::PipelineOptions{.loss = pipeline::cross_entropy});
      const Initialized parts =
          initialize({.model = model, .config = text, .training_data = Tokens(), .communicator = borrowed(world)});
      for (int step = 0; step < 4; ++step) {
        const double loss = parts.engine->train_batch().item<double>();
        EXPECT_EQ(data_sampler(parts.engine)->difficulty("hard"), 2 + step);
        for (const int64_t index : parts.loader->indices()) EXPECT_LE(difficulty_of(index), 2 + step);
        if (world.rank() == 0) found.push_back(loss);
      }
    });
    return found;
  };
  const std::vector<double> one = losses(1);
  EXPECT_THAT(losses(2), testing::Pointwise(testing::DoubleNear(5e-6), one));
}

TEST_F(DataSampling, OffItIsTheShuffledDataset) {
  run_ranks(2, [&](comm::Communicator& communicator) {
    ordered_json off = config(2, 1);
    off["data_efficiency"]["data_sampling"]["enabled"] = false;
    SmallNet net;
    const Initialized parts = start(net.ptr(), off, communicator);
    const auto sampler = data_sampler(parts.engine, kSamples);
    EXPECT_EQ(sampler->difficulty("hard"), std::nullopt);
    EXPECT_THROW(sampler->set_custom_schedule("hard", [](int64_t) { return 1; }), UsageError);
    EXPECT_EQ(sampler->batches_per_epoch(), 3);
    SmallNet other;
    const Initialized loaded = start_with_rows(other, off, communicator);
    for (auto& batch : *loaded.loader) {
      EXPECT_TRUE(batch.data.defined());
      EXPECT_EQ(sampler->next_batch(), loaded.loader->indices());
    }
    EXPECT_THAT(sampler->next_batch(), testing::IsEmpty());
  });
}

TEST_F(DataSampling, BatchesGrowWithTheEngines) {
  run_ranks(1, [&](comm::Communicator& communicator) {
    SmallNet net;
    const Initialized parts = start(net.ptr(), config(1, 1), communicator);
    const auto sampler = data_sampler(parts.engine, kSamples);
    parts.engine->set_train_batch_size(48);
    std::vector<std::optional<int64_t>> difficulties;
    for (int micro = 0; micro < 6; ++micro) {
      EXPECT_EQ(sampler->next_batch().size(), 16U);
      difficulties.push_back(sampler->difficulty("hard"));
    }
    EXPECT_THAT(difficulties, testing::ElementsAre(2, 2, 2, 3, 3, 3));
    parts.engine->set_train_micro_batch_size(4);
    EXPECT_EQ(sampler->next_batch().size(), 4U);
  });
}

TEST_F(DataSampling, MistakesOfThePartsAreNamed) {
  const auto message = [](const std::function<void()>& action) {
    try {
      action();
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  run_ranks(1, [&](comm::Communicator& communicator) {
    SmallNet net;
    const Initialized own = start(net.ptr(), config(1, 1), communicator);
    EXPECT_THAT(message([&] { data_sampler(own.engine); }), HasSubstr("data_sampler(engine, size)"));
    own.engine->backward(net->loss(sample(0, 0)));
    EXPECT_THAT(message([&] { own.engine->step(); }),
                HasSubstr("expected a call of engine::data_sampler(engine, size) before the first step"));
    EXPECT_THAT(message([&] { data_sampler(own.engine, kSamples); }), HasSubstr("before the first micro-batch"));
    own.engine->zero_grad();
    const auto sampler = data_sampler(own.engine, kSamples);
    EXPECT_THAT(message([&] { data_sampler(own.engine, 7); }), HasSubstr("expected the 48 samples"));
    SmallNet second;
    const Initialized loaded = start_with_rows(second, config(1, 1), communicator);
    EXPECT_THAT(message([&] { data_sampler(loaded.engine)->next_batch(); }), HasSubstr("the engine's loader takes"));
    EXPECT_THAT(message([&] { loaded.loader->set_epoch(2); }), HasSubstr("cannot jump"));
    // A difficulty that nobody uses.
    SmallNet third;
    const Initialized cropped = start_with_rows(third, config(1, 1, 1, "single_cluster"), communicator);
    for (auto& batch : *cropped.loader) {
      cropped.engine->backward(third->loss(batch.data));
      break;
    }
    EXPECT_THAT(message([&] { cropped.engine->step(); }),
                HasSubstr("engine::data_sampler(engine), for the difficulty"));
    EXPECT_EQ(data_sampler(cropped.engine)->difficulty("hard"), 2);
    EXPECT_NO_THROW(cropped.engine->step());
    ordered_json broken = config(1, 1);
    broken["data_efficiency"]["data_sampling"]["curriculum_learning"]["curriculum_metrics"]["hard"]
          ["index_to_metric_path"] = paths_.index_to_sample;
    SmallNet fourth;
    EXPECT_THAT(message([&] { start_with_rows(fourth, broken, communicator); }),
                HasSubstr("curriculum_metrics.hard.index_to_metric_path: " + paths_.index_to_sample +
                          ".idx: expected one value in row 0, found 6"));
  });
}

}  // namespace
}  // namespace ds::engine
