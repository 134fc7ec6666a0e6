// What fully_shard saves and loads, its units, and what it says of misuse.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <vector>

#include "core/check.h"
#include "dsengine/checkpoint.h"
#include "dsengine/fully_shard.h"
#include "tests/loops/block_net.h"
#include "tests/loops/shortened_table.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"

namespace ds {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

std::shared_ptr<FullySharded> shard(test::BlockNet& model, comm::Communicator& communicator) {
  for (test::Block& block : model->blocks) fully_shard(block, {.process_group = test::borrowed(communicator)});
  return fully_shard(model, {.process_group = test::borrowed(communicator)});
}

void train_some(FullySharded& sharded, test::BlockNet& model, int rank, int steps = 3) {
  torch::optim::SGD optimizer(sharded.parameters(), 0.1);
  test::train(model, optimizer, rank, steps);
}

struct Trained {
  StateDict state;                   // full
  std::vector<ShardedTensor> parts;  // of all ranks
};

// Another model than a new one.
Trained trained_by(int ranks, const std::string& folder = "") {
  Trained result;
  std::mutex mutex;
  test::run_ranks(ranks, [&](comm::Communicator& communicator) {
    test::BlockNet model;
    const auto sharded = shard(model, communicator);
    train_some(*sharded, model, communicator.rank());
    const StateDict state = sharded->full_state_dict();
    if (!folder.empty()) sharded->save(folder, "step3");
    const std::lock_guard lock(mutex);
    if (communicator.rank() == 0) result.state = state;
    for (ShardedTensor& part : sharded->sharded_state_dict()) result.parts.push_back(std::move(part));
  });
  return result;
}

void expect_equal(const StateDict& found, const StateDict& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) {
    EXPECT_EQ(found[i].first, expected[i].first);
    EXPECT_TRUE(found[i].second.equal(expected[i].second)) << found[i].first;
  }
}

// `load` into a new model of `ranks` ranks; the next forward has the values too.
void expect_loads(int ranks, const StateDict& expected,
                  const std::function<void(FullySharded&, comm::Communicator&)>& load) {
  test::BlockNet plain;
  {
    const torch::NoGradGuard no_grad;
    for (const auto& [name, value] : expected) {
      if (plain->named_parameters().contains(name)) plain->named_parameters()[name].copy_(value);
    }
  }
  const double loss = plain->loss(test::batch_of(7, 0)).item<double>();
  test::run_ranks(ranks, [&](comm::Communicator& communicator) {
    test::BlockNet model;
    const auto sharded = shard(model, communicator);
    train_some(*sharded, model, 5, 1);
    model->loss(test::batch_of(7, 0));  // leaves parameters whole
    load(*sharded, communicator);
    expect_equal(sharded->full_state_dict(), expected);
    EXPECT_NEAR(model->loss(test::batch_of(7, 0)).item<double>(), loss, 1e-6);
  });
}

TEST(FullyShardState, FullIsThatOfTheModuleByName) {
  const Trained trained = trained_by(2);
  test::BlockNet plain;
  size_t i = 0;
  for (const auto& item : plain->named_parameters()) EXPECT_EQ(trained.state[i++].first, item.key());
  for (const auto& item : plain->named_buffers()) EXPECT_EQ(trained.state[i++].first, item.key());
  EXPECT_EQ(i, trained.state.size());
}

TEST(FullyShardState, FullRoundTripFromAllRanksAndFromRankZero) {
  const Trained trained = trained_by(2);
  for (const bool from_first : {false, true}) {
    expect_loads(4, trained.state, [&](FullySharded& sharded, comm::Communicator& ranks) {
      const bool gives = !from_first || ranks.rank() == 0;
      sharded.load_full_state_dict(gives ? trained.state : StateDict(), from_first);
    });
  }
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    test::BlockNet model;
    const auto sharded = shard(model, communicator);
    EXPECT_EQ(sharded->full_state_dict({.rank0_only = true}).empty(), communicator.rank() != 0);
  });
}

TEST(FullyShardState, PartsOfTwoRanksAreLoadedByTwoAndByFour) {
  const Trained trained = trained_by(2);
  for (const int ranks : {2, 4}) {
    expect_loads(ranks, trained.state,
                 [&](FullySharded& sharded, comm::Communicator&) { sharded.load_sharded_state_dict(trained.parts); });
  }
}

TEST(FullyShardState, ACheckpointOfTwoRanksIsLoadedByTwoAndByFour) {
  const test::ScratchFolder folder;
  const Trained trained = trained_by(2, folder.path().string());
  for (const int ranks : {2, 4}) {
    expect_loads(ranks, trained.state,
                 [&](FullySharded& sharded, comm::Communicator&) { sharded.load(folder.path().string()); });
  }
  const auto source = checkpoint::open(folder / "step3");
  for (const auto& [name, value] : trained.state) {
    const std::string path = checkpoint::weight_path(name);
    if (source->contains(path)) EXPECT_TRUE(source->tensor(path).equal(value)) << name;
  }
}

TEST(FullyShardState, LocalIsThisRanksSlices) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    test::BlockNet model;
    const auto sharded = shard(model, communicator);
    const StateDict before = sharded->full_state_dict();
    const StateDict local = sharded->local_state_dict();
    EXPECT_EQ(local.size(), sharded->parameters().size());
    train_some(*sharded, model, communicator.rank());
    sharded->load_local_state_dict(local);
    expect_equal(sharded->full_state_dict(), before);
  });
}

double largest(const std::vector<at::Tensor>& tensors) {
  double result = 0;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() > 0) result = std::max(result, tensor.detach().abs().max().item<double>());
  }
  return result;
}

// Weight clipping after each step, and then a look at the state: no forward in between.
TEST(FullyShardState, HasWhatHasJustBeenChangedInPlace) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    test::BlockNet model;
    const auto sharded = shard(model, communicator);
    train_some(*sharded, model, communicator.rank());
    double limit = 0.2;
    const auto clip = [&] {
      const torch::NoGradGuard no_grad;
      limit /= 2;
      for (at::Tensor& parameter : model->parameters()) parameter.clamp_(-limit, limit);
    };
    const auto values = [](const auto& state) {
      std::vector<at::Tensor> tensors;
      for (const auto& [name, tensor] : state) {
        if (name != "scale") tensors.push_back(tensor);  // the buffer
      }
      return tensors;
    };
    clip();
    EXPECT_NEAR(largest(values(sharded->full_state_dict())), limit, 1e-7);
    clip();
    std::vector<at::Tensor> parts;
    for (const ShardedTensor& part : sharded->sharded_state_dict()) parts.push_back(part.values);
    EXPECT_LE(largest(parts), limit + 1e-7);
    clip();
    EXPECT_LE(largest(values(sharded->local_state_dict())), limit + 1e-7);
    clip();
    EXPECT_LE(largest(sharded->parameters()), limit + 1e-7);
    sharded->unshard();
    clip();
    const StateDict state = sharded->full_state_dict();
    EXPECT_NEAR(largest(values(state)), limit, 1e-7);
    sharded->reshard();
    expect_equal(sharded->full_state_dict(), state);
    clip();
    sharded->load_full_state_dict(state);  // and not the change before it
    expect_equal(sharded->full_state_dict(), state);
  });
}

TEST(FullyShardState, TablesThatForwardShortensAreThoseOfOneProcess) {
  const at::Tensor expected = test::table_of_plain_loop(2);
  for (const bool reshards : {true, false}) {
    test::run_ranks(2, [&](comm::Communicator& communicator) {
      test::ShortenedTable model;
      const auto sharded =
          fully_shard(model, {.process_group = test::borrowed(communicator), .reshard_after_forward = reshards});
      torch::optim::SGD optimizer(sharded->parameters(), 0.5);
      for (int64_t step = 0; step < test::kTableSteps; ++step) {
        optimizer.zero_grad();
        model->loss(test::rows_of(step, communicator.rank())).backward();
        optimizer.step();
      }
      const at::Tensor found = sharded->full_state_dict()[0].second;
      EXPECT_LT((found - expected).abs().max().item<double>(), 1e-6);
    });
  }
}

TEST(FullyShardMisuse, TwoParametersOverOneMemoryAreRefusedByName) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    torch::nn::Sequential model(torch::nn::Linear(6, 4), torch::nn::Linear(4, 6));
    model->ptr<torch::nn::LinearImpl>(1)->weight.set_data(model->ptr<torch::nn::LinearImpl>(0)->weight.detach().t());
    EXPECT_THAT([&] { fully_shard(model, {.process_group = test::borrowed(communicator)}); },
                ThrowsMessage<UsageError>(AllOf(HasSubstr("fully_shard"), HasSubstr("0.weight"), HasSubstr("1.weight"),
                                                HasSubstr("one memory"))));
  });
}

TEST(FullyShardState, WhatDoesNotFitIsNamedAndChangesNothing) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    test::BlockNet model;
    const auto sharded = shard(model, communicator);
    const StateDict state = sharded->full_state_dict();
    StateDict other = state;
    other.pop_back();
    EXPECT_THAT([&] { sharded->load_full_state_dict(other); },
                ThrowsMessage<UsageError>(HasSubstr("expected a value for scale")));
    other = state;
    other[0].second = torch::zeros({3});
    EXPECT_THAT([&] { sharded->load_full_state_dict(other); }, ThrowsMessage<UsageError>(HasSubstr("enter.weight")));
    other = state;
    other.emplace_back("head.weight", torch::zeros({3}));
    EXPECT_THAT([&] { sharded->load_full_state_dict(other); }, ThrowsMessage<UsageError>(HasSubstr("head.weight")));
    EXPECT_THAT([&] { sharded->load_full_state_dict(other, /*broadcast_from_rank0=*/true); },
                ThrowsMessage<UsageError>(HasSubstr("load_full_state_dict")));
    std::vector<ShardedTensor> parts = sharded->sharded_state_dict();
    for (ShardedTensor& part : parts) {
      if (part.values.numel() > 1) part.values = part.values.narrow(0, 1, part.values.numel() - 1);
    }
    EXPECT_THAT([&] { sharded->load_sharded_state_dict(parts); },
                ThrowsMessage<UsageError>(HasSubstr("expected parts with all of its elements")));
    expect_equal(sharded->full_state_dict(), state);
  });
}

// --- units
// -------------------------------------------------------------------------------------------------------------

TEST(FullyShardUnits, AUnitHasItsParametersAndIsMadeWholeByItself) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    test::BlockNet model;
    const at::Tensor first = model->blocks[1]->up->weight.detach().clone();
    const FullyShardOptions options = {.process_group = test::borrowed(communicator)};
    const auto unit = fully_shard(model->blocks[1], options);
    EXPECT_EQ(unit->parameters().size(), 6U);
    const auto sharded = fully_shard(model, options);
    EXPECT_EQ(unit->parameters().size(), 6U);
    EXPECT_EQ(sharded->parameters().size(), 22U);
    EXPECT_EQ(unit->named_parameters()[0].first, "block1.up.weight");
    EXPECT_THAT([&] { model->blocks[1]->up->weight.data_ptr(); },
                ThrowsMessage<c10::Error>(HasSubstr("sharded->unshard()")));
    unit->unshard();
    EXPECT_EQ(std::memcmp(model->blocks[1]->up->weight.data_ptr(), first.data_ptr(), first.nbytes()), 0);
    EXPECT_LT(sharded->held_bytes().gathered, 4 * (2 * 6 * 13 + 13 * 3 + 6 + 64));
    unit->reshard();
    EXPECT_EQ(sharded->held_bytes().gathered, 0);
  });
}

TEST(FullyShardUnits, NamedPrefetchAndBackwardPostGiveTheSameNumbers) {
  const test::MakeOptimizer make = test::optimizers()[0].second;
  const test::NamedValues expected = test::train_plain(2, 5, make);
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    test::BlockNet model;
    FullyShardOptions options = {.process_group = test::borrowed(communicator),
                                 .backward_prefetch = BackwardPrefetch::kBackwardPost,
                                 .limit_all_gathers = false};
    std::vector<std::shared_ptr<FullySharded>> units;
    for (test::Block& block : model->blocks) units.push_back(fully_shard(block, options));
    const auto sharded = fully_shard(model, options);
    units[0]->set_modules_to_forward_prefetch({units[1], units[2]});
    units[2]->set_modules_to_backward_prefetch({units[1], units[0]});
    const auto optimizer = make(sharded->parameters());
    test::train(model, *optimizer, communicator.rank(), 5);
    EXPECT_LT(test::largest_difference(sharded->full_state_dict(), expected), 5e-6);
  });
}

TEST(FullyShardUnits, OldNamesOfStrategiesGiveTheSameNumbers) {
  const test::MakeOptimizer make = test::optimizers()[2].second;
  const test::NamedValues expected = test::train_plain(2, 5, make);
  for (const auto strategy :
       {ShardingStrategy::kFullShard, ShardingStrategy::kShardGradOp, ShardingStrategy::kNoShard}) {
    test::run_ranks(2, [&](comm::Communicator& communicator) {
      test::BlockNet model;
      const auto sharded =
          fully_shard(model, {.process_group = test::borrowed(communicator), .sharding_strategy = strategy});
      const auto optimizer = make(sharded->parameters());
      test::train(model, *optimizer, communicator.rank(), 5);
      EXPECT_LT(test::largest_difference(sharded->full_state_dict(), expected), 5e-6);
    });
  }
}

TEST(FullyShardUnits, FrozenParametersAreShardedToo) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    test::BlockNet model;
    for (at::Tensor& parameter : model->blocks[0]->parameters()) parameter.set_requires_grad(false);
    test::BlockNet plain;
    for (at::Tensor& parameter : plain->blocks[0]->parameters()) parameter.set_requires_grad(false);
    const auto sharded = shard(model, communicator);
    EXPECT_EQ(sharded->parameters().size(), 16U);
    EXPECT_LT(sharded->held_bytes().parameters, 4 * 700);
    torch::optim::SGD optimizer(sharded->parameters(), 0.1);
    std::vector<at::Tensor> trained;
    for (const at::Tensor& parameter : plain->parameters()) {
      if (parameter.requires_grad()) trained.push_back(parameter);
    }
    torch::optim::SGD by_torch(trained, 0.1);
    for (int step = 0; step < 3; ++step) {
      model->loss(test::batch_of(step, communicator.rank())).backward();
      optimizer.step();
      optimizer.zero_grad();
      plain->loss(test::joined_batch(step, 2)).backward();
      by_torch.step();
      by_torch.zero_grad();
    }
    const test::NamedValues expected = test::named_values(*plain);
    EXPECT_LT(test::largest_difference(sharded->full_state_dict(), expected), 5e-6);
    const StateDict state = sharded->full_state_dict();
    sharded->load_full_state_dict(state, /*broadcast_from_rank0=*/true);
    expect_equal(sharded->full_state_dict(), state);
  });
}

TEST(FullyShardUnits, TheHandleCastsInputsAndOutputs) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    test::BlockNet model;
    const auto sharded = fully_shard(model, {.process_group = test::borrowed(communicator),
                                             .mp_policy = {.param_dtype = at::kBFloat16, .output_dtype = at::kFloat}});
    const at::Tensor out = sharded->forward(model, test::batch_of(0, 0));
    EXPECT_EQ(out.scalar_type(), at::kFloat);
    out.sum().backward();
    EXPECT_TRUE(sharded->parameters().back().grad().defined());
  });
}

// --- misuse
// ------------------------------------------------------------------------------------------------------------

TEST(FullyShardMisuse, OneCallForEachModuleFromTheInside) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    test::BlockNet model;
    const FullyShardOptions options = {.process_group = test::borrowed(communicator)};
    const auto sharded = fully_shard(model, options);
    EXPECT_THAT([&] { fully_shard(model, options); }, ThrowsMessage<UsageError>(HasSubstr("sharded already")));
    EXPECT_THAT(
        [&] { fully_shard(model->blocks[0], options); },
        ThrowsMessage<UsageError>(AllOf(HasSubstr("is inside of"), HasSubstr("from the inside to the outside"))));
    EXPECT_THAT([&] { fully_shard(std::shared_ptr<torch::nn::Module>(), options); },
                ThrowsMessage<UsageError>(HasSubstr("expected a module")));
  });
}

TEST(FullyShardMisuse, AnOptimizerMadeBeforeSaysWhatToDo) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    test::BlockNet model;
    torch::optim::SGD before(model->parameters(), 0.1);
    const auto sharded = fully_shard(model, {.process_group = test::borrowed(communicator)});
    torch::optim::SGD after(sharded->parameters(), 0.1);
    for (int step = 0; step < 2; ++step) {
      model->loss(test::batch_of(step, communicator.rank())).backward();
      EXPECT_THAT([&] { before.step(); },
                  ThrowsMessage<c10::Error>(AllOf(HasSubstr("enter.weight"), HasSubstr("made before fully_shard"))));
      after.step();
      after.zero_grad();
    }
    before.zero_grad();
    model->loss(test::batch_of(0, communicator.rank())).backward();
    EXPECT_TRUE(sharded->parameters()[0].grad().defined());
  });
}

TEST(FullyShardMisuse, BackwardTwiceWithoutForwardIsTorchsErrorAndTrainingGoesOn) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    test::BlockNet model;
    const auto sharded = fully_shard(model, {.process_group = test::borrowed(communicator)});
    torch::optim::SGD optimizer(sharded->parameters(), 0.1);
    const at::Tensor loss = model->loss(test::batch_of(0, communicator.rank()));
    loss.backward();
    EXPECT_THAT([&] { loss.backward(); }, ThrowsMessage<c10::Error>(HasSubstr("second time")));
    optimizer.step();
    optimizer.zero_grad();
    model->loss(test::batch_of(1, communicator.rank())).backward();
    EXPECT_TRUE(sharded->parameters()[0].grad().defined());
  });
}

TEST(FullyShardMisuse, OptionsThatExcludeEachOther) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    test::BlockNet model;
    const auto group = test::borrowed(communicator);
    EXPECT_THAT(
        [&] { fully_shard(model, {.process_group = group, .sharding_strategy = ShardingStrategy::kHybridShard}); },
        ThrowsMessage<ConfigError>(HasSubstr("expected a mesh with two axes")));
    EXPECT_THAT(
        [&] {
          fully_shard(model, {.process_group = group,
                              .reshard_after_forward = true,
                              .sharding_strategy = ShardingStrategy::kFullShard});
        },
        ThrowsMessage<ConfigError>(HasSubstr(".sharding_strategy and .reshard_after_forward")));
    EXPECT_THAT([&] { fully_shard(model, {.process_group = group, .mp_policy = {.param_dtype = at::kLong}}); },
                ThrowsMessage<ConfigError>(HasSubstr("mp_policy.param_dtype")));
    fully_shard(model->blocks[0], {.process_group = group, .mp_policy = {.param_dtype = at::kHalf}});
    EXPECT_THAT([&] { fully_shard(model, {.process_group = group, .mp_policy = {.param_dtype = at::kBFloat16}}); },
                ThrowsMessage<ConfigError>(HasSubstr("all of a model runs in one dtype")));
  });
}

TEST(FullyShardMisuse, ParametersAreReadAfterTheEnd) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    test::BlockNet model;
    fully_shard(model, {.process_group = test::borrowed(communicator)})->parameters();  // used and dropped
    EXPECT_THAT([&] { model->in->weight.sum(); },
                ThrowsMessage<c10::Error>(HasSubstr("after the end of its fully_shard")));
  });
}

}  // namespace
}  // namespace ds
