// Whole programs on the engine against their plain LibTorch loops over the same global batches.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/porting/programs.h"
#include "tests/support/grid.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

// At stage 3 parameters are released after each use.
Config zero_of(int stage) {
  Config zero = {{"stage", stage}, {"reduce_bucket_size", 1000}};
  if (stage == 3) {
    zero["stage3_param_persistence_threshold"] = 0;
    zero["stage3_max_reuse_distance"] = 0;
    zero["stage3_gather_16bit_weights_on_model_save"] = true;
  }
  return zero;
}

using Training = std::function<Losses(comm::Communicator&, const Config& zero)>;

// The means over ranks.
Losses train_on_ranks(const Training& training, int world, int stage) {
  at::Tensor means;
  test::run_ranks(world, [&](comm::Communicator& communicator) {
    const Losses own = training(communicator, zero_of(stage));
    const at::Tensor sums = torch::tensor(own, torch::kDouble);
    if (world > 1) communicator.all_reduce(sums, comm::ReduceOp::kSum, "losses of the test").wait();
    if (communicator.rank() == 0) means = sums / world;
  });
  const auto* const values = means.const_data_ptr<double>();
  return {values, values + means.numel()};
}

double difference(double a, double b) { return std::abs(a - b) / std::max(std::abs(b), 1e-3); }

// The largest relative difference of a loss.
double distance(const Losses& a, const Losses& b) {
  EXPECT_EQ(a.size(), b.size());
  double largest = a.size() == b.size() ? 0.0 : 1e9;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) largest = std::max(largest, difference(a[i], b[i]));
  return largest;
}

using Cell = std::tuple<size_t, int, int>;  // program, ranks, stage

std::string name_of(const ::testing::TestParamInfo<Cell>& cell) {
  const auto [program, world, stage] = cell.param;
  return all_programs()[program].name + "Ranks" + std::to_string(world) + "Stage" + std::to_string(stage);
}

class Programs : public ::testing::TestWithParam<Cell> {};

TEST_P(Programs, TrainAsThePlainLoop) {
  const auto [place, world, stage] = GetParam();
  const Program& program = all_programs()[place];
  static std::map<std::pair<size_t, int>, Losses> plain;  // of some programs the losses depend on the ranks
  const auto [known, is_new] = plain.try_emplace({place, world});
  if (is_new) known->second = program.train_plainly(world);
  const Losses& expected = known->second;
  const auto [low, high] = std::minmax_element(expected.begin(), expected.end() - 1);  // the last may be of weights
  ASSERT_GT(*high - *low, 1e-3) << "the losses say nothing of the training";
  Losses losses = train_on_ranks(program.train_on_engine, world, stage);
  ASSERT_EQ(losses.size(), expected.size());
  // The last number may be a sum of weights. AdamW moves those whose gradient is rounding alone, such as the biases of
  // attention's keys, as far as all others, in a direction that rounding chooses.
  constexpr double kOfWeights = 2e-5;
  EXPECT_LE(difference(losses.back(), expected.back()), std::max(program.tolerance, kOfWeights)) << "the last number";
  losses.back() = expected.back();
  const double found = distance(losses, expected);
  RecordProperty("distance", std::to_string(found));
  EXPECT_LE(found, program.tolerance);
}

// 12 cells of a program. The sample has each program on each number of ranks and at each stage.
std::vector<Cell> cells() {
  std::vector<size_t> places(all_programs().size());
  std::iota(places.begin(), places.end(), size_t{0});
  return test::grid_sample(2, places, std::vector<int>{1, 2, 4}, std::vector<int>{0, 1, 2, 3});
}

INSTANTIATE_TEST_SUITE_P(Grid, Programs, ::testing::ValuesIn(cells()), name_of);

class BatchNorm : public ::testing::TestWithParam<int> {};

// Dividing by the spread of a small batch makes rounding grow, in a plain loop as well.
TEST_P(BatchNorm, IsTheSameAtAllStagesAndAsNearToThePlainLoopAsThatIsToItself) {
  const int world = GetParam();
  const Losses expected = train_batch_norm_plainly(world, 0);
  double to_itself = 0;
  for (int order = 1; order <= 3; ++order) {
    to_itself = std::max(to_itself, distance(train_batch_norm_plainly(world, order), expected));
  }
  const Losses first = train_on_ranks(train_batch_norm_on_engine, world, 0);
  for (const int stage : {1, 2, 3}) EXPECT_EQ(train_on_ranks(train_batch_norm_on_engine, world, stage), first) << stage;
  constexpr double kRounding = 1e-6;  // where it has not grown
  EXPECT_LE(distance(first, expected), std::max(to_itself, kRounding)) << "the plain loop to itself: " << to_itself;
}

INSTANTIATE_TEST_SUITE_P(Ranks, BatchNorm, ::testing::Values(2, 4));

}  // namespace
}  // namespace ds::engine
