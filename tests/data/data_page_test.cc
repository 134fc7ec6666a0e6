// The programs of docs/data.md.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "dsengine/engine.h"
#include "dsengine/loader.h"
#include "dsengine/token_dataset.h"
#include "tests/core/page.h"
#include "tests/support/metric_writer.h"
#include "tests/support/scratch_folder.h"

namespace ds::data_page {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;
using testing::SizeIs;

struct Pictures {
  struct Sample {
    at::Tensor pixels, label;
    static constexpr auto fields() { return std::tuple(&Sample::pixels, &Sample::label); }
  };
  Sample get(size_t index) const {
    const at::Tensor shift = torch::rand({1}, ds::data::sample_generator());
    return {torch::full({3, 4}, static_cast<double>(index)) + shift, torch::tensor(static_cast<int64_t>(index) % 2)};
  }
  size_t size() const { return 40; }
};

// clang-format off
struct Lines {
  auto open(const ds::data::StreamPart& part) const {
    return [line = part.first, step = part.step]() mutable -> std::optional<at::Tensor> {
      if (line >= 50) return std::nullopt;
      return torch::tensor(std::exchange(line, line + step));
    };
  }
};
// clang-format on

struct Sentences {
  at::Tensor get(size_t index) const { return torch::ones({static_cast<int64_t>(index) + 1}); }
  size_t size() const { return 3; }
};

// What a linear layer learns to give.
struct Points : torch::data::datasets::Dataset<Points> {
  torch::data::Example<> get(size_t index) override {
    const at::Tensor x = torch::rand({4}, ds::data::sample_generator());
    return {x, x.sum() + static_cast<double>(index % 2)};
  }
  torch::optional<size_t> size() const override { return 16; }
};

std::vector<at::Tensor> weights_after(int workers) {
  torch::manual_seed(1);
  torch::nn::Sequential model(torch::nn::Linear(4, 1), torch::nn::Flatten(torch::nn::FlattenOptions().start_dim(0)));
  const nlohmann::json config = {{"train_micro_batch_size_per_gpu", 2},
                                 {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 0.01}}}}}};
  const Points dataset;
  if (workers == 0) {
    auto [engine, optimizer, loader, schedule] =
        ds::engine::initialize({.model = model.ptr(), .config = config, .training_data = dataset});
    for (auto& batch : *loader) {
      engine->backward(torch::mse_loss(model->forward(batch.data), batch.target));
      engine->step();
    }
    return {model->parameters()[0].detach().clone()};
  }
  auto [engine, optimizer, loader, schedule] = ds::engine::initialize(
      {.model = model.ptr(), .config = config, .training_data = dataset, .loading = {.reading = {.num_workers = 4}}});
  for (auto& batch : *loader) {
    engine->backward(torch::mse_loss(model->forward(batch.data), batch.target));
    engine->step();
  }
  return {model->parameters()[0].detach().clone()};
}

TEST(DataPage, AnEngineTrainsTheSameWithWorkers) {
  EXPECT_TRUE(torch::equal(weights_after(0)[0], weights_after(4)[0].cpu()));
}

TEST(DataPage, StructuresAndEpochs) {
  const int ranks = 2;
  std::multiset<int64_t> seen;
  for (int rank = 0; rank < ranks; ++rank) {
    const auto train = [&](const at::Tensor& pixels, const at::Tensor& label) {
      EXPECT_EQ(pixels.sizes(), (std::vector<int64_t>{4, 3, 4}));
      EXPECT_EQ(label.sizes(), (std::vector<int64_t>{4}));
      for (int64_t i = 0; i < 4; ++i) seen.insert(pixels[i][0][0].floor().to(at::kLong).item<int64_t>());
    };
    ds::data::Loader loader(
        Pictures(),
        {.batch_size = 4, .rank = rank, .world_size = ranks, .drop_last = true, .reading = {.num_workers = 2}});
    for (int epoch = 0; epoch < 2; ++epoch) {
      for (auto& batch : loader) {
        train(batch.pixels, batch.label);
      }
    }
  }
  EXPECT_THAT(seen, SizeIs(80));
  EXPECT_THAT(std::set<int64_t>(seen.begin(), seen.end()), SizeIs(40));
}

TEST(DataPage, ACollateFunction) {
  // clang-format off
  ds::data::Loader sentences(Sentences(), {.batch_size = 3, .shuffle = false}, [](std::vector<at::Tensor> samples) {
    return torch::nn::utils::rnn::pad_sequence(samples, /*batch_first=*/true);
  });
  // clang-format on
  EXPECT_EQ(sentences.begin()->sizes(), (std::vector<int64_t>{3, 3}));
}

TEST(DataPage, GoingOn) {
  ds::data::Loader first(Pictures(), {.batch_size = 4});
  EXPECT_TRUE(first.begin()->pixels.defined());
  const nlohmann::json position = first.state_dict();  // into SaveOptions::client_state
  ds::data::Loader second(Pictures(), {.batch_size = 4, .reading = {.num_workers = 3}});
  second.load_state_dict(position);
  EXPECT_TRUE(torch::equal(second.begin()->pixels, first.begin()->pixels));
}

TEST(DataPage, ASamplerOfOnesOwn) {
  const auto hard_ones_twice = [](int64_t epoch) {
    std::vector<int64_t> order = {0, 1, 2, 3, 3, 5, 5, 7};
    std::mt19937_64 random(static_cast<uint64_t>(epoch));
    std::shuffle(order.begin(), order.end(), random);
    return order;
  };
  ds::data::Loader weighted(Pictures(), {.batch_size = 2, .order = hard_ones_twice});
  std::multiset<int64_t> seen;
  for (auto& batch : weighted) {
    EXPECT_EQ(batch.label.numel(), 2);
    seen.insert(weighted.indices().begin(), weighted.indices().end());
  }
  EXPECT_EQ(seen, (std::multiset<int64_t>{0, 1, 2, 3, 3, 5, 5, 7}));
}

TEST(DataPage, AStream) {
  const int ranks = 2;
  std::multiset<int64_t> seen;
  for (int rank = 0; rank < ranks; ++rank) {
    ds::data::Loader stream(Lines(),
                            {.batch_size = 4, .rank = rank, .world_size = ranks, .reading = {.num_workers = 3}});
    for (auto& batch : stream) {
      for (int64_t i = 0; i < batch.numel(); ++i) seen.insert(batch[i].item<int64_t>());
    }
  }
  EXPECT_THAT(seen, SizeIs(50));
  EXPECT_THAT(std::set<int64_t>(seen.begin(), seen.end()), SizeIs(50));
}

TEST(DataPage, MegatronsFiles) {
  const ds::test::ScratchFolder folder;
  std::vector<std::vector<int32_t>> documents;
  for (int32_t i = 0; i < 40; ++i) documents.emplace_back(10 + i, i);
  const std::string path = ds::test::write_indexed_dataset<int32_t>(folder / "corpus", documents);
  ds::data::TokenDataset news(path, {.sequence_length = 8, .num_samples = 100});
  ds::data::TokenDataset books(path, {.sequence_length = 8, .num_samples = 300, .seed = 5});
  ds::data::BlendedTokens blend({news, books}, {0.25, 0.75}, 300);
  ds::data::Loader sequences(blend, {.batch_size = 4, .shuffle = false, .reading = {.num_workers = 2}});
  EXPECT_EQ(sequences.size(), 75);
  EXPECT_TRUE(torch::equal(sequences.begin()->labels[0], blend.get(0).labels));
}

TEST(DataPage, EveryProgramOfThePageStandsInThisFile) {
  const ProgramsOfPage found = programs_of_page("docs/data.md", "tests/data/data_page_test.cc");
  EXPECT_THAT(found.missing, IsEmpty());
  EXPECT_GE(found.count, 6);
}

}  // namespace
}  // namespace ds::data_page
