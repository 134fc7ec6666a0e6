// The GPT of the example against plain torch (golden.json, made by golden.py).
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "core/check.h"
#include "core/files/safetensors.h"
#include "examples/gpt/gpt_init.h"
#include "examples/gpt/gpt_model.h"
#include "examples/gpt/text_corpus.h"
#include "examples/gpt/token_batches.h"
#include "tests/support/scratch_folder.h"

namespace gpt {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

const nlohmann::json& golden(bool tied) {
  static const nlohmann::json kAll = nlohmann::json::parse(std::ifstream(DS_SOURCE_DIR "/tests/examples/golden.json"));
  return kAll[tied ? "tied" : "untied"];
}

uint64_t checksum(const at::Tensor& tensor) {
  const auto* values = tensor.const_data_ptr<float>();
  uint64_t sum = 0;
  for (int64_t j = 0; j < tensor.numel(); ++j) {
    uint32_t bits = 0;
    std::memcpy(&bits, values + j, sizeof bits);
    sum += bits * static_cast<uint64_t>(j + 1);
  }
  return sum;
}

class GptModelTest : public testing::TestWithParam<bool> {
 protected:
  GptConfig config() const { return {.tie_embeddings = GetParam()}; }
  void expect_torchs_training(const GptConfig& config) const;
};

TEST_P(GptModelTest, NamesOrderAndEveryBitOfTheInitialWeights) {
  Gpt model(config());
  initialize_weights(model, 1234);
  const nlohmann::json& wanted = golden(GetParam())["checksums"];
  const auto parameters = model.named_parameters();
  ASSERT_EQ(parameters.size(), wanted.size());
  for (size_t i = 0; i < wanted.size(); ++i) {
    EXPECT_EQ(parameters[i].key(), wanted[i][0].get<std::string>());
    EXPECT_EQ(std::to_string(checksum(parameters[i].value())), wanted[i][1].get<std::string>()) << wanted[i][0];
  }
}

void GptModelTest::expect_torchs_training(const GptConfig& config) const {
  const nlohmann::json& wanted = golden(GetParam());
  Gpt model(config);
  initialize_weights(model, 1234);
  TextCorpus text = TextCorpus::open(DS_SOURCE_DIR "/tests/parity/data/kjv_1m.bin");
  TokenBatches batches(text, {.order = Order::kSequential, .batch_size = 16});
  torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(1e-3).weight_decay(0.01));
  for (size_t step = 0; step < wanted["losses"].size(); ++step) {
    const TokenBatch batch = batches.get(static_cast<int64_t>(step) * 16);
    const at::Tensor loss = model.forward(batch.data, batch.target);
    optimizer.zero_grad();
    loss.backward();
    EXPECT_NEAR(loss.item<double>(), wanted["losses"][step].get<double>(), 5e-6) << "step " << step;
    if (step == 0) {
      for (const auto& item : model.named_parameters()) {
        const double norm = wanted["gradient_norms"][item.key()];
        EXPECT_NEAR(item.value().grad().to(at::kDouble).norm().item<double>(), norm, 2e-5 * norm) << item.key();
      }
    }
    optimizer.step();
  }
}

TEST_P(GptModelTest, LossesAndGradientsAreThoseOfTorch) { expect_torchs_training(config()); }

TEST_P(GptModelTest, WithFusedNormsToo) {
  GptConfig fused = config();
  fused.fused_norms = true;
  expect_torchs_training(fused);
}

INSTANTIATE_TEST_SUITE_P(Heads, GptModelTest, testing::Bool(),
                         [](const auto& variant) { return variant.param ? "Tied" : "Untied"; });

TEST(GptModel, FrozenEmbeddingsAreTheOnlyParametersWithoutGradient) {
  for (const bool tied : {false, true}) {
    Gpt model({.layers = 1, .hidden = 8, .heads = 2, .seq_len = 4, .tie_embeddings = tied, .freeze_embeddings = true});
    initialize_weights(model, 5);
    const at::Tensor tokens = torch::arange(4, torch::kLong).view({1, 4});
    model.forward(tokens, tokens + 1).backward();
    for (const auto& item : model.named_parameters()) {
      const bool frozen = item.key() == "wte.weight" || item.key() == "wpe.weight";
      EXPECT_EQ(item.value().grad().defined(), !frozen) << item.key();
    }
  }
}

TEST(GptModel, CheckpointedBlocksChangeNoBit) {
  std::vector<at::Tensor> gradients[2];
  for (const bool checkpointed : {false, true}) {
    Gpt model({.layers = 3, .hidden = 16, .heads = 2, .seq_len = 8, .activation_checkpointing = checkpointed});
    initialize_weights(model, 7);
    const at::Tensor tokens = torch::arange(16, torch::kLong).view({2, 8});
    const at::Tensor loss = model.forward(tokens, tokens + 1);
    loss.backward();
    gradients[checkpointed].push_back(loss.detach());
    for (const at::Tensor& parameter : model.parameters()) gradients[checkpointed].push_back(parameter.grad());
  }
  ASSERT_EQ(gradients[0].size(), gradients[1].size());
  for (size_t i = 0; i < gradients[0].size(); ++i) EXPECT_TRUE(torch::equal(gradients[0][i], gradients[1][i])) << i;
}

TEST(GptModel, LaterTokensDoNotChangeEarlierScores) {
  Gpt model({.layers = 2, .hidden = 16, .heads = 2, .seq_len = 8});
  initialize_weights(model, 7);
  const at::NoGradGuard no_grad;
  const at::Tensor tokens = torch::tensor({{1, 2, 3, 4}}, torch::kLong);
  const at::Tensor changed = torch::tensor({{1, 2, 3, 9}}, torch::kLong);
  const at::Tensor a = model.logits(tokens);
  const at::Tensor b = model.logits(changed);
  EXPECT_TRUE(torch::equal(a.narrow(1, 0, 3), b.narrow(1, 0, 3)));
  EXPECT_FALSE(torch::equal(a.narrow(1, 3, 1), b.narrow(1, 3, 1)));
}

TEST(GptModel, SizesThatMakeNoModelAreRefused) {
  EXPECT_THAT([] { Gpt({.hidden = 10, .heads = 3}); },
              ThrowsMessage<ds::ConfigError>(testing::AllOf(HasSubstr("--hidden 10"), HasSubstr("--heads 3"))));
  EXPECT_THAT([] { Gpt({.layers = 0}); }, ThrowsMessage<ds::ConfigError>(HasSubstr("--layers")));
}

TEST(GptInit, SavedWeightsLoadBitForBit) {
  const ds::test::ScratchFolder folder;
  Gpt saved({.layers = 1, .hidden = 8, .heads = 2, .seq_len = 4});
  initialize_weights(saved, 5);
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  for (const auto& item : saved.named_parameters()) tensors.emplace_back(item.key(), item.value());
  ds::write_safetensors(folder / "w.safetensors", tensors);
  Gpt loaded(saved.config());
  load_weights(loaded, folder / "w.safetensors");
  for (const auto& item : loaded.named_parameters()) {
    EXPECT_TRUE(torch::equal(item.value(), saved.named_parameters()[item.key()])) << item.key();
  }
}

TEST(GptInit, WeightsOfAnotherModelAreRefusedByName) {
  const ds::test::ScratchFolder folder;
  const std::string path = folder / "w.safetensors";
  Gpt one({.layers = 1, .hidden = 8, .heads = 2, .seq_len = 4});
  initialize_weights(one, 5);
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  for (const auto& item : one.named_parameters()) tensors.emplace_back(item.key(), item.value());
  ds::write_safetensors(path, tensors);
  Gpt deeper({.layers = 2, .hidden = 8, .heads = 2, .seq_len = 4});
  EXPECT_THAT([&] { load_weights(deeper, path); }, ThrowsMessage<ds::IoError>(HasSubstr("h.1.ln1.weight")));
  Gpt wider({.layers = 1, .hidden = 12, .heads = 2, .seq_len = 4});
  EXPECT_THAT([&] { load_weights(wider, path); }, ThrowsMessage<ds::IoError>(HasSubstr("wte.weight")));
  Gpt tied({.layers = 1, .hidden = 8, .heads = 2, .seq_len = 4, .tie_embeddings = true});
  EXPECT_THAT([&] { load_weights(tied, path); }, ThrowsMessage<ds::IoError>(HasSubstr("head.weight")));
}

}  // namespace
}  // namespace gpt
