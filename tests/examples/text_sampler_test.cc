#include "examples/gpt/text_sampler.h"

#include <algorithm>
#include <string>

#include "core/check.h"
#include "examples/gpt/gpt_init.h"

namespace gpt {
namespace {

// Knows one thing: after byte b comes b + 1.
Logits logits_of(const Gpt& model) {
  return [&model](const at::Tensor& tokens) { return model.logits(tokens); };
}

std::unique_ptr<Gpt> counting_model() {
  auto model = std::make_unique<Gpt>(GptConfig{.layers = 1, .hidden = 256, .heads = 1, .seq_len = 4});
  initialize_weights(*model, 1);
  const at::NoGradGuard no_grad;
  auto parameters = model->named_parameters();
  parameters["wte.weight"].copy_(torch::eye(256) * 50);
  parameters["wpe.weight"].zero_();
  parameters["h.0.attn.proj.weight"].zero_();
  parameters["h.0.mlp.proj.weight"].zero_();
  parameters["head.weight"].copy_(torch::eye(256).roll(1, 0) * 10);
  return model;
}

TEST(TextSampler, FollowsTheModelBeyondItsContext) {
  const auto model = counting_model();
  EXPECT_EQ(sample_text(logits_of(*model), model->config(), at::kCPU, "a", {.length = 12}), "abcdefghijklm");
}

TEST(TextSampler, SameSeedSameText) {
  Gpt model({.layers = 1, .hidden = 16, .heads = 2, .seq_len = 8});
  initialize_weights(model, 3);
  const auto sample = [&](uint64_t seed) {
    return sample_text(logits_of(model), model.config(), at::kCPU, "x", {.length = 40, .seed = seed});
  };
  EXPECT_EQ(sample(1).size(), 41U);
  EXPECT_EQ(sample(1), sample(1));
  EXPECT_NE(sample(1), sample(2));
}

TEST(TextSampler, AnUntrainedModelDrawsManyBytesAColdOneFew) {
  Gpt model({.layers = 1, .hidden = 16, .heads = 2, .seq_len = 8});
  initialize_weights(model, 3);
  const auto kinds = [&](double temperature) {
    std::string text =
        sample_text(logits_of(model), model.config(), at::kCPU, "x", {.length = 100, .temperature = temperature});
    std::sort(text.begin(), text.end());
    return std::unique(text.begin(), text.end()) - text.begin();
  };
  EXPECT_GT(kinds(1.0), 60);
  EXPECT_LT(kinds(1e-4), 30);
}

TEST(TextSampler, APromptAndATemperatureAreNeeded) {
  Gpt model({.layers = 1, .hidden = 16, .heads = 2, .seq_len = 8});
  EXPECT_THROW(sample_text(logits_of(model), model.config(), at::kCPU, "", {}), ds::UsageError);
  EXPECT_THROW(sample_text(logits_of(model), model.config(), at::kCPU, "x", {.temperature = 0}), ds::UsageError);
}

TEST(TextSampler, PrintableKeepsTextAndReplacesControlBytes) {
  EXPECT_EQ(printable("a\tb\n\x1b[2J\x7f\r"), "a\tb\n?[2J??");
}

TEST(TextSampler, PrintableIsAlwaysValidUtf8) {
  EXPECT_EQ(printable("\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80"), "\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80");
  EXPECT_EQ(printable("\xff \xc3( \xc0\xaf \xe2\x82"), "? ?( ?? ??")
      << "no lead byte, cut short, overlong, cut by the end";
  EXPECT_EQ(printable("\xed\xa0\x80 \xf4\x90\x80\x80 \xc2\x9b"), "??? ???? ??") << "surrogate, beyond Unicode, control";
}

}  // namespace
}  // namespace gpt
