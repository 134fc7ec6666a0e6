// A curriculum of samples, draw by draw, against a plain statement of it.
#include "data/curriculum_sampler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <tuple>

#include "core/check.h"
#include "tests/support/metric_writer.h"
#include "tests/support/scratch_folder.h"

namespace ds::engine {
namespace {

using efficiency::DifficultySchedule;
using efficiency::SampleMetric;
using testing::HasSubstr;
using testing::ThrowsMessage;
using Indices = std::vector<int64_t>;

constexpr int64_t kCurriculumSamples = 60;

// Values 1 to 12, five samples each.
std::vector<int64_t> lengths() {
  std::vector<int64_t> values(kCurriculumSamples);
  for (int64_t i = 0; i < kCurriculumSamples; ++i) values[static_cast<size_t>(i)] = i * 7 % 12 + 1;
  return values;
}

class CurriculumSamplerTest : public testing::Test {
 protected:
  SampleMetric metric(const std::string& name, const std::vector<int64_t>& values, DifficultySchedule schedule) const {
    const test::MetricPaths paths = test::write_metric(folder_.path().string(), name, values);
    return {.name = name,
            .index_to_sample_path = paths.index_to_sample,
            .index_to_metric_path = paths.index_to_metric,
            .schedule = std::move(schedule)};
  }
  // Difficulty 2 in steps 1 and 2, 4 in step 3, then 12.
  static DifficultySchedule listed() {
    return {.kind = DifficultySchedule::Kind::kFixedDiscrete,
            .min_difficulty = 2,
            .max_difficulty = 12,
            .difficulty = {2, 4, 12},
            .max_step = {2, 3}};
  }
  CurriculumOptions options(int rank = 0, int world = 1, int64_t batch = 4, int64_t accumulation = 2) const {
    return {.metrics = {metric("length", lengths(), listed())},
            .dataset_size = kCurriculumSamples,
            .batch_size = batch,
            .accumulation = accumulation,
            .rank = rank,
            .world_size = world,
            .seed = 42,
            .num_epochs = 10};
  }

  test::ScratchFolder folder_;
};

// The next so many samples of all ranks, in the order in which one rank alone would have them.
Indices dealt(const std::vector<std::unique_ptr<CurriculumSampler>>& ranks, size_t count) {
  Indices all;
  while (all.size() < count) {
    for (const auto& rank : ranks) {
      const Indices own = rank->next_batch();
      all.insert(all.end(), own.begin(), own.end());
    }
  }
  return all;
}

TEST_F(CurriculumSamplerTest, NothingAboveTheDifficultyIsDrawn) {
  CurriculumSampler sampler(options());
  const std::vector<int64_t> values = lengths();
  const std::map<int, int64_t> most = {{1, 2}, {2, 2}, {3, 4}, {4, 12}};
  for (const auto& [step, difficulty] : most) {
    for (int micro = 0; micro < 2; ++micro) {
      const Indices batch = sampler.next_batch();
      ASSERT_EQ(batch.size(), 4U);
      for (const int64_t sample : batch) EXPECT_LE(values[static_cast<size_t>(sample)], difficulty) << "step " << step;
      EXPECT_EQ(sampler.difficulty("length"), difficulty);
    }
  }
}

// Of one cluster each round is all of its samples once, in another order.
TEST_F(CurriculumSamplerTest, AClusterIsUsedUpBeforeASampleComesAgain) {
  CurriculumOptions all = options(0, 1, 5, 4);
  all.metrics.clear();
  CurriculumSampler sampler(all);
  std::vector<Indices> rounds;
  for (int round = 0; round < 3; ++round) {
    Indices samples;
    for (int batch = 0; batch < 12; ++batch) {
      const Indices own = sampler.next_batch();
      samples.insert(samples.end(), own.begin(), own.end());
    }
    EXPECT_EQ(std::set<int64_t>(samples.begin(), samples.end()).size(), static_cast<size_t>(kCurriculumSamples));
    rounds.push_back(samples);
  }
  EXPECT_NE(rounds[0], rounds[1]);
  EXPECT_NE(rounds[1], rounds[2]);
}

// Within each cluster, too, whatever part of a batch is of it: no sample is two draws ahead of another one.
TEST_F(CurriculumSamplerTest, EachClusterGoesThroughItsSamples) {
  CurriculumSampler sampler(options(0, 1, 4, 1));
  const std::vector<int64_t> values = lengths();
  const auto cluster_of = [&](int64_t sample) {
    const int64_t value = values[static_cast<size_t>(sample)];
    return value <= 2 ? 0U : value <= 4 ? 1U : 2U;
  };
  std::vector<int64_t> times(kCurriculumSamples);
  std::vector<int64_t> drawn(3);
  for (int step = 0; step < 150; ++step) {
    for (const int64_t sample : sampler.next_batch()) {
      ++times[static_cast<size_t>(sample)];
      ++drawn[cluster_of(sample)];
    }
    const std::vector<int64_t> sizes = {10, 10, 40};
    for (int64_t sample = 0; sample < kCurriculumSamples; ++sample) {
      const size_t c = cluster_of(sample);
      EXPECT_GE(times[static_cast<size_t>(sample)], drawn[c] / sizes[c]) << sample;
      EXPECT_LE(times[static_cast<size_t>(sample)], (drawn[c] + sizes[c] - 1) / sizes[c]) << sample;
    }
  }
  // In proportion to their sizes: 392 of the 588 draws of the last 147 steps, with a standard deviation of 11.
  EXPECT_NEAR(static_cast<double>(drawn[2]), 392, 50);
}

TEST_F(CurriculumSamplerTest, AGlobalBatchIsTheSameOnAnyRanks) {
  std::vector<std::unique_ptr<CurriculumSampler>> one;
  one.push_back(std::make_unique<CurriculumSampler>(options(0, 1, 8, 2)));
  const Indices expected = dealt(one, 160);
  for (const auto& [world, batch, accumulation] : {std::tuple{2, 4, 2}, {4, 2, 2}, {2, 2, 4}, {4, 4, 1}, {8, 2, 1}}) {
    std::vector<std::unique_ptr<CurriculumSampler>> ranks;
    for (int rank = 0; rank < world; ++rank) {
      ranks.push_back(std::make_unique<CurriculumSampler>(options(rank, world, batch, accumulation)));
    }
    EXPECT_EQ(dealt(ranks, 160), expected) << world << " ranks, " << batch << " x " << accumulation;
  }
}

TEST_F(CurriculumSamplerTest, ResumedItGoesOnAsItWas) {
  for (int before = 0; before < 20; ++before) {
    CurriculumSampler sampler(options());
    for (int i = 0; i < before; ++i) sampler.next_batch();
    CurriculumOptions other = options();
    other.seed = 7;
    CurriculumSampler resumed(other);
    resumed.load_state(sampler.state());
    EXPECT_EQ(resumed.state(), sampler.state());
    for (int i = 0; i < 40; ++i) {
      EXPECT_EQ(resumed.next_batch(), sampler.next_batch()) << before << " batches before, " << i << " behind";
      EXPECT_EQ(resumed.difficulty("length"), sampler.difficulty("length"));
    }
  }
}

TEST_F(CurriculumSamplerTest, ResumedOnOtherRanks) {
  for (const int before : {2, 3, 8}) {  // in the middle of a global batch, too
    CurriculumSampler sampler(options(0, 1, 8, 2));
    for (int i = 0; i < before; ++i) sampler.next_batch();
    std::vector<std::unique_ptr<CurriculumSampler>> ranks;
    for (int rank = 0; rank < 4; ++rank) {
      ranks.push_back(std::make_unique<CurriculumSampler>(options(rank, 4, 2, 2)));
      ranks.back()->load_state(sampler.state());
    }
    std::vector<std::unique_ptr<CurriculumSampler>> one;
    one.push_back(std::make_unique<CurriculumSampler>(options(0, 1, 8, 2)));
    one.back()->load_state(sampler.state());
    EXPECT_EQ(dealt(ranks, 80), dealt(one, 80));
  }
}

TEST_F(CurriculumSamplerTest, AnEpochIsNumEpochsTimesTheDataset) {
  for (const bool drop_last : {false, true}) {
    CurriculumOptions some = options(0, 2, 7, 1);
    some.num_epochs = 2;  // 120 samples, 14 at once
    some.drop_last = drop_last;
    CurriculumSampler sampler(some);
    for (int epoch = 0; epoch < 3; ++epoch) {
      int batches = 0;
      for (Indices batch = sampler.next_batch(); !batch.empty(); batch = sampler.next_batch()) {
        EXPECT_EQ(batch.size(), 7U);
        ++batches;
      }
      EXPECT_EQ(batches, drop_last ? 8 : 9);
      EXPECT_EQ(sampler.batches_per_epoch(), batches);
      EXPECT_EQ(sampler.state().epoch, epoch + 1);
    }
    EXPECT_TRUE(sampler.has_equal_batches());
  }
}

TEST_F(CurriculumSamplerTest, SeveralMetricsAdmitTogether) {
  std::vector<int64_t> rarity(kCurriculumSamples);
  for (int64_t i = 0; i < kCurriculumSamples; ++i) rarity[static_cast<size_t>(i)] = i % 10;
  CurriculumOptions both = options();
  both.metrics.push_back(metric("rarity", rarity,
                                {.kind = DifficultySchedule::Kind::kFixedLinear,
                                 .min_difficulty = 3,
                                 .max_difficulty = 9,
                                 .total_curriculum_step = 6,
                                 .difficulty_step = 1}));
  CurriculumSampler sampler(both);
  const std::vector<int64_t> values = lengths();
  for (int step = 1; step < 12; ++step) {
    for (int micro = 0; micro < 2; ++micro) {
      for (const int64_t sample : sampler.next_batch()) {
        EXPECT_LE(values[static_cast<size_t>(sample)], both.metrics[0].schedule.at(step));
        EXPECT_LE(rarity[static_cast<size_t>(sample)], both.metrics[1].schedule.at(step));
      }
    }
  }
  CurriculumSampler resumed(both);
  resumed.load_state(sampler.state());
  for (int i = 0; i < 20; ++i) EXPECT_EQ(resumed.next_batch(), sampler.next_batch());
}

TEST_F(CurriculumSamplerTest, AMetricThatChoosesNothingIsTheProgramsAndNeedsNoFiles) {
  CurriculumOptions some = options();
  some.metrics.push_back({.name = "crop", .chooses = false, .schedule = listed()});
  CurriculumSampler sampler(some);
  CurriculumSampler without(options());
  for (int i = 0; i < 12; ++i) {
    EXPECT_EQ(sampler.next_batch(), without.next_batch());
    EXPECT_EQ(sampler.difficulty("crop"), listed().at(i / 2 + 1));
  }
  EXPECT_THAT([&] { sampler.difficulty("size"); }, ThrowsMessage<UsageError>(HasSubstr("(length, crop), found size")));
}

TEST_F(CurriculumSamplerTest, AScheduleOfTheProgram) {
  CurriculumOptions own = options();
  own.metrics[0].schedule = {.kind = DifficultySchedule::Kind::kCustom, .max_difficulty = 12};
  CurriculumSampler sampler(own);
  EXPECT_THROW(sampler.next_batch(), UsageError) << "before there is a function";
  sampler.set_custom_schedule("length", [](int64_t step) { return step < 3 ? 5 + step : 2; });
  const std::vector<int64_t> values = lengths();
  for (int step = 1; step < 3; ++step) {
    for (int micro = 0; micro < 2; ++micro) {
      for (const int64_t sample : sampler.next_batch()) EXPECT_LE(values[static_cast<size_t>(sample)], 5 + step);
    }
  }
  EXPECT_THAT([&] { sampler.next_batch(); },
              ThrowsMessage<ConfigError>(HasSubstr("metric length: expected a difficulty that does not fall, for "
                                                   "samples that are admitted stay so, found 2 at step 3 after 7")));
  EXPECT_THROW(CurriculumSampler(options()).set_custom_schedule("length", [](int64_t) { return 1; }), UsageError);
}

TEST_F(CurriculumSamplerTest, ADifficultyThatAdmitsNothingIsAnError) {
  CurriculumOptions hard = options();
  std::vector<int64_t> values(kCurriculumSamples, 50);
  hard.metrics[0] = metric("hard", values, listed());
  CurriculumSampler sampler(hard);
  EXPECT_THAT([&] { sampler.next_batch(); },
              ThrowsMessage<ConfigError>(HasSubstr("no sample is admitted at step 1: hard 2; the easiest ones have "
                                                   "hard value 50. Raise min_difficulty")));
}

// The running global batch stays; what its rest is no whole micro-batch of is filled up, or left out.
TEST_F(CurriculumSamplerTest, SizesMayChange) {
  CurriculumSampler reference(options(0, 1, 4, 2));
  const Indices first = reference.next_batch();
  const Indices second = reference.next_batch();
  CurriculumSampler sampler(options(0, 1, 4, 2));
  EXPECT_EQ(sampler.next_batch(), first);
  sampler.set_batch_size(3);
  Indices rest = sampler.next_batch();
  EXPECT_EQ(rest, Indices(second.begin(), second.begin() + 3));
  EXPECT_EQ(sampler.next_batch(), Indices(second.begin() + 3, second.end()));
  EXPECT_EQ(sampler.next_batch().size(), 3U);
  EXPECT_EQ(sampler.state().curriculum->batch_size, 6) << "a new one";
  CurriculumOptions dropping = options(0, 1, 4, 2);
  dropping.drop_last = true;
  CurriculumSampler dropped(dropping);
  dropped.next_batch();
  dropped.set_batch_size(5);
  EXPECT_EQ(dropped.next_batch().size(), 5U);
  EXPECT_EQ(dropped.state().curriculum->batches, 1);
  CurriculumSampler filled(options(1, 2, 2, 2));
  filled.next_batch();
  filled.set_batch_size(3);
  EXPECT_EQ(filled.next_batch().size(), 2U) << "ranks have as many";
}

TEST_F(CurriculumSamplerTest, StatesOfOtherDataAreRefusedAndChangeNothing) {
  CurriculumSampler sampler(options());
  for (int i = 0; i < 9; ++i) sampler.next_batch();
  const SamplerState good = sampler.state();
  CurriculumSampler other(options());
  const SamplerState before = other.state();
  const auto refusal = [&](const std::function<void(SamplerState&)>& change) {
    SamplerState state = good;
    change(state);
    EXPECT_THROW(other.load_state(state), UsageError);
    EXPECT_EQ(other.state(), before);
  };
  refusal([](SamplerState& s) { s.curriculum.reset(); });
  refusal([](SamplerState& s) { s.epoch = -1; });
  refusal([](SamplerState& s) { s.curriculum->files += 1; });
  refusal([](SamplerState& s) { s.curriculum->batches = -1; });
  refusal([](SamplerState& s) { s.curriculum->taken = s.curriculum->batch_size; });
  refusal([](SamplerState& s) { s.curriculum->batch_size = int64_t{1} << 40; });
  refusal([](SamplerState& s) { s.curriculum->clusters[0].drawn = -1; });
  refusal([](SamplerState& s) { s.curriculum->clusters[0].difficulties = {}; });
  refusal([](SamplerState& s) { s.curriculum->clusters[0].difficulties = {0}; });
  refusal([](SamplerState& s) { std::swap(s.curriculum->clusters[0], s.curriculum->clusters[1]); });
  refusal([](SamplerState& s) { s.curriculum->clusters.clear(); });
  other.load_state(good);
  EXPECT_EQ(other.next_batch(), sampler.next_batch());
  EXPECT_THROW(other.set_epoch(3), UsageError);
}

TEST_F(CurriculumSamplerTest, MistakesAreNamed) {
  const auto with = [this](const std::function<void(CurriculumOptions&)>& change) {
    CurriculumOptions changed = options();
    change(changed);
    return [changed] { CurriculumSampler{changed}; };
  };
  EXPECT_THROW(with([](CurriculumOptions& o) { o.rank = 1; })(), UsageError);
  EXPECT_THROW(with([](CurriculumOptions& o) { o.batch_size = 0; })(), UsageError);
  EXPECT_THROW(with([](CurriculumOptions& o) { o.accumulation = 0; })(), UsageError);
  EXPECT_THROW(with([](CurriculumOptions& o) { o.dataset_size = 0; })(), UsageError);
  EXPECT_THAT(with([](CurriculumOptions& o) { o.num_epochs = int64_t{1} << 61; }),
              ThrowsMessage<ConfigError>(HasSubstr("data_efficiency.data_sampling.num_epochs")));
  EXPECT_THAT(with([](CurriculumOptions& o) {
                o.drop_last = true;
                o.batch_size = 1000;
              }),
              ThrowsMessage<UsageError>(HasSubstr("dataloader_drop_last")));
  EXPECT_THAT(with([](CurriculumOptions& o) { o.dataset_size = 59; }),
              ThrowsMessage<IoError>(HasSubstr("curriculum_metrics.length.index_to_sample_path")));
}

}  // namespace
}  // namespace ds::engine
