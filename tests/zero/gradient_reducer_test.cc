#include "zero/reduction/gradient_reducer.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "core/check.h"
#include "tests/support/thread_ranks.h"
#include "tests/zero/ranked_net.h"
#include "zero/square_sum.h"

namespace ds::zero {
namespace {

using test::expect_gradients;
using test::expected;
using test::input;
using test::parameters_of;
using test::Ranked;

struct Case {
  ReductionPolicy policy;
  int world;
  int64_t max_bucket;
  bool overlap;
};

class ReducerTest : public testing::TestWithParam<Case> {
 protected:
  ReducerOptions options() const { return {.policy = GetParam().policy, .overlap = GetParam().overlap}; }
  bool whole() const { return GetParam().policy == ReductionPolicy::kAllReduce; }
};

TEST_P(ReducerTest, AveragesOneBackward) {
  const auto wanted = expected(GetParam().world, {{0, false}}, true);
  test::run_ranks(GetParam().world, [&](comm::Communicator& communicator) {
    Ranked ranked(communicator, options(), GetParam().max_bucket);
    for (int step = 0; step < 3; ++step) {
      ranked.backward(communicator.rank(), 0, true, true, true);
      ranked.reducer->finish();
      expect_gradients(ranked, communicator.rank(), wanted, whole());
      EXPECT_EQ(ranked.reducer->parameters_without_gradient().size(), 2U) << "right.weight and right.bias are unused";
      ranked.reducer->reset();
    }
  });
}

TEST_P(ReducerTest, AccumulatesMicroBatches) {
  const auto wanted = expected(GetParam().world, {{0, false}, {1, false}, {2, false}}, true);
  test::run_ranks(GetParam().world, [&](comm::Communicator& communicator) {
    Ranked ranked(communicator, options(), GetParam().max_bucket);
    for (int pass = 0; pass < 3; ++pass) ranked.backward(communicator.rank(), pass, true, pass == 2, true);
    ranked.reducer->finish();
    expect_gradients(ranked, communicator.rank(), wanted, whole());
  });
}

TEST_P(ReducerTest, SeveralReducedBackwardsAddUp) {
  const auto wanted = expected(GetParam().world, {{0, false}, {1, false}, {2, false}}, true);
  test::run_ranks(GetParam().world, [&](comm::Communicator& communicator) {
    Ranked ranked(communicator, options(), GetParam().max_bucket);
    for (int step = 0; step < 2; ++step) {
      for (int pass = 0; pass < 3; ++pass) ranked.backward(communicator.rank(), pass, true, true, true);
      ranked.reducer->finish();
      expect_gradients(ranked, communicator.rank(), wanted, whole());
      ranked.reducer->reset();
    }
  });
}

TEST_P(ReducerTest, PassesWithoutSynchronisationAreReducedLater) {
  const auto wanted = expected(GetParam().world, {{0, false}, {1, false}, {2, false}}, true);
  test::run_ranks(GetParam().world, [&](comm::Communicator& communicator) {
    for (int synchronized : {0, 1, 2, -1}) {  // -1: none, finish() has to reduce
      Ranked ranked(communicator, options(), GetParam().max_bucket);
      for (int pass = 0; pass < 3; ++pass) ranked.backward(communicator.rank(), pass, pass == synchronized, true, true);
      ranked.reducer->finish();
      expect_gradients(ranked, communicator.rank(), wanted, whole());
    }
  });
}

TEST_P(ReducerTest, RanksMayUseDifferentParameters) {
  const auto wanted = expected(GetParam().world, {{0, true}, {1, false}}, true);
  test::run_ranks(GetParam().world, [&](comm::Communicator& communicator) {
    Ranked ranked(communicator, options(), GetParam().max_bucket);
    ranked.backward(communicator.rank(), 0, true, false, communicator.rank() == 0);
    ranked.backward(communicator.rank(), 1, true, true, true);
    ranked.reducer->finish();
    expect_gradients(ranked, communicator.rank(), wanted, whole());
  });
}

TEST_P(ReducerTest, ScalingVariants) {
  const auto average = expected(GetParam().world, {{0, false}}, true);
  const auto sum = expected(GetParam().world, {{0, false}}, false);
  test::run_ranks(GetParam().world, [&](comm::Communicator& communicator) {
    for (int variant = 0; variant < 3; ++variant) {
      ReducerOptions changed = options();
      changed.prescale = variant == 0;
      changed.predivide_factor = variant == 1 ? 4.0 : 1.0;
      changed.average = variant != 2;
      Ranked ranked(communicator, changed, GetParam().max_bucket);
      ranked.backward(communicator.rank(), 0, true, true, true);
      ranked.reducer->finish();
      expect_gradients(ranked, communicator.rank(), variant == 2 ? sum : average, whole());
    }
  });
}

// The sum of ranks is beyond float16, their mean is not.
TEST_P(ReducerTest, PredivisionIsUndoneBeforeTheGradientNarrows) {
  const auto wanted = expected(GetParam().world, {{0, false}}, true);
  test::run_ranks(GetParam().world, [&](comm::Communicator& communicator) {
    ReducerOptions changed = options();
    changed.gradient_dtype = at::kHalf;
    changed.predivide_factor = 1.0 / 65536;
    Ranked ranked(communicator, changed, GetParam().max_bucket);
    ranked.backward(communicator.rank(), 0, true, true, true);
    ranked.reducer->finish();
    expect_gradients(ranked, communicator.rank(), wanted, whole(), 4e-3);
  });
}

std::string name_of(const testing::TestParamInfo<Case>& info) {
  const char* policies[] = {"Stage0", "Stage1", "Stage2"};
  return std::string(policies[static_cast<int>(info.param.policy)]) + "Ranks" + std::to_string(info.param.world) +
         "Bucket" + std::to_string(info.param.max_bucket) + (info.param.overlap ? "Overlap" : "After");
}

std::vector<Case> cases() {
  std::vector<Case> result;
  for (auto policy : {ReductionPolicy::kAllReduce, ReductionPolicy::kReduceScatterAtBoundary,
                      ReductionPolicy::kReduceScatterEveryBackward}) {
    for (int world : {1, 2, 3}) {
      for (int64_t bucket : {1, 60, 100000}) result.push_back({policy, world, bucket, true});
    }
    result.push_back({policy, 2, 60, false});
  }
  return result;
}

INSTANTIATE_TEST_SUITE_P(Policies, ReducerTest, testing::ValuesIn(cases()), name_of);

TEST(Reducer, OverlapChangesNoBit) {
  for (auto policy : {ReductionPolicy::kAllReduce, ReductionPolicy::kReduceScatterAtBoundary,
                      ReductionPolicy::kReduceScatterEveryBackward}) {
    std::vector<at::Tensor> results[2];
    for (bool overlap : {false, true}) {
      test::run_ranks(3, [&](comm::Communicator& communicator) {
        Ranked ranked(communicator, {.policy = policy, .overlap = overlap}, 60);
        for (int pass = 0; pass < 2; ++pass) ranked.backward(communicator.rank(), pass, true, pass == 1, true);
        ranked.reducer->finish();
        if (communicator.rank() != 1) return;
        for (size_t b = 0; b < ranked.buckets.size(); ++b)
          results[overlap].push_back(ranked.reducer->gradient(b).clone());
      });
    }
    ASSERT_EQ(results[0].size(), results[1].size());
    for (size_t b = 0; b < results[0].size(); ++b) EXPECT_TRUE(torch::equal(results[0][b], results[1][b]));
  }
}

TEST(Reducer, Stage2HoldsTheBucketThatFillsAndTwoOnTheirWay) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    torch::nn::Sequential net;
    for (int layer = 0; layer < 8; ++layer) net->push_back(torch::nn::Linear(16, 16));
    const auto parameters = parameters_of(*net);
    std::vector<LayoutParameter> shapes;
    for (const Parameter& parameter : parameters) shapes.push_back({parameter.name, parameter.tensor.numel()});
    std::vector<ParameterBucket> buckets;
    int64_t slices = 0;
    for (BucketLayout& layout : lay_out(shapes, {.world_size = 2, .max_bucket_elements = 272})) {
      slices += layout.slice_numel;
      const at::Tensor values = flatten(layout, parameters, at::kFloat);
      buckets.emplace_back(std::move(layout), parameters, values, at::kFloat);
    }
    ASSERT_EQ(buckets.size(), 8U);
    GradientReducer reducer(buckets, parameters, ReduceRoutes{communicator},
                            {.policy = ReductionPolicy::kReduceScatterEveryBackward});
    for (int pass = 0; pass < 4; ++pass) {
      reducer.begin_backward(true, pass == 3);
      net->forward(torch::ones({2, 16})).sum().backward();
      reducer.end_backward();
    }
    reducer.finish();
    EXPECT_LE(reducer.take_peak_bytes(), (3 * buckets[0].layout().numel + slices) * 4);
  });
}

TEST(Reducer, BackwardOutsideOfTheEngineIsAnError) {
  test::run_ranks(1, [&](comm::Communicator& communicator) {
    Ranked ranked(communicator, {}, 100000);
    EXPECT_THROW(ranked.net->forward(input(0, 0), true).backward(), UsageError);
  });
}

TEST(GradientNorm, SumsInDoubleAndSeesWhatIsNotFinite) {
  const at::Tensor values = torch::linspace(-3, 5, 200003);
  EXPECT_NEAR(sum_of_squares(values), values.to(at::kDouble).square().sum().item<double>(), 1e-7);
  EXPECT_NEAR(sum_of_squares(values.to(at::kBFloat16)),
              values.to(at::kBFloat16).to(at::kDouble).square().sum().item<double>(), 1e-7);
  at::Tensor bad = values.clone();
  EXPECT_EQ(first_non_finite(bad), -1);
  bad[170000] = std::numeric_limits<float>::infinity();
  EXPECT_FALSE(std::isfinite(sum_of_squares(bad)));
  EXPECT_EQ(first_non_finite(bad), 170000);
  bad[170000] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_FALSE(std::isfinite(sum_of_squares(bad)));
}

}  // namespace
}  // namespace ds::zero
