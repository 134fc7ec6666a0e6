// What is kept of a model that is split and sharded, and what goes on from it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "tests/loops/split_trainee.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"

namespace ds::split_shards {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr int kBefore = 4;  // steps

struct Saved {
  StateDict weights, states;                       // full
  std::vector<ShardedTensor> weight_parts, parts;  // of all ranks
};

Saved saved_by(const test::MakeOptimizer& make, const std::string& folder) {
  Saved saved;
  std::mutex mutex;
  test::run_ranks(kWorld, [&](comm::Communicator& world) {
    Trainee own(world, {.freezes = true});
    const auto optimizer = make(own.sharded->parameters());
    own.train(*optimizer, 0, kBefore);
    own.sharded->save(folder, "saved", *optimizer);
    const StateDict weights = own.sharded->full_state_dict();
    const StateDict states = own.sharded->full_optim_state_dict(*optimizer);
    EXPECT_EQ(own.sharded->full_state_dict({.rank0_only = true}).empty(), world.rank() != 0);
    EXPECT_EQ(own.sharded->full_optim_state_dict(*optimizer, {.rank0_only = true}).empty(), world.rank() != 0);
    const std::lock_guard lock(mutex);
    for (auto& part : own.sharded->sharded_state_dict()) saved.weight_parts.push_back(std::move(part));
    for (auto& part : own.sharded->sharded_optim_state_dict(*optimizer)) saved.parts.push_back(std::move(part));
    if (world.rank() == 0) {
      saved.weights = weights;
      saved.states = states;
    }
  });
  return saved;
}

using Load = std::function<void(FullySharded&, torch::optim::Optimizer&, bool first)>;

// With parts, and on two ranks with whole parameters.
void expect_goes_on(const test::MakeOptimizer& make, const test::NamedValues& expected, const Load& load) {
  test::run_ranks(kWorld, [&](comm::Communicator& world) {
    Trainee own(world, {.freezes = true});
    const auto optimizer = make(own.sharded->parameters());
    own.train(*optimizer, 20, 1);  // states and weights of something else
    load(*own.sharded, *optimizer, world.rank() == 0);
    own.train(*optimizer, kBefore, kSteps - kBefore);
    EXPECT_LT(test::largest_difference(own.sharded->full_state_dict(), expected), kTolerance);
  });
  test::run_ranks(kDataRanks, [&](comm::Communicator& ranks) {
    test::BlockNet model;
    freeze_some(model);
    const auto sharded = fully_shard(model, {.process_group = test::borrowed(ranks)});
    const auto optimizer = make(sharded->parameters());
    load(*sharded, *optimizer, ranks.rank() == 0);
    for (int step = kBefore; step < kSteps; ++step) {
      model->loss(test::batch_of(step, ranks.rank())).backward();
      optimizer->step();
      optimizer->zero_grad();
    }
    EXPECT_LT(test::largest_difference(sharded->full_state_dict(), expected), kTolerance);
  });
}

// No clipping.
test::NamedValues plain_weights(const test::MakeOptimizer& make) {
  test::BlockNet model;
  freeze_some(model);
  test::Tensors trained;
  for (const at::Tensor& parameter : model->parameters()) {
    if (parameter.requires_grad()) trained.push_back(parameter);
  }
  const auto optimizer = make(trained);
  for (int step = 0; step < kSteps; ++step) {
    model->loss(test::joined_batch(step, kDataRanks)).backward();
    optimizer->step();
    optimizer->zero_grad();
  }
  return test::named_values(*model);
}

TEST(SplitShardsState, TrainingGoesOnFromEachWayToKeepItWithPartsAndWithWholes) {
  for (const size_t number : {0, 2}) {
    const auto [name, make] = test::optimizers()[number];
    SCOPED_TRACE(name);
    const test::ScratchFolder folder;
    const test::NamedValues expected = plain_weights(make);
    const Saved saved = saved_by(make, folder.path().string());
    expect_goes_on(make, expected, [&](FullySharded& sharded, torch::optim::Optimizer& optimizer, bool) {
      sharded.load(folder.path().string(), "saved", optimizer);
    });
    expect_goes_on(make, expected, [&](FullySharded& sharded, torch::optim::Optimizer& optimizer, bool first) {
      sharded.load_full_state_dict(saved.weights);
      sharded.load_full_optim_state_dict(optimizer, first ? saved.states : StateDict(), true);
    });
    expect_goes_on(make, expected, [&](FullySharded& sharded, torch::optim::Optimizer& optimizer, bool) {
      sharded.load_sharded_state_dict(saved.weight_parts);
      sharded.load_sharded_optim_state_dict(optimizer, saved.parts);
    });
  }
}

TEST(SplitShardsState, WhatWholesHaveKeptIsTakenInParts) {
  const test::MakeOptimizer make = test::optimizers()[2].second;
  const test::ScratchFolder folder;
  const test::NamedValues expected = plain_weights(make);
  test::run_ranks(kDataRanks, [&](comm::Communicator& ranks) {
    test::BlockNet model;
    freeze_some(model);
    const auto sharded = fully_shard(model, {.process_group = test::borrowed(ranks)});
    const auto optimizer = make(sharded->parameters());
    test::train(model, *optimizer, ranks.rank(), kBefore);
    sharded->save(folder.path().string(), "saved", *optimizer);
  });
  expect_goes_on(make, expected, [&](FullySharded& sharded, torch::optim::Optimizer& optimizer, bool) {
    sharded.load(folder.path().string(), "saved", optimizer);
  });
}

TEST(SplitShardsState, NamesShapesAndValuesAreThoseOfTheModule) {
  test::run_ranks(kWorld, [](comm::Communicator& world) {
    Trainee own(world);
    test::BlockNet plain;
    const StateDict full = own.sharded->full_state_dict();
    size_t i = 0;
    const auto expect_next = [&](const std::string& name, const at::Tensor& value) {
      EXPECT_EQ(full[i].first, name);
      EXPECT_TRUE(full[i++].second.equal(value)) << name;
    };
    for (const auto& item : plain->named_parameters()) expect_next(item.key(), item.value());
    for (const auto& item : plain->named_buffers()) expect_next(item.key(), item.value());
    EXPECT_EQ(i, full.size());
    const StateDict local = own.sharded->local_state_dict();
    torch::optim::SGD optimizer(own.sharded->parameters(), 0.1);
    own.train(optimizer, 0, 1);
    own.sharded->load_local_state_dict(local);
    EXPECT_EQ(test::largest_difference(own.sharded->full_state_dict(), full), 0);
    EXPECT_THAT([&] { own.sharded->load_sharded_state_dict({}); },
                ThrowsMessage<UsageError>(HasSubstr("expected parts with all of its elements")));
    StateDict other = full;
    other[2].second = torch::zeros({7, 6});  // a part
    EXPECT_THAT([&] { own.sharded->load_full_state_dict(other); },
                ThrowsMessage<UsageError>(AllOf(HasSubstr("block0.up.weight"), HasSubstr("[13, 6]"))));
  });
}

}  // namespace
}  // namespace ds::split_shards
