// A GPT in bfloat16 learns on FP8 as it does without.
#include <gtest/gtest.h>

#include <numeric>

#include "examples/gpt/gpt_init.h"
#include "examples/gpt/gpt_model.h"
#include "tests/model/small_run.h"
#include "tests/support/grid.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;

constexpr int64_t kVocabulary = 64;
constexpr int64_t kLength = 32;
constexpr int kSteps = 200;

// Text of a rule: each token follows from the one before, but for one in eight.
std::pair<at::Tensor, at::Tensor> text_of(uint64_t seed) {
  uint64_t state = seed * 0x9E3779B97F4A7C15 + 1;
  const auto random = [&state] { return (state = state * 6364136223846793005 + 1442695040888963407) >> 40; };
  const at::Tensor tokens = torch::empty({8, kLength + 1}, torch::kLong);
  for (int64_t row = 0; row < 8; ++row) {
    int64_t* const of_row = tokens[row].data_ptr<int64_t>();
    for (int64_t i = 0; i <= kLength; ++i) {
      const bool is_random = i == 0 || random() % 8 == 0;
      of_row[i] = is_random ? static_cast<int64_t>(random() % kVocabulary) : (of_row[i - 1] * 5 + 3) % kVocabulary;
    }
  }
  return {tokens.narrow(1, 0, kLength).contiguous(), tokens.narrow(1, 1, kLength).contiguous()};
}

std::vector<double> curve_of(const ordered_json& fp8) {
  std::vector<double> losses;
  test::run_ranks(1, [&](comm::Communicator& ranks) {
    const gpt::GptConfig sizes = {.layers = 4, .hidden = 64, .heads = 4, .seq_len = kLength, .vocab = kVocabulary};
    const auto model = std::make_shared<gpt::Gpt>(sizes);
    gpt::initialize_weights(*model, 1);
    ordered_json config = {{"train_micro_batch_size_per_gpu", 8},
                           {"bf16", {{"enabled", true}}},
                           {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 3e-3}}}}},
                           {"zero_optimization", {{"stage", 2}}}};
    if (!fp8.is_null()) config["fp8"] = fp8;
    const auto engine = start(model, config, ranks).engine;
    for (int step = 0; step < kSteps; ++step) {
      const auto [tokens, targets] = text_of(static_cast<uint64_t>(step));
      const at::Tensor loss = model->forward(tokens, targets);
      engine->backward(loss);
      engine->step();
      losses.push_back(loss.item<double>());
    }
  });
  return losses;
}

double mean_of_last(const std::vector<double>& losses, int count) {
  return std::accumulate(losses.end() - count, losses.end(), 0.0) / count;
}

TEST(Fp8Curve, IsNearThatOfBfloat16) {
  const std::vector<double> plain = curve_of(nullptr);
  const double expected = mean_of_last(plain, 20);
  ASSERT_LT(expected, plain.front() - 1.0) << "it has learnt";
  std::vector<ordered_json> variants{ordered_json::object()};
  if (test::whole_grid_wanted()) {
    variants.push_back({{"recipe", "current"}});
    variants.push_back({{"fp8_wgrad", true}, {"amax_history_len", 16}});
  }
  for (const ordered_json& more : variants) {
    ordered_json fp8 = {{"enabled", true}, {"emulate", true}, {"exclude", {"head"}}};
    fp8.update(more);
    const std::vector<double> found = curve_of(fp8);
    const double last = mean_of_last(found, 20);
    std::cout << "bfloat16 " << plain.front() << " to " << expected << ", FP8 " << more.dump() << " to " << last
              << "\n";
    EXPECT_NEAR(last, expected, 0.005 * expected) << more.dump();
    EXPECT_NE(last, expected);
  }
}

}  // namespace
}  // namespace ds::engine
