// Optimizers' states that are incomplete, given twice, of parameters without steps, or of several optimizers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/check.h"
#include "dsengine/device_mesh.h"
#include "dsengine/fully_shard.h"
#include "loops/own_parts.h"
#include "tests/loops/block_net.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"

namespace ds {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr int kFirstSteps = 3;
constexpr int kMoreSteps = 3;
constexpr double kSameTraining = 5e-6;

// Of all ranks, in a list.
class AllParts {
 public:
  void add(std::vector<ShardedTensor> parts) {
    const std::lock_guard lock(mutex_);
    for (auto& part : parts) parts_.push_back(std::move(part));
  }
  const std::vector<ShardedTensor>& get() const { return parts_; }

 private:
  std::mutex mutex_;
  std::vector<ShardedTensor> parts_;
};

std::vector<ShardedTensor> parts_after_a_step(const test::MakeOptimizer& make) {
  AllParts parts;
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    test::BlockNet model;
    const auto sharded = fully_shard(model, {.process_group = test::borrowed(communicator)});
    const auto optimizer = make(sharded->parameters());
    test::train_joined(model, *optimizer, 0, 1);
    parts.add(sharded->sharded_optim_state_dict(*optimizer));
  });
  return parts.get();
}

template <class Named>
void erase_ending(Named& state, const std::string& ending) {
  std::erase_if(state, [&](const auto& one) {
    if constexpr (requires { one.name; }) {
      return one.name.ends_with(ending);
    } else {
      return one.first.ends_with(ending);
    }
  });
}

TEST(OptimizerParts, AFullStateWithLessOrMoreIsRefusedByNameOnEveryRank) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    test::BlockNet model;
    const auto sharded = fully_shard(model, {.process_group = test::borrowed(communicator)});
    for (const size_t kind : {size_t{0}, size_t{2}}) {  // without steps, and with
      const auto optimizer = test::optimizers()[kind].second(sharded->parameters());
      test::train_joined(model, *optimizer, 0, 1);
      const StateDict full = sharded->full_optim_state_dict(*optimizer);
      const auto expect_refused = [&](const StateDict& state, const std::string& what) {
        EXPECT_THAT([&] { sharded->load_full_optim_state_dict(*optimizer, state); },
                    ThrowsMessage<UsageError>(HasSubstr(what)));
      };
      const auto without = [&](const std::string& ending) {
        StateDict state = full;
        erase_ending(state, ending);
        return state;
      };
      expect_refused({}, kind == 0 ? "state.enter.weight.momentum_buffer" : "state.enter.weight.step");
      for (const auto& [key, value] : full) expect_refused(without(key), key);
      StateDict twice = full;
      twice.push_back(full.front());
      expect_refused(twice, full.front().first + " twice");
      StateDict more = full;
      more.emplace_back("state.other.weight.exp_avg", torch::zeros({2}));
      expect_refused(more, "state.other.weight.exp_avg");
      for (const auto& [key, value] : sharded->full_optim_state_dict(*optimizer)) {
        const auto same =
            std::find_if(full.begin(), full.end(), [&k = key](const auto& one) { return one.first == k; });
        ASSERT_NE(same, full.end()) << key;
        EXPECT_TRUE(same->second.equal(value)) << key;
      }
    }
  });
}

TEST(OptimizerParts, AShardedStateWithLessMoreOrOtherStepsIsRefusedByNameOnEveryRank) {
  const test::MakeOptimizer adamw = test::optimizers()[2].second;
  const std::vector<ShardedTensor> all = parts_after_a_step(adamw);
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    test::BlockNet model;
    const auto sharded = fully_shard(model, {.process_group = test::borrowed(communicator)});
    const auto optimizer = adamw(sharded->parameters());
    const auto expect_refused = [&](const std::vector<ShardedTensor>& parts, const std::string& what) {
      EXPECT_THAT([&] { sharded->load_sharded_optim_state_dict(*optimizer, parts); },
                  ThrowsMessage<UsageError>(HasSubstr(what)));
      EXPECT_TRUE(optimizer->state().empty());
    };
    expect_refused({}, "state.enter.weight.step");
    for (const std::string ending : {"block1.up.weight.step", "block1.up.weight.exp_avg", "out.bias.exp_avg_sq"}) {
      std::vector<ShardedTensor> fewer = all;
      erase_ending(fewer, ending);
      expect_refused(fewer, ending);
    }
    std::vector<ShardedTensor> more = all;
    more.push_back(all.front());
    more.back().name = "state.enter.weight.sum";
    expect_refused(more, "state.enter.weight.sum");
    std::vector<ShardedTensor> unequal = all;
    const auto last = std::find_if(unequal.rbegin(), unequal.rend(),
                                   [](const ShardedTensor& part) { return part.name == "state.out.bias.step"; });
    ASSERT_NE(last, unequal.rend());
    last->values = torch::full({1}, 7, torch::kLong);
    expect_refused(unequal, "state.out.bias.step");
  });
}

// Parts of copies are the same elements, and count once.
TEST(OptimizerParts, CoverageIsTheUnionOfWhatIsGiven) {
  const auto part = [](int64_t offset, int64_t length) {
    return ShardedTensor{
        .name = "a", .sizes = {10}, .offset = offset, .values = torch::arange(offset, offset + length)};
  };
  const loops::OwnPart own = {"a", {10}, 0, torch::zeros({10}, torch::kLong)};
  const std::vector<ShardedTensor> twice = {part(0, 5), part(0, 5)};
  EXPECT_THAT([&] { loops::require_covered("load", own, loops::given_parts(twice)); },
              ThrowsMessage<UsageError>(HasSubstr("found 5 of them")));
  const std::vector<ShardedTensor> gap = {part(7, 3), part(0, 6), part(2, 4)};
  EXPECT_THAT([&] { loops::require_covered("load", own, loops::given_parts(gap)); },
              ThrowsMessage<UsageError>(HasSubstr("found 9 of them")));
  const std::vector<ShardedTensor> copies = {part(4, 6), part(0, 6), part(0, 6), part(4, 6)};
  loops::require_covered("load", own, loops::given_parts(copies));
  loops::copy_parts(own, loops::given_parts(copies));
  EXPECT_TRUE(own.values.equal(torch::arange(10)));
}

// A state of an optimizer that has had no step, loaded into one that has: it begins anew, and trains.
TEST(OptimizerParts, AStateWithoutStepsBeginsAnewInEveryWayToKeepIt) {
  for (const auto& [name, make] : test::optimizers()) {
    SCOPED_TRACE(name);
    const test::NamedValues expected = test::train_plain(2, kMoreSteps, make);
    const test::ScratchFolder folder;
    AllParts parts;
    test::run_ranks(2, [&](comm::Communicator& communicator) {
      test::BlockNet model;
      const auto sharded = fully_shard(model, {.process_group = test::borrowed(communicator)});
      const auto fresh = make(sharded->parameters());
      const StateDict weights = sharded->full_state_dict();
      const StateDict full = sharded->full_optim_state_dict(*fresh);
      EXPECT_EQ(full.size(), sharded->parameters().size());
      for (const auto& [key, value] : full) {
        EXPECT_TRUE(key.ends_with(".step")) << key;
        EXPECT_EQ(value.item<int64_t>(), 0) << key;
      }
      sharded->save(folder.path().string(), "fresh", *fresh);
      parts.add(sharded->sharded_optim_state_dict(*fresh));
      communicator.barrier();
      const auto optimizer = make(sharded->parameters());
      for (int way = 0; way < 4; ++way) {
        test::train_joined(model, *optimizer, 10, 1);
        if (way == 0) sharded->load_full_optim_state_dict(*optimizer, full);
        if (way == 1) sharded->load_full_optim_state_dict(*optimizer, full, /*broadcast_from_rank0=*/true);
        if (way == 2) sharded->load_sharded_optim_state_dict(*optimizer, parts.get());
        if (way == 3) sharded->load(folder.path().string(), "fresh", *optimizer);
        sharded->load_full_state_dict(weights);
        test::train_joined(model, *optimizer, 0, kMoreSteps);
        EXPECT_LT(test::largest_difference(sharded->full_state_dict(), expected), kSameTraining) << way;
      }
    });
  }
}

TEST(OptimizerParts, AdagradBeginsAnewWithItsInitialValue) {
  const test::MakeOptimizer make = [](const test::Tensors& p) {
    return std::make_unique<torch::optim::Adagrad>(p,
                                                   torch::optim::AdagradOptions(1e-2).initial_accumulator_value(0.3));
  };
  const test::NamedValues expected = test::train_plain(2, kMoreSteps, make);
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    test::BlockNet model;
    const auto sharded = fully_shard(model, {.process_group = test::borrowed(communicator)});
    const auto optimizer = make(sharded->parameters());
    const StateDict weights = sharded->full_state_dict();
    const StateDict fresh = sharded->full_optim_state_dict(*optimizer);
    test::train_joined(model, *optimizer, 10, 1);
    sharded->load_full_optim_state_dict(*optimizer, fresh);
    sharded->load_full_state_dict(weights);
    test::train_joined(model, *optimizer, 0, kMoreSteps);
    EXPECT_LT(test::largest_difference(sharded->full_state_dict(), expected), kSameTraining);
  });
}

// --- several optimizers of one model ---

test::NamedValues plain_with_two(int steps) {
  test::BlockNet model;
  const auto all = model->parameters();
  const auto first = test::optimizers()[2].second({all.begin(), all.begin() + 4});
  const auto second = test::optimizers()[0].second({all.begin() + 4, all.end()});
  for (int step = 0; step < steps; ++step) {
    model->zero_grad();
    model->loss(test::joined_batch(step, 2)).backward();
    first->step();
    second->step();
  }
  return test::named_values(*model);
}

TEST(OptimizerParts, TwoOptimizersOfAModelGoOnFromStateDictsAndAreRefusedInFiles) {
  const test::NamedValues expected = plain_with_two(kFirstSteps + kMoreSteps);
  const test::ScratchFolder folder;
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    test::BlockNet model;
    const auto sharded = fully_shard(model, {.process_group = test::borrowed(communicator)});
    const auto all = sharded->parameters();
    const auto make_first = [&] { return test::optimizers()[2].second({all.begin(), all.begin() + 4}); };
    const auto make_second = [&] { return test::optimizers()[0].second({all.begin() + 4, all.end()}); };
    auto first = make_first();
    auto second = make_second();
    const auto train = [&](int from, int steps) {
      for (int step = from; step < from + steps; ++step) {
        model->loss(test::joined_batch(step, 2)).backward();
        for (auto* one : {first.get(), second.get()}) {
          one->step();
          one->zero_grad();
        }
      }
    };
    train(0, kFirstSteps);
    EXPECT_THAT([&] { sharded->save(folder.path().string(), "part", *first); },
                ThrowsMessage<UsageError>(AllOf(HasSubstr("found one over 4"), HasSubstr("sharded_optim_state_dict"))));
    EXPECT_THAT([&] { sharded->load(folder.path().string(), "part", *second); },
                ThrowsMessage<UsageError>(HasSubstr("load: expected an optimizer over all")));
    const StateDict of_first = sharded->full_optim_state_dict(*first);
    const StateDict of_second = sharded->full_optim_state_dict(*second);
    first = make_first();
    second = make_second();
    EXPECT_THAT([&] { sharded->load_full_optim_state_dict(*first, of_second); }, testing::Throws<UsageError>());
    sharded->load_full_optim_state_dict(*first, of_first);
    sharded->load_full_optim_state_dict(*second, of_second);
    train(kFirstSteps, kMoreSteps);
    EXPECT_LT(test::largest_difference(sharded->full_state_dict(), expected), kSameTraining);
  });
}

TEST(OptimizerParts, FilesBringTheOptionsOfGroupsAndStateDictsDoNot) {
  const test::ScratchFolder folder;
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    test::BlockNet model;
    const auto sharded = fully_shard(model, {.process_group = test::borrowed(communicator)});
    const auto all = sharded->parameters();
    const auto make = [&](double first, double second) {
      std::vector<torch::optim::OptimizerParamGroup> groups;
      groups.emplace_back(test::Tensors{all.begin(), all.begin() + 4});
      groups.emplace_back(test::Tensors{all.begin() + 4, all.end()});
      auto optimizer = std::make_unique<torch::optim::AdamW>(groups, torch::optim::AdamWOptions(1e-3));
      optimizer->param_groups()[0].options().set_lr(first);
      optimizer->param_groups()[1].options().set_lr(second);
      return optimizer;
    };
    const auto rate = [](torch::optim::Optimizer& optimizer, size_t group) {
      return optimizer.param_groups()[group].options().get_lr();
    };
    const auto saved = make(0.125, 0.25);
    test::train_joined(model, *saved, 0, 1);
    sharded->save(folder.path().string(), "groups", *saved);
    communicator.barrier();
    const auto other = make(0.5, 0.75);
    sharded->load_full_optim_state_dict(*other, sharded->full_optim_state_dict(*saved));
    EXPECT_EQ(rate(*other, 0), 0.5);
    EXPECT_EQ(rate(*other, 1), 0.75);
    sharded->load(folder.path().string(), "groups", *other);
    EXPECT_EQ(rate(*other, 0), 0.125);
    EXPECT_EQ(rate(*other, 1), 0.25);
  });
}

// --- copies of the model ---

void expect_goes_on_with_copies(int ranks, bool mesh) {
  const test::MakeOptimizer make = test::optimizers()[2].second;
  const test::NamedValues expected = test::train_plain(2, kFirstSteps + kMoreSteps, make);
  AllParts weights, parts;
  const test::ScratchFolder folder;
  test::run_ranks(ranks, [&](comm::Communicator& communicator) {
    FullyShardOptions options;
    if (mesh) {
      options.mesh = comm::init_device_mesh(test::borrowed(communicator), {2, ranks / 2}, {"replicate", "shard"});
    } else {
      options.process_group = test::borrowed(communicator);
      options.sharding_strategy = ShardingStrategy::kNoShard;
    }
    test::BlockNet model;
    const auto sharded = fully_shard(model, options);
    const auto first = make(sharded->parameters());
    test::train_joined(model, *first, 0, kFirstSteps);
    weights.add(sharded->sharded_state_dict());
    parts.add(sharded->sharded_optim_state_dict(*first));
    sharded->save(folder.path().string(), "copies", *first);
    communicator.barrier();
    for (const bool from_files : {false, true}) {
      const auto second = make(sharded->parameters());
      test::train_joined(model, *second, 20, 1);
      if (from_files) {
        sharded->load(folder.path().string(), "copies", *second);
      } else {
        sharded->load_sharded_state_dict(weights.get());
        sharded->load_sharded_optim_state_dict(*second, parts.get());
      }
      test::train_joined(model, *second, kFirstSteps, kMoreSteps);
      EXPECT_LT(test::largest_difference(sharded->full_state_dict(), expected), kSameTraining) << from_files;
    }
  });
}

TEST(OptimizerParts, TrainingGoesOnWithCopiesAlongAMesh) { expect_goes_on_with_copies(4, /*mesh=*/true); }

TEST(OptimizerParts, TrainingGoesOnWithoutShards) { expect_goes_on_with_copies(2, /*mesh=*/false); }

}  // namespace
}  // namespace ds
