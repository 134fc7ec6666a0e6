#include "dsengine/data_loader.h"
#include "data/distributed_sampler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <set>
#include <vector>

#include "core/check.h"

namespace ds::engine {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::ThrowsMessage;

// Sample i is [i, i] with target 10 i.
struct Counting : torch::data::datasets::Dataset<Counting> {
  explicit Counting(int64_t count) : count_(count) {}
  torch::data::Example<> get(size_t index) override {
    const auto value = static_cast<int64_t>(index);
    return {torch::full({2}, value, torch::kLong), torch::tensor(10 * value)};
  }
  torch::optional<size_t> size() const override { return static_cast<size_t>(count_); }
  int64_t count_;
};

std::vector<std::vector<int64_t>> loop_over(DataLoader& loader) {
  std::vector<std::vector<int64_t>> result;
  for (auto& batch : loader) {
    EXPECT_EQ(batch.data.dim(), 2);
    EXPECT_TRUE(torch::equal(batch.data.select(1, 0) * 10, batch.target));
    const at::Tensor first = batch.data.select(1, 0).contiguous();
    result.emplace_back(first.const_data_ptr<int64_t>(), first.const_data_ptr<int64_t>() + first.numel());
  }
  return result;
}

TEST(DataLoader, OneEpochALoopInBatchesStackedAlongTheFirstDimension) {
  DataLoader loader(Counting(7), {.micro_batch_size = 3, .shuffle = false});
  EXPECT_EQ(loader.size(), 3);
  EXPECT_THAT(loop_over(loader), ElementsAre(ElementsAre(0, 1, 2), ElementsAre(3, 4, 5), ElementsAre(6)));
  EXPECT_EQ(loader.epoch(), 1);
}

TEST(DataLoader, EpochsAreShuffledAnewAndAlikeForTheSameSeed) {
  DataLoader a(Counting(20), {.micro_batch_size = 20, .seed = 5});
  DataLoader b(Counting(20), {.micro_batch_size = 20, .seed = 5});
  DataLoader c(Counting(20), {.micro_batch_size = 20, .seed = 6});
  const auto first = loop_over(a);
  const auto second = loop_over(a);
  EXPECT_NE(first, second);
  EXPECT_EQ(loop_over(b), first);
  EXPECT_EQ(loop_over(b), second);
  EXPECT_NE(loop_over(c), first);
}

TEST(DataLoader, RanksShareAnEpoch) {
  std::multiset<int64_t> seen;
  for (int rank = 0; rank < 4; ++rank) {
    DataLoader loader(Counting(24), {.micro_batch_size = 2, .rank = rank, .world_size = 4});
    EXPECT_EQ(loader.size(), 3);
    for (const auto& batch : loop_over(loader)) seen.insert(batch.begin(), batch.end());
  }
  EXPECT_EQ(seen.size(), 24U);
  EXPECT_EQ(std::set<int64_t>(seen.begin(), seen.end()).size(), 24U);
}

TEST(DataLoader, ALoopThatWasLeftIsContinuedAlsoFromASavedState) {
  DataLoader loader(Counting(12), {.micro_batch_size = 2});
  DataLoader reference(Counting(12), {.micro_batch_size = 2});
  const auto whole = loop_over(reference);
  int taken = 0;
  for (auto& batch : loader) {
    EXPECT_TRUE(batch.data.defined());
    if (++taken == 2) break;
  }
  DataLoader resumed(Counting(12), {.micro_batch_size = 2, .seed = 77});
  resumed.load_state(loader.state());
  const std::vector<std::vector<int64_t>> rest(whole.begin() + 2, whole.end());
  EXPECT_EQ(loop_over(loader), rest);
  EXPECT_EQ(loop_over(resumed), rest);
  EXPECT_EQ(loop_over(resumed), loop_over(reference)) << "the next epoch too";
}

TEST(TrainingData, TakesDatasetsByValueAndByPointerAndIsEmptyByDefault) {
  EXPECT_FALSE(TrainingData());
  EXPECT_FALSE(TrainingData(std::shared_ptr<Counting>()));
  const TrainingData by_value = Counting(3);
  const TrainingData by_pointer = std::make_shared<Counting>(4);
  EXPECT_EQ(by_value.size(), 3);
  EXPECT_EQ(by_pointer.size(), 4);
  EXPECT_EQ(by_pointer.get(2).target.item<int64_t>(), 20);
}

TEST(TrainingData, ADatasetWithoutTargetsOrTorchsBaseClass) {
  struct Plain {
    struct Sample {
      at::Tensor data;
    };
    Sample get(size_t index) const { return {torch::tensor(static_cast<int64_t>(index))}; }
    int64_t size() const { return 5; }
  };
  DataLoader loader(Plain(), {.micro_batch_size = 5, .shuffle = false});
  for (auto& batch : loader) {
    EXPECT_TRUE(torch::equal(batch.data, torch::arange(5)));
    EXPECT_FALSE(batch.target.defined());
  }
}

TEST(DataLoader, MistakesAreNamed) {
  struct Endless : Counting {
    using Counting::Counting;
    torch::optional<size_t> size() const override { return {}; }
  };
  struct Ragged : Counting {
    using Counting::Counting;
    torch::data::Example<> get(size_t index) override {
      return {torch::zeros({static_cast<int64_t>(index) + 1}), torch::tensor(0)};
    }
  };
  EXPECT_THAT([] { DataLoader(TrainingData(), {}); }, ThrowsMessage<UsageError>(HasSubstr("training_data")));
  EXPECT_THAT([] { DataLoader(Endless(1), {}); }, ThrowsMessage<UsageError>(HasSubstr("does not know its size")));
  DataLoader ragged(Ragged(3), {.micro_batch_size = 3});
  EXPECT_THAT([&] { ragged.begin(); }, ThrowsMessage<UsageError>(HasSubstr("one shape and dtype")));
}

}  // namespace
}  // namespace ds::engine
