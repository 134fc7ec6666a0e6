// Optimizers' states in what fully_shard saves: training goes on as if it had not been interrupted, on any ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/check.h"
#include "dsengine/checkpoint.h"
#include "dsengine/fully_shard.h"
#include "dsengine/fused_optimizers.h"
#include "loops/shard_ranks.h"
#include "tests/loops/block_net.h"
#include "tests/support/own_optimizers.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"

namespace ds {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::ThrowsMessage;

constexpr int kBefore = 4;  // steps
constexpr int kAfter = 4;
constexpr double kGoesOn = 5e-6;

std::shared_ptr<FullySharded> shard_all(test::BlockNet& model, comm::Communicator& communicator) {
  for (test::Block& block : model->blocks) fully_shard(block, {.process_group = test::borrowed(communicator)});
  return fully_shard(model, {.process_group = test::borrowed(communicator)});
}

struct Saved {
  StateDict weights, full;
  std::vector<ShardedTensor> weight_parts, parts;  // of all ranks
};

Saved saved_by(int ranks, const test::MakeOptimizer& make, const std::string& folder) {
  Saved saved;
  std::mutex mutex;
  test::run_ranks(ranks, [&](comm::Communicator& communicator) {
    test::BlockNet model;
    const auto sharded = shard_all(model, communicator);
    const auto optimizer = make(sharded->parameters());
    test::train_joined(model, *optimizer, 0, kBefore);
    sharded->save(folder, "saved", *optimizer);
    const StateDict weights = sharded->full_state_dict();
    const StateDict full = sharded->full_optim_state_dict(*optimizer);
    EXPECT_EQ(sharded->full_optim_state_dict(*optimizer, {.rank0_only = true}).empty(),
              communicator.rank() != 0 || full.empty());
    const std::lock_guard lock(mutex);
    for (auto& part : sharded->sharded_state_dict()) saved.weight_parts.push_back(std::move(part));
    for (auto& part : sharded->sharded_optim_state_dict(*optimizer)) saved.parts.push_back(std::move(part));
    if (communicator.rank() == 0) {
      saved.weights = weights;
      saved.full = full;
    }
  });
  return saved;
}

using Load = std::function<void(FullySharded&, torch::optim::Optimizer&, int rank)>;

void expect_goes_on(int ranks, const test::MakeOptimizer& make, const test::NamedValues& expected, const Load& load) {
  test::run_ranks(ranks, [&](comm::Communicator& communicator) {
    test::BlockNet model;
    const auto sharded = shard_all(model, communicator);
    const auto optimizer = make(sharded->parameters());
    test::train_joined(model, *optimizer, 20, 1);  // states and weights of something else
    load(*sharded, *optimizer, communicator.rank());
    test::train_joined(model, *optimizer, kBefore, kAfter);
    EXPECT_LT(test::largest_difference(sharded->full_state_dict(), expected), kGoesOn);
  });
}

std::vector<std::pair<std::string, test::MakeOptimizer>> kept_optimizers() {
  auto all = test::optimizers();
  all.emplace_back("AmsGrad", [](const test::Tensors& p) {
    return std::make_unique<FusedAdamW>(p, torch::optim::AdamWOptions(2e-3).amsgrad(true));
  });
  all.emplace_back("OfTheProgram",
                   [](const test::Tensors& p) { return std::make_unique<engine::OwnMomentum>(p, 0.02); });
  all.emplace_back("OfTheProgramWithAStateOfTorchs",
                   [](const test::Tensors& p) { return std::make_unique<engine::SignMomentum>(p, 2e-3); });
  all.emplace_back("Sgd", [](const test::Tensors& p) { return std::make_unique<torch::optim::SGD>(p, 0.05); });
  return all;
}

TEST(OptimizerStates, TrainingGoesOnFromEachWayToKeepThem) {
  for (const auto& [name, make] : kept_optimizers()) {
    SCOPED_TRACE(name);
    const test::NamedValues expected = test::train_plain(2, kBefore + kAfter, make);
    const test::ScratchFolder folder;
    const Saved saved = saved_by(2, make, folder.path().string());
    for (const int ranks : {2, 3}) {
      expect_goes_on(ranks, make, expected, [&](FullySharded& sharded, torch::optim::Optimizer& optimizer, int) {
        sharded.load(folder.path().string(), "saved", optimizer);
      });
      expect_goes_on(ranks, make, expected, [&](FullySharded& sharded, torch::optim::Optimizer& optimizer, int rank) {
        sharded.load_full_state_dict(saved.weights);
        sharded.load_full_optim_state_dict(optimizer, rank == 0 ? saved.full : StateDict(), true);
      });
      expect_goes_on(ranks, make, expected, [&](FullySharded& sharded, torch::optim::Optimizer& optimizer, int) {
        sharded.load_sharded_state_dict(saved.weight_parts);
        sharded.load_sharded_optim_state_dict(optimizer, saved.parts);
      });
    }
    expect_goes_on(2, make, expected, [&](FullySharded& sharded, torch::optim::Optimizer& optimizer, int) {
      sharded.load_full_state_dict(saved.weights);
      sharded.load_full_optim_state_dict(optimizer, saved.full);
    });
  }
}

TEST(OptimizerStates, NamesAndShapesAreTorchsAndFilesHaveThemAsTheEngines) {
  const test::MakeOptimizer adamw = test::optimizers()[2].second;
  const test::ScratchFolder folder;
  const Saved saved = saved_by(2, adamw, folder.path().string());
  test::BlockNet plain;
  const auto optimizer = adamw(plain->parameters());
  test::train_joined(plain, *optimizer, 0, kBefore);
  const auto source = checkpoint::open(folder / "saved");
  size_t found = 0;
  for (const auto& item : plain->named_parameters()) {
    const auto& state =
        static_cast<const torch::optim::AdamWParamState&>(*optimizer->state().at(item.value().unsafeGetTensorImpl()));
    for (const auto& [key, value] : saved.full) {
      if (key == "state." + item.key() + ".exp_avg_sq") {
        EXPECT_TRUE(at::allclose(value, state.exp_avg_sq(), 1e-4, 1e-9)) << key;
        EXPECT_TRUE(source->tensor("optimizer/exp_avg_sq/" + item.key()).equal(value)) << key;
        ++found;
      }
      if (key == "state." + item.key() + ".step") EXPECT_EQ(value.item<int64_t>(), kBefore);
    }
  }
  EXPECT_EQ(found, plain->parameters().size());
  EXPECT_EQ(saved.full.size(), 3 * plain->parameters().size());
}

TEST(OptimizerStates, WhatDoesNotFitIsNamedAndChangesNothing) {
  const auto all = test::optimizers();
  const test::ScratchFolder folder;
  const Saved saved = saved_by(2, all[2].second, folder.path().string());
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    test::BlockNet model;
    const auto sharded = shard_all(model, communicator);
    const auto adagrad = all[4].second(sharded->parameters());
    test::train_joined(model, *adagrad, 0, 1);
    const StateDict before = sharded->full_optim_state_dict(*adagrad);
    EXPECT_THAT([&] { sharded->load_full_optim_state_dict(*adagrad, saved.full); },
                ThrowsMessage<UsageError>(HasSubstr("enter.weight.sum")));
    EXPECT_THAT([&] { sharded->load_full_optim_state_dict(*adagrad, saved.full, /*broadcast_from_rank0=*/true); },
                ThrowsMessage<UsageError>(HasSubstr("load_full_optim_state_dict")));
    EXPECT_THAT([&] { sharded->load(folder.path().string(), "saved", *adagrad); },
                ThrowsMessage<UsageError>(AllOf(
                    HasSubstr("AdamW"), HasSubstr("; load(folder, tag) without the optimizer to begin with fresh"),
                    Not(HasSubstr("load_optimizer_states")))));
    StateDict other = saved.full;
    other.front().second = torch::zeros({3});
    const auto adamw = all[2].second(sharded->parameters());
    EXPECT_THAT([&] { sharded->load_full_optim_state_dict(*adamw, other); },
                ThrowsMessage<UsageError>(HasSubstr(other.front().first)));
    std::vector<ShardedTensor> fewer = saved.parts;
    std::erase_if(fewer, [](const ShardedTensor& part) { return part.name.ends_with("exp_avg") && part.offset == 0; });
    EXPECT_THAT([&] { sharded->load_sharded_optim_state_dict(*adamw, fewer); },
                ThrowsMessage<UsageError>(AllOf(HasSubstr("exp_avg"), HasSubstr("found none"))));
    EXPECT_TRUE(adamw->state().empty());
    const StateDict after = sharded->full_optim_state_dict(*adagrad);
    ASSERT_EQ(after.size(), before.size());
    for (size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(after[i].second.equal(before[i].second)) << before[i].first;
  });
}

TEST(OptimizerStates, OtherOptimizersAreRefusedByName) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    test::BlockNet model, other;
    const auto sharded = shard_all(model, communicator);
    torch::optim::LBFGS whole(sharded->parameters());
    EXPECT_THAT([&] { sharded->full_optim_state_dict(whole); }, ThrowsMessage<UsageError>(HasSubstr("LBFGS")));
    torch::optim::SGD of_other(other->parameters(), 0.1);
    EXPECT_THAT([&] { sharded->sharded_optim_state_dict(of_other); },
                ThrowsMessage<UsageError>(HasSubstr("sharded->parameters()")));
  });
}

// --- HYBRID_SHARD without a mesh ---

TEST(HybridShardByHosts, ShardsInsideOfAHostAndCopiesOverHosts) {
  test::run_ranks(4, [&](comm::Communicator& communicator) {
    loops::ShardRanks ranks;
    ranks.all = ranks.shards = test::borrowed(communicator);
    loops::shard_inside_hosts(ranks, 2);
    EXPECT_EQ(ranks.shards->size(), 2);
    EXPECT_EQ(ranks.shards->rank(), communicator.rank() % 2);
    EXPECT_EQ(ranks.replicas->size(), 2);
    EXPECT_EQ(ranks.replicas->rank(), communicator.rank() / 2);
    ranks = {.all = test::borrowed(communicator), .shards = test::borrowed(communicator), .replicas = nullptr};
    loops::shard_inside_hosts(ranks, 4);
    EXPECT_EQ(ranks.shards->size(), 4);
    EXPECT_EQ(ranks.replicas, nullptr);
    EXPECT_THAT([&] { loops::shard_inside_hosts(ranks, 1); },
                ThrowsMessage<ConfigError>(AllOf(HasSubstr("uneven or scattered"), HasSubstr("pass .mesh"))));
  });
}

// --- changes of whole parameters in place ---

// Each rank keeps what it has changed in its own slice, and nothing of what another one has (docs/fully_shard.md).
TEST(WholeParameters, AChangeInPlaceReachesTheSliceOfTheRankThatMadeIt) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    test::BlockNet model;
    const auto sharded = shard_all(model, communicator);
    const auto weight_of = [&] { return sharded->full_state_dict()[0].second; };
    const at::Tensor before = weight_of();
    const auto change = [&](bool changes) {
      const at::NoGradGuard no_grad;
      sharded->unshard();
      if (changes) model->in->weight.add_(1);
      sharded->reshard();
    };
    change(true);
    EXPECT_TRUE(at::allclose(weight_of(), before + 1)) << "on every rank";
    change(communicator.rank() == 0);
    at::Tensor own = torch::zeros_like(before).view({-1});
    for (const ShardedTensor& part : sharded->sharded_state_dict()) {
      if (part.name == "enter.weight" && communicator.rank() == 0)
        own.narrow(0, part.offset, part.values.numel()).fill_(1);
    }
    communicator.all_reduce(own).wait();
    EXPECT_TRUE(at::allclose(weight_of(), before + 1 + own.view(before.sizes()))) << "on rank 0 alone";
  });
}

}  // namespace
}  // namespace ds
