// What loops do with fully_shard beside one forward, one backward and one step: several passes, values and parameters
// that change behind its back, its end.
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/check.h"
#include "dsengine/distributed_data_parallel.h"
#include "dsengine/engine.h"
#include "dsengine/fully_shard.h"
#include "dsengine/initialize.h"
#include "tests/loops/block_net.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"

namespace ds::fully_shard_usage {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr double kTolerance = 5e-6;
constexpr int kSteps = 3;

std::shared_ptr<FullySharded> shard_blocks(test::BlockNet& model, const FullyShardOptions& options) {
  for (test::Block& block : model->blocks) fully_shard(block, options);
  return fully_shard(model, options);
}

// --- several backwards before a step
// ----------------------------------------------------------------------------------

using BatchOf = std::function<at::Tensor(int64_t)>;
using Passes = std::function<void(test::BlockNet&, int64_t step, const BatchOf&)>;

void two_losses(test::BlockNet& model, int64_t step, const BatchOf& batch) {
  const at::Tensor first = model->loss(batch(2 * step));
  const at::Tensor second = model->loss(batch(2 * step + 1));
  first.backward();
  second.backward();
}

void one_graph_twice(test::BlockNet& model, int64_t step, const BatchOf& batch) {
  const at::Tensor loss = model->loss(batch(step));
  loss.backward({}, /*retain_graph=*/true);
  loss.backward();
}

void train(test::BlockNet& model, const test::Tensors& parameters, const Passes& passes, const BatchOf& batch) {
  const auto optimizer = test::optimizers()[0].second(parameters);
  for (int step = 0; step < kSteps; ++step) {
    passes(model, step, batch);
    optimizer->step();
    optimizer->zero_grad();
  }
}

TEST(FullyShardPasses, BackwardsWithoutAForwardInBetweenAddUp) {
  for (const Passes& passes : {Passes(two_losses), Passes(one_graph_twice)}) {
    test::BlockNet plain;
    train(plain, plain->parameters(), passes, [](int64_t number) { return test::joined_batch(number, 2); });
    const test::NamedValues expected = test::named_values(*plain);
    test::run_ranks(2, [&](comm::Communicator& communicator) {
      for (const bool reshards : {true, false}) {
        test::BlockNet model;
        const auto sharded =
            shard_blocks(model, {.process_group = test::borrowed(communicator), .reshard_after_forward = reshards});
        train(model, sharded->parameters(), passes,
              [&](int64_t number) { return test::batch_of(number, communicator.rank()); });
        EXPECT_LT(test::largest_difference(sharded->full_state_dict(), expected), kTolerance);
      }
    });
  }
}

TEST(FullyShardPasses, AStepBetweenForwardAndBackwardIsTorchsError) {
  for (const int ranks : {1, 2}) {
    test::run_ranks(ranks, [&](comm::Communicator& communicator) {
      for (const bool reshards : {true, false}) {
        test::BlockNet model;
        const auto sharded =
            shard_blocks(model, {.process_group = test::borrowed(communicator), .reshard_after_forward = reshards});
        torch::optim::SGD optimizer(sharded->parameters(), 0.1);
        model->loss(test::batch_of(0, communicator.rank())).backward();
        const at::Tensor loss = model->loss(test::batch_of(1, communicator.rank()));
        optimizer.step();
        EXPECT_THAT([&] { loss.backward(); }, ThrowsMessage<c10::Error>(HasSubstr("modified by an inplace operation")));
        optimizer.zero_grad();
        model->loss(test::batch_of(2, communicator.rank())).backward();
        EXPECT_TRUE(sharded->parameters()[0].grad().defined());
      }
    });
  }
}

// --- changes behind its back
// ------------------------------------------------------------------------------------------

TEST(FullyShardChanges, OtherValuesOfTheModuleAreRefusedByName) {
  test::BlockNet plain;
  std::stringstream saved;
  torch::save(plain, saved);
  const std::string file = saved.str();
  const std::vector<std::function<void(test::BlockNet&)>> changes = {
      [](test::BlockNet& model) {
        model->in->weight.set_data(torch::ones({6, 5}));
      },
      [&](test::BlockNet& model) {
        std::stringstream own(file);
        torch::load(model, own);
      },
  };
  for (const auto& change : changes) {
    test::run_ranks(2, [&](comm::Communicator& communicator) {
      test::BlockNet model;
      const auto sharded = shard_blocks(model, {.process_group = test::borrowed(communicator)});
      change(model);
      EXPECT_THAT([&] { model->loss(test::batch_of(0, communicator.rank())).backward(); },
                  ThrowsMessage<UsageError>(AllOf(HasSubstr("backward(): parameter "), HasSubstr(".weight"),
                                                  HasSubstr("sharded->load_full_state_dict()"))));
    });
  }
}

TEST(FullyShardChanges, AFrozenParameterThatIsToTrainIsRefusedByName) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    test::BlockNet model;
    for (at::Tensor& parameter : model->blocks[0]->parameters()) parameter.set_requires_grad(false);
    const auto sharded = shard_blocks(model, {.process_group = test::borrowed(communicator)});
    model->loss(test::batch_of(0, communicator.rank())).backward();
    model->blocks[0]->up->weight.set_requires_grad(true);
    EXPECT_THAT([&] { model->loss(test::batch_of(1, communicator.rank())).backward(); },
                ThrowsMessage<UsageError>(HasSubstr("block0.up.weight requires a gradient, and did not")));
    model->blocks[0]->up->weight.set_requires_grad(false);
    model->loss(test::batch_of(2, communicator.rank())).backward();
  });
}

// With weight decay: of a gradient of zeros AdamW would move it.
void train_and_freeze(test::BlockNet& model, const test::Tensors& parameters, const BatchOf& batch) {
  torch::optim::AdamW optimizer(parameters, torch::optim::AdamWOptions(2e-3).weight_decay(0.1));
  for (int step = 0; step < 2 * kSteps; ++step) {
    if (step == kSteps) {
      for (at::Tensor& parameter : model->blocks[1]->parameters()) parameter.set_requires_grad(false);
      model->in->bias.set_requires_grad(false);
    }
    model->loss(batch(step)).backward();
    optimizer.step();
    optimizer.zero_grad();
  }
}

TEST(FullyShardChanges, AParameterThatIsFrozenLaterStaysAsItIs) {
  test::BlockNet plain;
  train_and_freeze(plain, plain->parameters(), [](int64_t number) { return test::joined_batch(number, 2); });
  const test::NamedValues expected = test::named_values(*plain);
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    test::BlockNet model;
    const auto sharded = shard_blocks(model, {.process_group = test::borrowed(communicator)});
    train_and_freeze(model, sharded->parameters(),
                     [&](int64_t number) { return test::batch_of(number, communicator.rank()); });
    EXPECT_LT(test::largest_difference(sharded->full_state_dict(), expected), kTolerance);
  });
}

// --- loading, clipping, the end
// ---------------------------------------------------------------------------------------

TEST(FullyShardUse, LoadsWhileParametersAreWhole) {
  const test::ScratchFolder folder;
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    test::BlockNet model;
    const auto sharded = shard_blocks(model, {.process_group = test::borrowed(communicator)});
    const StateDict before = sharded->full_state_dict();
    sharded->save(folder.path().string(), "start");
    const double loss = model->loss(test::batch_of(0, 0)).item<double>();
    torch::optim::SGD optimizer(sharded->parameters(), 0.1);
    model->loss(test::batch_of(0, communicator.rank())).backward();
    optimizer.step();
    sharded->unshard();
    sharded->load(folder.path().string());
    EXPECT_EQ(test::largest_difference(sharded->full_state_dict(), before), 0);
    EXPECT_NEAR(model->loss(test::batch_of(0, 0)).item<double>(), loss, 1e-6);
  });
}

TEST(FullyShardUse, CopiesClipByTheNormOfTheWholeModel) {
  test::BlockNet plain;
  plain->loss(test::joined_batch(0, 4)).backward();
  const double expected = torch::nn::utils::clip_grad_norm_(plain->parameters(), 0.01);
  test::run_ranks(4, [&](comm::Communicator& communicator) {
    test::BlockNet model;
    FullyShardOptions options;
    options.mesh = comm::init_device_mesh(test::borrowed(communicator), {2, 2}, {"replicate", "shard"});
    const auto sharded = shard_blocks(model, options);
    model->loss(test::batch_of(0, communicator.rank())).backward();
    EXPECT_NEAR(sharded->clip_grad_norm_(0.01), expected, 1e-5 * expected);
    EXPECT_NEAR(sharded->clip_grad_norm_(1e9), 0.01, 1e-6);
  });
}

TEST(FullyShardUse, AResultThatWasUsedInAnyWayEndsTheModel) {
  const std::vector<std::function<void(FullySharded&, test::BlockNet&)>> uses = {
      [](FullySharded& sharded, test::BlockNet&) { sharded.full_state_dict(); },
      [](FullySharded& sharded, test::BlockNet&) { sharded.local_state_dict(); },
      [](FullySharded& sharded, test::BlockNet&) { sharded.clip_grad_norm_(1.0); },
      [](FullySharded& sharded, test::BlockNet& model) { sharded.forward(model, test::batch_of(0, 0)); },
  };
  for (const auto& use : uses) {
    test::run_ranks(2, [&](comm::Communicator& communicator) {
      test::BlockNet model;
      use(*fully_shard(model, {.process_group = test::borrowed(communicator)}), model);
      EXPECT_THAT([&] { model->in->weight.sum(); },
                  ThrowsMessage<c10::Error>(HasSubstr("after the end of its fully_shard")));
    });
  }
}

// --- misuse
// ------------------------------------------------------------------------------------------------------------

TEST(FullyShardUse, OneWrapperOrEngineForAModule) {
  test::run_ranks(2, [](comm::Communicator& communicator) {
    const auto group = test::borrowed(communicator);
    const auto belongs = [] {
      return ThrowsMessage<UsageError>(
          AllOf(HasSubstr("parameter enter.weight"), HasSubstr("belongs to another engine, or to a wrapper")));
    };
    test::BlockNet model;
    {
      const auto sharded = fully_shard(model, {.process_group = group});
      EXPECT_THAT([&] { const DistributedDataParallel ddp(model, {.process_group = group}); }, belongs());
      const nlohmann::json config = {{"train_batch_size", 2}, {"optimizer", {{"type", "Adam"}}}};
      EXPECT_THAT([&] { engine::initialize({.model = model.ptr(), .config = config, .communicator = group}); },
                  belongs());
      model->loss(test::batch_of(0, communicator.rank())).backward();  // what was refused has changed nothing
      EXPECT_TRUE(sharded->parameters()[0].grad().defined());
    }
    test::BlockNet other;
    const DistributedDataParallel ddp(other, {.process_group = group});
    EXPECT_THAT([&] { fully_shard(other, {.process_group = group}); }, belongs());
  });
}

TEST(FullyShardUse, AHookThatThrowsEndsThePassAndTrainingGoesOn) {
  const test::MakeOptimizer make = test::optimizers()[0].second;
  const test::NamedValues expected = test::train_plain(2, kSteps, make);
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    test::BlockNet model;
    const auto sharded = shard_blocks(model, {.process_group = test::borrowed(communicator)});
    const at::Tensor& middle = model->blocks[1]->up->weight;
    const unsigned hook = middle.register_hook(
        [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("a hook of the program's"); });
    EXPECT_THAT([&] { model->loss(test::batch_of(7, communicator.rank())).backward(); },
                ThrowsMessage<std::runtime_error>(HasSubstr("a hook of the program's")));
    middle.remove_hook(hook);
    const auto optimizer = make(sharded->parameters());
    test::train(model, *optimizer, communicator.rank(), kSteps);
    EXPECT_LT(test::largest_difference(sharded->full_state_dict(), expected), kTolerance);
  });
}

TEST(FullyShardUse, ARankThatLeavesIsNamed) {
  test::run_ranks(2, [](comm::Communicator& communicator) {
    test::BlockNet model;
    const auto sharded = shard_blocks(model, {.process_group = test::borrowed(communicator)});
    model->loss(test::batch_of(0, communicator.rank())).backward();
    if (communicator.rank() == 1) return;
    EXPECT_THAT([&] { model->loss(test::batch_of(1, 0)).backward(); },
                ThrowsMessage<c10::Error>(HasSubstr("rank 1 has destroyed its communicator")));
  });
}

}  // namespace
}  // namespace ds::fully_shard_usage
