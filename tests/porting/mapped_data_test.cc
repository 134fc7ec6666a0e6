// Datasets of torch::data with transforms, handed to initialize.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <vector>

#include "core/check.h"
#include "tests/porting/ported_run.h"

namespace ds::engine {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
namespace transforms = torch::data::transforms;

class Pictures : public torch::data::datasets::Dataset<Pictures> {
 public:
  torch::data::Example<> get(size_t index) override {
    const auto number = static_cast<int64_t>(index);
    return {sample(number, 0).view({1, 4, 6}), torch::tensor(number)};
  }
  torch::optional<size_t> size() const override { return 10; }
};

class Unlabelled : public torch::data::datasets::Dataset<Unlabelled, torch::data::TensorExample> {
 public:
  torch::data::TensorExample get(size_t index) override { return sample(static_cast<int64_t>(index), 0); }
  torch::optional<size_t> size() const override { return 10; }
};

// Two of each, as an augmentation makes them.
struct Twice : transforms::Collation<torch::data::Example<>> {
  torch::data::Example<> apply_batch(std::vector<torch::data::Example<>> batch) override {
    return {torch::stack({batch[0].data, batch[0].data}), torch::stack({batch[0].target, batch[0].target})};
  }
};

class Endless : public torch::data::datasets::StreamDataset<Endless> {
 public:
  std::vector<torch::data::Example<>> get_batch(size_t /*size*/) override { return {}; }
  torch::optional<size_t> size() const override { return torch::nullopt; }
};

static_assert(BatchedDataset<decltype(Pictures().map(transforms::Stack<>()))>);
static_assert(BatchedDataset<decltype(Pictures().map(transforms::Normalize<>(0, 1)))>);
static_assert(!UsableDataset<Endless>);  // refused by the sentence of TrainingData

transforms::Normalize<> normalize() { return {0.5, 2.0}; }

std::vector<Batch> batches_of(TrainingData data) {
  DataLoader loader(std::move(data), {.micro_batch_size = 4, .shuffle = false});
  std::vector<Batch> batches;
  for (const Batch& batch : loader) batches.push_back(batch);
  return batches;
}

TEST(MappedData, GivesTheBatchesOfTorchsLoader) {
  auto expected = torch::data::make_data_loader<torch::data::samplers::SequentialSampler>(
      Pictures().map(normalize()).map(transforms::Stack<>()), 4);
  const auto stacked = batches_of(Pictures().map(normalize()).map(transforms::Stack<>()));
  const auto listed = batches_of(Pictures().map(normalize()));
  const auto shared =
      batches_of(std::make_shared<decltype(Pictures().map(transforms::Stack<>()))>(Pictures(), transforms::Stack<>()));
  size_t number = 0;
  for (const auto& batch : *expected) {
    ASSERT_LT(number, stacked.size());
    for (const auto* found : {&stacked, &listed}) {
      EXPECT_TRUE((*found)[number].data.equal(batch.data)) << number;
      EXPECT_TRUE((*found)[number].target.equal(batch.target)) << number;
    }
    EXPECT_EQ(shared[number].data.sizes(), batch.data.sizes());
    ++number;
  }
  EXPECT_EQ(number, 3U);
  EXPECT_EQ(stacked.size(), 3U);
}

TEST(MappedData, MayHaveNoTarget) {
  const auto batches = batches_of(Unlabelled().map(transforms::Stack<torch::data::TensorExample>()));
  EXPECT_EQ(batches.at(0).data.sizes(), (std::vector<int64_t>{4, 4, 6}));
  EXPECT_FALSE(batches.at(0).target.defined());
}

TEST(MappedData, RefusesBatchesOfMoreThanWhatItAskedFor) {
  EXPECT_THAT([] { batches_of(Pictures().map(Twice())); },
              ThrowsMessage<UsageError>(AllOf(HasSubstr("a batch of one sample"), HasSubstr("Float [2, 1, 4, 6]"))));
}

TEST(MappedData, IsTakenByInitialize) {
  test::run_ranks(2, [](comm::Communicator& communicator) {
    SmallNet model;
    auto config = small_config(2, 1);
    config["train_micro_batch_size_per_gpu"] = 2;
    const auto parts = initialize({.model = model.ptr(),
                                   .config = config,
                                   .training_data = Pictures().map(normalize()).map(transforms::Stack<>()),
                                   .communicator = borrowed(communicator)});
    for (const auto& batch : *parts.loader) {
      parts.engine->backward(model->loss(batch.data.view({-1, 6})));
      parts.engine->step();
    }
    EXPECT_EQ(parts.engine->global_steps(), 3);
  });
}

}  // namespace
}  // namespace ds::engine
