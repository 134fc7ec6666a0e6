// super_offload: when it pauses, how an update that fails is undone, and what the plan says of it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "config/plan/plan.h"
#include "core/check.h"
#include "model/offloaded/offloaded_state.h"
#include "model/offloaded/speculative_update.h"
#include "offload/update_copies.h"
#include "tests/model/offloaded/super_offload_run.h"
#include "tests/model/small_run.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

// --- where it does not pay -------------------------------------------------------------------------------------------

TEST(SuperOffloadGate, PausesAfterFailuresInARowAndLongerEachTime) {
  SpeculationGate gate;
  EXPECT_EQ(gate.step(SpeculationOutcome::kRolledBack), 0);
  EXPECT_EQ(gate.step(SpeculationOutcome::kRolledBack), 0);
  EXPECT_EQ(gate.step(SpeculationOutcome::kStood), 0);  // begins anew
  for (int64_t failure = 1; failure < SpeculationGate::kFailures; ++failure) {
    EXPECT_EQ(gate.step(SpeculationOutcome::kRolledBack), 0);
  }
  int64_t pause = gate.step(SpeculationOutcome::kRolledBack);
  EXPECT_EQ(pause, SpeculationGate::kPause);
  int64_t longest = 0;
  for (int round = 0; round < 8; ++round) {
    for (int64_t step = 0; step < pause; ++step) {
      EXPECT_FALSE(gate.open());
      gate.step(SpeculationOutcome::kNone);
    }
    EXPECT_TRUE(gate.open());
    const int64_t next = gate.step(SpeculationOutcome::kRolledBack);
    EXPECT_EQ(next, std::min(2 * pause, SpeculationGate::kLongestPause));
    pause = next;
    longest = std::max(longest, next);
  }
  EXPECT_EQ(longest, SpeculationGate::kLongestPause);
  for (; !gate.open();) gate.step(SpeculationOutcome::kNone);
  EXPECT_EQ(gate.step(SpeculationOutcome::kStood), 0);
  EXPECT_TRUE(gate.open());
  EXPECT_EQ(gate.stood(), 2);
}

TEST(SuperOffloadGate, AnEngineThatClipsEveryStepStopsForAWhile) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    ordered_json config = offloading_config(2, 1);
    config["gradient_clipping"] = 1e-3;
    const int64_t steps = SpeculationGate::kFailures + SpeculationGate::kPause + 2;
    const auto speculation = expect_same_training(config, communicator, [&](Script& script) {
      for (int64_t step = 0; step < steps; ++step) script.step();
    });
    EXPECT_EQ(speculation.stood, 0);
    EXPECT_EQ(speculation.rolled_back, SpeculationGate::kFailures + 1);
    EXPECT_EQ(speculation.without, SpeculationGate::kPause + 1);
  });
}

// --- an update that fails --------------------------------------------------------------------------------------------

TEST(SuperOffloadParts, AnUpdateThatThrowsIsUndone) {
  test::run_ranks(1, [&](comm::Communicator& communicator) {
    TwoBuckets two(with_speculation(with_offload(small_config(2, 1), on_host())), communicator);
    const std::vector<zero::BucketLayout>& buckets = two.buckets;
    OffloadedState& state = two.state;
    const auto& optimizer = two.optimizer;
    SpeculativeUpdate& speculation = *state.speculation();
    const auto arrive = [&](size_t last) {
      for (size_t b = buckets.size(); b-- > last;) state.gradients()->add(b, two.ones(b));
    };
    const auto expect_start = [&] {
      for (size_t b = 0; b < buckets.size(); ++b) {
        const auto index = static_cast<int64_t>(b);
        EXPECT_TRUE(optimizer->slice(index).master.equal(two.ones(b))) << b;
        EXPECT_EQ(optimizer->states(index)[0].second.count_nonzero().item<int64_t>(), 0) << b;
      }
    };
    size_t published = 0;
    const auto publish = [&](size_t bucket, const at::Tensor& weights) {
      EXPECT_TRUE(weights.equal(optimizer->slice(static_cast<int64_t>(bucket)).master));
      EXPECT_LT(weights.max().item<double>(), 1.0);
      ++published;
    };
    // One of the updates throws.
    speculation.begin(*optimizer, 1.0, [&](const at::Tensor& gradient) {
      if (gradient.numel() == buckets[0].slice_numel) throw IoError("out of luck");
    });
    arrive(0);
    speculation.end_arrivals();
    EXPECT_TRUE(speculation.fits(1.0));
    EXPECT_FALSE(speculation.fits(0.5));
    EXPECT_FALSE(speculation.accept(publish));
    EXPECT_EQ(optimizer->step_count(), 1);  // the step goes on
    expect_start();
    optimizer->set_step_count(0);
    state.gradients()->clear();
    // A bucket is missing.
    speculation.begin(*optimizer, 1.0, {});
    arrive(1);
    EXPECT_FALSE(speculation.accept(publish));
    expect_start();
    optimizer->set_step_count(0);
    state.gradients()->clear();
    // All is well, and dropped.
    speculation.begin(*optimizer, 1.0, {});
    arrive(0);
    state.gradients()->clear();
    EXPECT_EQ(optimizer->step_count(), 0);
    EXPECT_FALSE(speculation.begun());
    expect_start();
    // All is well.
    speculation.begin(*optimizer, 1.0, {});
    arrive(0);
    EXPECT_EQ(published, 0);
    EXPECT_TRUE(speculation.accept(publish));
    EXPECT_EQ(published, buckets.size());
    EXPECT_EQ(optimizer->step_count(), 1);
  });
}

TEST(SuperOffloadParts, AnUndoCopyHasEveryBit) {
  const at::Tensor values = torch::tensor({1.5F, -0.0F, std::numeric_limits<float>::quiet_NaN(), 1e-42F});
  const at::Tensor changed = values.clone();
  offload::UndoCopy copy({torch::empty({4})});
  EXPECT_FALSE(copy.holds());
  copy.restore();
  copy.keep({changed});
  changed.fill_(7);
  copy.restore();
  EXPECT_FALSE(copy.holds());
  EXPECT_TRUE(changed.view(torch::kInt).equal(values.view(torch::kInt)));
  copy.keep({changed});
  changed.fill_(7);
  copy.forget();
  copy.restore();
  EXPECT_EQ(changed[0].item<float>(), 7);
  EXPECT_THROW(copy.keep({torch::empty({5})}), InternalError);
}

// --- the plan --------------------------------------------------------------------------------------------------------

Plan speculative_plan(ordered_json config, int64_t ranks = 2) {
  return make_plan(config::parse(with_speculation(std::move(config)), {.dp_world_size = ranks}),
                   {.world_size = ranks, .dp = ranks}, {.parameters = 8192});
}

TEST(SuperOffloadPlan, SaysWhatHappensAndWhatItCosts) {
  const ordered_json config = with_offload(small_config(2, 1), on_host());
  const Plan plan = speculative_plan(config);
  EXPECT_THAT(to_table(plan), HasSubstr("offload_optimizer.super_offload: true"));
  EXPECT_TRUE(plan.offload.speculative);
  EXPECT_EQ(plan.offloaded_bytes.staging, 4096 * 4 * 4);  // master, two states, new weights of one bucket on two ranks
  ordered_json by_value = config;
  by_value.erase("gradient_clipping");
  by_value["gradient_clip_by_value"] = 1.0;
  EXPECT_EQ(speculative_plan(by_value).offloaded_bytes.staging, 4096 * 4 * 5);  // and a gradient
}

TEST(SuperOffloadPlan, RefusesWhatCannotWork) {
  const auto expect_refusal = [](const ordered_json& config, const char* expected) {
    EXPECT_THAT([&] { speculative_plan(config, 4); },
                ThrowsMessage<ConfigError>(::testing::AllOf(
                    HasSubstr("zero_optimization.offload_optimizer.super_offload: true needs"), HasSubstr(expected))));
  };
  expect_refusal(with_offload(small_config(0, 1), on_host()), "zero_optimization.stage 1, 2 or 3, found 0");
  expect_refusal(with_offload(small_config(2, 1), on_disk()), "found \"nvme\"");
  expect_refusal(with_offload(small_config(2, 1), {{"device", "none"}}), "found \"none\"");
  expect_refusal(with_offload(small_config(2, 1), on_host({{"delayed_update", true}})), "delayed_update false");
  for (const char* type : {"Lamb", "Muon"}) {
    ordered_json config = with_offload(small_config(2, 1), on_host());
    config["optimizer"]["type"] = type;
    config["zero_allow_untested_optimizer"] = true;
    expect_refusal(config, type);
  }
  ordered_json mics = with_offload(small_config(3, 1), on_host());
  mics["zero_optimization"]["mics_shard_size"] = 2;
  expect_refusal(mics, "mics_shard_size: 2 of 4");
  EXPECT_NO_THROW(speculative_plan(with_offload(small_config(3, 1), on_host(), on_disk())));
}

}  // namespace
}  // namespace ds::engine
