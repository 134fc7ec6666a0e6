// 2-D parallelism: fully_shard along one axis of a mesh over what parallelize_module has split along another one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "dsengine/fully_shard.h"
#include "dsengine/grad_scaler.h"
#include "dsengine/parallel.h"
#include "dsengine/zero.h"
#include "tests/loops/block_net.h"
#include "tests/loops/split_trainee.h"
#include "tests/support/thread_ranks.h"

namespace ds::split_shards {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

struct Curve {
  std::vector<double> losses, norms;
  test::NamedValues weights;
};

Curve plain_curve(const test::MakeOptimizer& make, int data_ranks = kDataRanks, bool freezes = false) {
  Curve curve;
  test::BlockNet model;
  if (freezes) freeze_some(model);
  test::Tensors trained;
  for (const at::Tensor& parameter : model->parameters()) {
    if (parameter.requires_grad()) trained.push_back(parameter);
  }
  const auto optimizer = make(trained);
  for (int step = 0; step < kSteps; ++step) {
    const at::Tensor loss = model->loss(test::joined_batch(step, data_ranks));
    loss.backward();
    curve.losses.push_back(loss.item<double>());
    curve.norms.push_back(torch::nn::utils::clip_grad_norm_(trained, kMaxNorm));
    optimizer->step();
    optimizer->zero_grad();
  }
  curve.weights = test::state_values(*model);
  return curve;
}

void expect_curve(Trainee& own, const test::MakeOptimizer& make, const Curve& expected) {
  const auto optimizer = make(own.sharded->parameters());
  for (int step = 0; step < kSteps; ++step) {
    EXPECT_NEAR(own.backward(step), expected.losses[static_cast<size_t>(step)], kTolerance) << "step " << step;
    const double norm = expected.norms[static_cast<size_t>(step)];
    EXPECT_NEAR(own.sharded->clip_grad_norm_(kMaxNorm), norm, 2e-5 * norm) << "step " << step;
    optimizer->step();
    optimizer->zero_grad();
  }
  EXPECT_LT(test::largest_difference(own.sharded->full_state_dict(), expected.weights), kTolerance);
  EXPECT_EQ(own.sharded->held_bytes().gathered, 0);
}

// --- numbers
// -----------------------------------------------------------------------------------------------------------

TEST(SplitShards, LossesNormsAndWeightsAreThoseOfTorch) {
  for (const size_t number : {0, 2}) {
    const auto [name, make] = test::optimizers()[number];
    const Curve expected = plain_curve(make);
    for (const bool reshards : {true, false}) {
      SCOPED_TRACE(name + (reshards ? ", parameters go after forward" : ", parameters stay"));
      test::run_ranks(kWorld, [&, make = make](comm::Communicator& world) {
        Trainee own(world, {.options = {.reshard_after_forward = reshards}});
        expect_curve(own, make, expected);
        // Of the net's columns that are split; all else works on parts.
        const auto joined = own.split.joined_operators();
        ASSERT_EQ(joined.size(), 1U);
        EXPECT_EQ(joined[0].name, "aten::layer_norm");
      });
    }
  }
}

TEST(SplitShards, PartsOfSequencesAddUpTheirGradients) {
  const test::MakeOptimizer make = test::optimizers()[2].second;
  const Curve expected = plain_curve(make);
  test::run_ranks(kWorld, [&](comm::Communicator& world) {
    Trainee own(world, {.sequences = true});
    EXPECT_FALSE(own.split.summed_leaves().empty());
    expect_curve(own, make, expected);
  });
}

TEST(SplitShards, CopiesAndFrozenParametersToo) {
  const test::MakeOptimizer make = test::optimizers()[0].second;
  const Curve expected = plain_curve(make, 4, /*freezes=*/true);
  test::run_ranks(8, [&](comm::Communicator& world) {
    Trainee own(world, {.freezes = true, .shape = {2, 2, 2}});
    EXPECT_EQ(own.sharded->parameters().size(), 20U);
    expect_curve(own, make, expected);
    const StateDict full = own.sharded->full_state_dict();
    own.sharded->load_full_state_dict(full, /*broadcast_from_rank0=*/true);
    EXPECT_EQ(test::largest_difference(own.sharded->full_state_dict(), full), 0);
  });
}

TEST(SplitShards, NormsOfEveryKindAreThoseOfTheWholeModel) {
  for (const double p : {1.0, 2.0, std::numeric_limits<double>::infinity()}) {
    test::BlockNet plain;
    plain->loss(test::joined_batch(0, kDataRanks)).backward();
    const double expected = torch::nn::utils::clip_grad_norm_(plain->parameters(), 0.01, p);
    test::run_ranks(kWorld, [&](comm::Communicator& world) {
      Trainee own(world);
      own.backward(0);
      EXPECT_NEAR(own.sharded->clip_grad_norm_(0.01, p), expected, 1e-5 * expected);
      EXPECT_NEAR(own.sharded->clip_grad_norm_(1e9, p), 0.01, 1e-6);
    });
  }
}

// Against slices of whole parameters, in the same dtypes.
TEST(SplitShards, Bfloat16IsThatOfWholeParameters) {
  const test::MakeOptimizer make = test::optimizers()[0].second;
  const MixedPrecisionPolicy policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
  StateDict expected;
  test::run_ranks(kDataRanks, [&](comm::Communicator& ranks) {
    test::BlockNet model;
    const auto sharded = fully_shard(model, {.process_group = test::borrowed(ranks), .mp_policy = policy});
    const auto optimizer = make(sharded->parameters());
    test::train(model, *optimizer, ranks.rank(), kSteps);
    const StateDict state = sharded->full_state_dict();
    if (ranks.rank() == 0) expected = state;
  });
  test::run_ranks(kWorld, [&](comm::Communicator& world) {
    Trainee own(world, {.options = {.mp_policy = policy}});
    const auto optimizer = make(own.sharded->parameters());
    own.train(*optimizer, 0, kSteps);
    EXPECT_EQ(own.model->blocks[0]->up->weight.scalar_type(), at::kBFloat16);
    EXPECT_LT(test::largest_difference(own.sharded->full_state_dict(), expected), 5e-3);
  });
}

TEST(SplitShards, BetweenStepsARankHoldsSlicesOfItsParts) {
  test::run_ranks(kWorld, [](comm::Communicator& world) {
    Trainee own(world);
    int64_t elements = 0;
    for (const at::Tensor& leaf : own.split.leaves()) elements += leaf.numel();
    EXPECT_LT(elements, 420);  // of 653
    own.backward(0);
    const zero::HeldBytes held = own.sharded->held_bytes();
    const int64_t padding = 22 * 16 + 7 * 32;  // elements, at most: of parameters, and of buckets
    EXPECT_LE(held.parameters + held.master, (elements + padding) * 4 / kDataRanks);
    EXPECT_LE(held.gradients, (elements + padding) * 4 / kDataRanks);
  });
}

// An infinite gradient in one rank's slice of its part alone: no rank takes the step.
TEST(SplitShards, ScalersAgreeOverBothAxes) {
  test::run_ranks(kWorld, [](comm::Communicator& world) {
    Trainee own(world);
    torch::optim::SGD optimizer(own.sharded->parameters(), 0.1);
    engine::GradScaler scaler({.init_scale = 8});
    scaler.scale(own.model->loss(test::batch_of(0, own.data.get_local_rank()))).backward();
    if (world.rank() == 3) {
      for (const auto& [name, slice] : own.sharded->named_parameters()) {
        if (name != "block0.down.weight") continue;
        EXPECT_GT(slice.numel(), 0);
        slice.mutable_grad().fill_(std::numeric_limits<float>::infinity());
      }
    }
    EXPECT_FALSE(scaler.step(optimizer));
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), 4);
  });
}

// --- misuse
// ------------------------------------------------------------------------------------------------------------

TEST(SplitShardsMisuse, AMeshThatDoesNotFitIsRefusedByName) {
  test::run_ranks(kWorld, [](comm::Communicator& world) {
    const auto group = test::borrowed(world);
    const auto mesh = comm::init_device_mesh(group, {2, 2}, {"dp", "tp"});
    const auto other = comm::init_device_mesh(group, {2, 2}, {"dp", "tp"});
    const auto outermost = comm::init_device_mesh(group, {2, 2}, {"tp", "dp"});
    const auto expect_refused = [](const comm::NamedMesh& axis, const FullyShardOptions& options,
                                   const std::string& what) {
      test::BlockNet model;
      const auto split = parallel::parallelize_module(*model, axis, rules());
      EXPECT_THAT(
          [&] { fully_shard(model, options); },
          ThrowsMessage<ConfigError>(AllOf(HasSubstr("fully_shard"), HasSubstr(what), HasSubstr(R"(mesh["dp"])"))));
    };
    expect_refused(mesh["tp"], {.process_group = mesh["dp"]}, "expected .mesh, the data-parallel axis");
    expect_refused(mesh["tp"], {.mesh = other["dp"]}, "expected a mesh with them along another axis, found dp 2");
    expect_refused(mesh["tp"], {.mesh = mesh["tp"]}, "found tp 2, beside which there is no such axis");
    expect_refused(mesh["tp"], {.mesh = mesh}, "beside which there is no such axis");
    expect_refused(outermost["tp"], {.mesh = outermost["dp"]}, "as the innermost of tp 2 x dp 2");
  });
}

TEST(SplitShardsMisuse, WhatTrainsNothingOrIsOtherwiseOnARankIsNamed) {
  test::run_ranks(kWorld, [](comm::Communicator& world) {
    {
      Trainee own(world);
      torch::optim::SGD of_leaves(own.split.leaves(), 0.1);
      own.backward(0);
      EXPECT_THAT([&] { of_leaves.step(); },
                  ThrowsMessage<c10::Error>(AllOf(HasSubstr("enter.weight"), HasSubstr("sharded->parameters()"))));
      const at::Tensor& leaf = own.split.named_leaves[2].second;
      leaf.set_data(torch::zeros(leaf.sizes()));
      EXPECT_THAT([&] { own.backward(1); },
                  ThrowsMessage<UsageError>(HasSubstr("block0.up.weight: expected it where")));
    }
    const auto mesh = comm::init_device_mesh(test::borrowed(world), {2, 2}, {"dp", "tp"});
    test::BlockNet model;
    const int dp = mesh.get_local_rank("dp");
    const auto split = parallel::parallelize_module(
        *model, mesh["tp"], {{.pattern = dp == 0 ? ".*up" : ".*down", .style = parallel::Style::kColumn}});
    EXPECT_THAT([&] { fully_shard(model, {.mesh = mesh["dp"]}); },
                ThrowsMessage<CommError>(AllOf(HasSubstr("parameter block0."), HasSubstr("cut along dimension 0"))));
    test::BlockNet other;
    const auto split_too = parallel::parallelize_module(*other, mesh["tp"], rules());
    zero::Init init(mesh["dp"], {.max_live = 100, .smallest = 8});
    EXPECT_THAT([&] { fully_shard(other, {.mesh = mesh["dp"], .init = &init}); },
                ThrowsMessage<ConfigError>(HasSubstr("fully_shard: .init: expected none")));
    init.end();
    auto meta = std::make_shared<torch::nn::Module>("Meta");
    meta->register_parameter("weight", torch::empty({4, 4}, torch::dtype(torch::kFloat).device(at::kMeta)));
    EXPECT_THAT([&] { parallel::parallelize_module(*meta, mesh["tp"], {{.pattern = "weight"}}); },
                ThrowsMessage<UsageError>(HasSubstr("parameter weight is on the meta device")));
  });
}

}  // namespace
}  // namespace ds::split_shards
