// The orders of calls that a GradientReducer goes through, where one pass after another is not all there is.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "tests/support/thread_ranks.h"
#include "tests/zero/ranked_net.h"
#include "zero/reduction/gradient_bucket.h"
#include "zero/reduction/gradient_reducer.h"

namespace ds::zero {
namespace {

using test::expect_gradients;
using test::expected;
using test::Ranked;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr int64_t kSmallBuckets = 1;  // one parameter each

class ReducerStates : public ::testing::TestWithParam<ReductionPolicy> {
 protected:
  static ReducerOptions options() { return {.policy = GetParam()}; }
  static bool whole() { return GetParam() == ReductionPolicy::kAllReduce; }
};

INSTANTIATE_TEST_SUITE_P(Policies, ReducerStates,
                         ::testing::Values(ReductionPolicy::kAllReduce, ReductionPolicy::kReduceScatterAtBoundary,
                                           ReductionPolicy::kReduceScatterEveryBackward),
                         [](const auto& policy) { return "Stage" + std::to_string(static_cast<int>(policy.param)); });

TEST_P(ReducerStates, AfterAPassThatThrewOnlyResetHelps) {
  const auto wanted = expected(2, {{1, false}}, true);
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    Ranked ranked(communicator, options(), kSmallBuckets);
    GradientReducer& reducer = *ranked.reducer;
    for (const bool after_its_end : {false, true}) {
      ranked.backward(communicator.rank(), 0, true, false, true);
      reducer.begin_backward(true, true);
      ranked.net->forward(test::input(communicator.rank(), 2), true).backward();  // with collectives under way
      if (after_its_end) reducer.end_backward();
      reducer.abandon_backward();
      EXPECT_TRUE(reducer.failed());
      EXPECT_THROW(reducer.finish(), UsageError);
      EXPECT_THROW(reducer.begin_backward(true, true), UsageError);
      reducer.reset();
      EXPECT_FALSE(reducer.failed());
      ranked.backward(communicator.rank(), 1, true, true, true);
      reducer.finish();
      expect_gradients(ranked, communicator.rank(), wanted, whole());
      reducer.reset();
    }
  });
}

TEST_P(ReducerStates, ARunningPassIsNeitherFinishedNorDropped) {
  test::run_ranks(1, [&](comm::Communicator& communicator) {
    Ranked ranked(communicator, options(), kSmallBuckets);
    GradientReducer& reducer = *ranked.reducer;
    reducer.begin_backward(true, true);
    EXPECT_THROW(reducer.begin_backward(true, true), UsageError);
    EXPECT_THROW(reducer.finish(), UsageError);
    EXPECT_THROW(reducer.reset(), UsageError);
    EXPECT_THROW(reducer.release_buffers(), UsageError);
    reducer.end_backward();
    EXPECT_THROW(reducer.end_backward(), InternalError);
    reducer.finish();
    reducer.reset();
  });
}

TEST_P(ReducerStates, ABoundaryDeclaredLateIsReducedByFinish) {
  const auto wanted = expected(2, {{0, false}, {1, false}}, true);
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    Ranked ranked(communicator, options(), 60);
    for (int step = 0; step < 2; ++step) {
      for (int pass = 0; pass < 2; ++pass) ranked.backward(communicator.rank(), pass, true, false, true);
      ranked.reducer->finish();
      expect_gradients(ranked, communicator.rank(), wanted, whole());
      ranked.reducer->reset();
    }
  });
}

TEST_P(ReducerStates, APassAfterFinishAddsToWhatItHasReduced) {
  const auto wanted = expected(2, {{0, false}, {1, false}, {2, false}}, true);
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    Ranked ranked(communicator, options(), 60);
    for (int pass = 0; pass < 3; ++pass) {
      ranked.backward(communicator.rank(), pass, pass != 1, true, true);
      ranked.reducer->finish();
    }
    ranked.reducer->finish();
    expect_gradients(ranked, communicator.rank(), wanted, whole());
  });
}

// Keeps the buckets with an even number.
class EvenElsewhere final : public ReducedGradients {
 public:
  bool takes(size_t bucket) const override { return bucket % 2 == 0; }
  void add(size_t bucket, const at::Tensor& own) override {
    EXPECT_TRUE(takes(bucket));
    at::Tensor& sum = sums_[bucket];
    sum = sum.defined() ? sum + own : own.clone();
    ++additions;
  }
  at::Tensor gradient(size_t bucket) override { return sums_[bucket]; }
  void clear() override { sums_.clear(); }

  int additions = 0;

 private:
  std::map<size_t, at::Tensor> sums_;
};

TEST_P(ReducerStates, GradientsElsewhereLeaveTheirBuckets) {
  const auto wanted = expected(2, {{0, false}, {1, false}, {2, false}}, true);
  for (const bool in_backward : {false, true}) {
    test::run_ranks(2, [&](comm::Communicator& communicator) {
      EvenElsewhere elsewhere;
      ReducerOptions changed = options();
      changed.leave_in_backward = in_backward;
      Ranked ranked(ReduceRoutes{.slices = communicator, .elsewhere = &elsewhere}, changed, kSmallBuckets);
      for (int step = 0; step < 2; ++step) {
        elsewhere.additions = 0;
        for (int pass = 0; pass < 3; ++pass) ranked.backward(communicator.rank(), pass, pass != 1, pass > 0, true);
        const int per_pass = static_cast<int>(ranked.buckets.size() + 1) / 2;
        const bool every_pass = GetParam() == ReductionPolicy::kReduceScatterEveryBackward;
        const int before_finish = every_pass ? 2 : in_backward ? 1 : 0;
        EXPECT_EQ(elsewhere.additions, before_finish * per_pass);
        ranked.reducer->finish();
        EXPECT_EQ(elsewhere.additions, (every_pass ? 2 : 1) * per_pass);
        expect_gradients(ranked, communicator.rank(), wanted, whole());
        ranked.reducer->reset();
        EXPECT_FALSE(ranked.reducer->gradient(0).defined());
      }
    });
  }
}

TEST_P(ReducerStates, ReplicasAreJoinedOnce) {
  const auto wanted = expected(4, {{0, false}, {1, false}}, true);
  test::run_ranks(4, [&](comm::Communicator& communicator) {
    std::shared_ptr<comm::Communicator> slices;
    std::shared_ptr<comm::Communicator> replicas;
    for (const std::vector<int>& ranks : {std::vector<int>{0, 1}, std::vector<int>{2, 3}}) {
      if (auto group = communicator.new_group(ranks, "slices")) slices = group;
    }
    for (const std::vector<int>& ranks : {std::vector<int>{0, 2}, std::vector<int>{1, 3}}) {
      if (auto group = communicator.new_group(ranks, "replicas")) replicas = group;
    }
    Ranked ranked(ReduceRoutes{.slices = *slices, .replicas = replicas.get()}, options(), kSmallBuckets);
    for (int pass = 0; pass < 2; ++pass) ranked.backward(communicator.rank(), pass, true, pass == 1, true);
    const auto joins = [&] {
      return replicas->counters().calls[static_cast<size_t>(comm::CollectiveKind::kAllReduce)];
    };
    EXPECT_EQ(joins(), 0);
    for (int time = 0; time < 2; ++time) {
      ranked.reducer->finish();
      EXPECT_EQ(joins(), static_cast<int64_t>(ranked.buckets.size()));
      expect_gradients(ranked, slices->rank(), wanted, whole());
    }
    EXPECT_THROW(ranked.reducer->begin_backward(true, true), UsageError);
    ranked.reducer->reset();
    ranked.backward(communicator.rank(), 0, true, true, true);
    ranked.reducer->finish();
    EXPECT_EQ(joins(), 2 * static_cast<int64_t>(ranked.buckets.size())) << "once for each accumulation";
  });
}

// Of each bucket, whether a pass through the left branch gives it gradients.
std::vector<char> left_only(const Ranked& ranked) {
  std::vector<char> in_pass;
  for (const ParameterBucket& bucket : ranked.buckets)
    in_pass.push_back(!bucket.parameters().front().name.starts_with("right"));
  return in_pass;
}

const ReducerOptions kEveryPass = {.policy = ReductionPolicy::kReduceScatterEveryBackward};

TEST(ReducerInPass, OtherBucketsAreLeftAlone) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    Ranked ranked(communicator, kEveryPass, kSmallBuckets);
    const std::vector<char> left = left_only(ranked);
    for (int pass = 0; pass < 2; ++pass) ranked.backward(communicator.rank(), pass, true, pass == 1, true, left);
    ranked.reducer->finish();
    const int64_t reductions = communicator.counters().calls[static_cast<size_t>(comm::CollectiveKind::kReduceScatter)];
    EXPECT_EQ(reductions, 2 * 6);
    for (size_t b = 0; b < left.size(); ++b) EXPECT_EQ(ranked.reducer->gradient(b).defined(), left[b] == 1);
  });
}

TEST(ReducerInPass, AGradientOfAnotherBucketIsADefect) {
  test::run_ranks(1, [&](comm::Communicator& communicator) {
    EvenElsewhere elsewhere;  // with it, one rank reduces in every pass too
    Ranked ranked(ReduceRoutes{.slices = communicator, .elsewhere = &elsewhere}, kEveryPass, kSmallBuckets);
    ranked.reducer->begin_backward(true, true, left_only(ranked));
    EXPECT_THROW(ranked.net->forward(test::input(0, 0), false).backward(), InternalError);
    ranked.reducer->abandon_backward();
    ranked.reducer->reset();
  });
}

TEST(ReducerInPass, WhatPassesBeforeItHaveNotReducedIsReducedWithIt) {
  const auto wanted = expected(2, {{0, true}, {1, false}}, true);
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    Ranked ranked(communicator, kEveryPass, kSmallBuckets);
    ranked.backward(communicator.rank(), 0, false, false, communicator.rank() == 0);
    ranked.backward(communicator.rank(), 1, true, true, true, left_only(ranked));
    ranked.reducer->finish();
    expect_gradients(ranked, communicator.rank(), wanted, /*whole=*/false);
  });
}

TEST(ReducerStatesAlone, GradientsThatAreReducedAreNotKeptLocal) {
  test::run_ranks(1, [&](comm::Communicator& communicator) {
    Ranked ranked(communicator, {}, kSmallBuckets);
    ranked.backward(0, 0, true, true, true);
    EXPECT_THAT([&] { ranked.reducer->keep_local(true); }, ThrowsMessage<UsageError>(HasSubstr("zero_grad()")));
    ranked.reducer->reset();
    ranked.reducer->keep_local(true);
    EXPECT_TRUE(ranked.reducer->keeps_local());
  });
}

TEST(GradientBucket, AnEventOutOfTurnIsADefectAndChangesNothing) {
  test::run_ranks(1, [&](comm::Communicator& communicator) {
    const Ranked ranked(communicator, {}, kSmallBuckets);
    const GradientExchange exchange(ReduceRoutes{communicator}, {});
    BufferPool buffers;
    GradientBucket bucket(0, ranked.buckets[0], exchange, buffers);
    EXPECT_EQ(bucket.state(), BucketState::kEmpty);
    EXPECT_THROW(bucket.complete(), InternalError);
    EXPECT_THROW(bucket.set_aside(), InternalError);
    EXPECT_THROW(bucket.join_sum(), InternalError);
    bucket.launch();  // nothing collected: zeros
    EXPECT_EQ(bucket.state(), BucketState::kInFlight);
    EXPECT_THROW(bucket.launch(), InternalError);
    EXPECT_THROW(bucket.set_aside(), InternalError);
    bucket.complete();
    EXPECT_EQ(bucket.state(), BucketState::kReduced);
    EXPECT_FALSE(bucket.gradient().any().item<bool>());
    EXPECT_THROW(bucket.release(), InternalError);
    bucket.set_aside();
    EXPECT_EQ(bucket.state(), BucketState::kEmpty);
    EXPECT_TRUE(bucket.has_sum());
    bucket.reset();
    EXPECT_FALSE(bucket.has_sum());
    bucket.release();
  });
}

}  // namespace
}  // namespace ds::zero
