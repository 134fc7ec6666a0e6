// GPT-2 of Hugging Face's transformers: tests/examples/gpt2/ was made by it (gpt2_fixture.py).
#include "examples/gpt/gpt2_names.h"

#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "core/check.h"
#include "core/files/safetensors.h"
#include "examples/gpt/gpt_init.h"
#include "examples/gpt/gpt_options.h"
#include "tests/support/scratch_folder.h"

namespace gpt {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

std::string fixture(const std::string& activation) { return DS_SOURCE_DIR "/tests/examples/gpt2/" + activation; }

std::vector<std::pair<std::string, at::Tensor>> weights_of(const Gpt& model) {
  std::vector<std::pair<std::string, at::Tensor>> result;
  for (const auto& item : model.named_parameters()) result.emplace_back(item.key(), item.value().detach());
  return result;
}

class Gpt2NamesTest : public testing::TestWithParam<std::string> {};

TEST_P(Gpt2NamesTest, LogitsAreThoseOfTransformers) {
  const at::NoGradGuard no_grad;
  const GptConfig config = read_gpt2_config(fixture(GetParam()));
  EXPECT_EQ(config.layers, 2);
  EXPECT_EQ(config.hidden, 16);
  EXPECT_EQ(config.heads, 2);
  EXPECT_EQ(config.seq_len, 12);
  EXPECT_EQ(config.vocab, 40);
  EXPECT_TRUE(config.tie_embeddings);
  EXPECT_EQ(config.tanh_gelu, GetParam() == "gelu_new");
  Gpt model(config);
  load_gpt2_weights(model, fixture(GetParam()));
  const ds::SafetensorsFile expected(fixture(GetParam()) + "/expected.safetensors");
  const at::Tensor logits = model.logits(expected.tensor("tokens"));
  EXPECT_LT((logits - expected.tensor("logits")).abs().max().item<double>(), 1e-5);
  GptConfig other = config;
  other.tanh_gelu = !config.tanh_gelu;
  Gpt wrong(other);
  load_gpt2_weights(wrong, fixture(GetParam()));
  EXPECT_GT((wrong.logits(expected.tensor("tokens")) - expected.tensor("logits")).abs().max().item<double>(), 1e-4)
      << "the fixture must tell the activations apart";
}

TEST_P(Gpt2NamesTest, AnExportHasTheirNamesShapesAndBits) {
  const GptConfig config = read_gpt2_config(fixture(GetParam()));
  Gpt model(config);
  load_gpt2_weights(model, fixture(GetParam()));
  const ds::test::ScratchFolder folder;
  export_gpt2(config, weights_of(model), folder / "out");
  const ds::SafetensorsFile exported(folder / "out/model.safetensors");
  const ds::SafetensorsFile original(fixture(GetParam()) + "/model.safetensors");
  EXPECT_EQ(exported.metadata().at("format"), "pt");
  EXPECT_EQ(exported.entries().size(), 28U);
  for (const auto& entry : exported.entries()) {
    const std::string short_name = entry.name.substr(std::string("transformer.").size());
    const std::string name = original.contains(entry.name) ? entry.name : short_name;
    EXPECT_TRUE(torch::equal(exported.tensor(entry.name), original.tensor(name))) << entry.name;
  }
  const GptConfig again = read_gpt2_config(folder / "out");
  EXPECT_EQ(again.tanh_gelu, config.tanh_gelu);
  EXPECT_EQ(again.vocab, config.vocab);
  EXPECT_EQ(again.seq_len, config.seq_len);
}

INSTANTIATE_TEST_SUITE_P(Activations, Gpt2NamesTest, testing::Values("gelu_new", "gelu"),
                         [](const auto& variant) { return variant.param; });

TEST(Gpt2Names, AnUntiedHeadGoesBothWays) {
  const ds::test::ScratchFolder folder;
  Gpt saved({.layers = 1, .hidden = 8, .heads = 2, .seq_len = 4, .vocab = 10});
  initialize_weights(saved, 5);
  export_gpt2(saved.config(), weights_of(saved), folder / "out");
  EXPECT_TRUE(ds::SafetensorsFile(folder / "out/model.safetensors").contains("lm_head.weight"));
  const GptConfig config = read_gpt2_config(folder / "out");
  EXPECT_FALSE(config.tie_embeddings);
  EXPECT_FALSE(config.tanh_gelu);
  Gpt loaded(config);
  load_gpt2_weights(loaded, folder / "out");
  for (const auto& item : loaded.named_parameters()) {
    EXPECT_TRUE(torch::equal(item.value(), saved.named_parameters()[item.key()])) << item.key();
  }
}

TEST(Gpt2Names, WeightsThatAreNotOfThisModelAreNamed) {
  const ds::test::ScratchFolder folder;
  const ds::SafetensorsFile original(fixture("gelu_new") + "/model.safetensors");
  const auto load_with = [&](const std::string& dropped, const std::string& added) {
    std::vector<std::pair<std::string, at::Tensor>> tensors;
    for (const auto& entry : original.entries()) {
      if (entry.name != dropped) tensors.emplace_back(entry.name, original.tensor(entry.name));
    }
    if (!added.empty()) tensors.emplace_back(added, torch::ones({3}));
    ds::write_safetensors(folder / "model.safetensors", tensors);
    Gpt model(read_gpt2_config(fixture("gelu_new")));
    load_gpt2_weights(model, folder.path().string());
  };
  load_with("", "transformer.h.0.attn.masked_bias");
  load_with("", "lm_head.weight");  // tied: wte counts
  EXPECT_THAT([&] { load_with("transformer.h.1.mlp.c_fc.bias", ""); },
              ThrowsMessage<ds::IoError>(HasSubstr("h.1.mlp.c_fc.bias")));
  EXPECT_THAT([&] { load_with("", "transformer.h.2.ln_1.bias"); },
              ThrowsMessage<ds::IoError>(HasSubstr("transformer.h.2.ln_1.bias")));
  EXPECT_THAT([&] { load_with("transformer.wpe.weight", "transformer.wpe.weight"); },
              ThrowsMessage<ds::IoError>(AllOf(HasSubstr("wpe.weight"), HasSubstr("[3]"), HasSubstr("[12, 16]"))));
}

TEST(Gpt2Names, ConfigsThatThisModelCannotFollowAreRefusedByName) {
  const ds::test::ScratchFolder folder;
  const auto read_with = [&](const std::string& key, const nlohmann::json& value) {
    nlohmann::json config = nlohmann::json::parse(std::ifstream(fixture("gelu_new") + "/config.json"));
    config[key] = value;
    folder.write("config.json", config.dump());
    return read_gpt2_config(folder.path().string());
  };
  EXPECT_EQ(read_with("n_inner", 64).hidden, 16);
  const std::map<std::string, nlohmann::json> refused = {{"activation_function", "relu"},
                                                         {"layer_norm_epsilon", 1e-6},
                                                         {"model_type", "llama"},
                                                         {"n_inner", 65},
                                                         {"scale_attn_weights", false},
                                                         {"scale_attn_by_inverse_layer_idx", true},
                                                         {"add_cross_attention", true},
                                                         {"n_layer", "two"},
                                                         {"vocab_size", 0}};
  for (const auto& entry : refused) {
    EXPECT_THAT([&] { read_with(entry.first, entry.second); },
                ThrowsMessage<ds::ConfigError>(AllOf(HasSubstr("config.json"), HasSubstr(entry.first))))
        << entry.first;
  }
  EXPECT_THAT([&] { read_gpt2_config(folder / "absent"); },
              ThrowsMessage<ds::IoError>(HasSubstr("absent/config.json")));
}

TEST(Gpt2Names, TheFolderDecidesTheModelOnTheCommandLine) {
  const std::string folder = fixture("gelu_new");
  const auto parse = [&](std::vector<const char*> flags) {
    std::vector<const char*> arguments = {"gpt", "--deepspeed_config", "c.json", "--load_hf", folder.c_str()};
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    return parse_options(static_cast<int>(arguments.size()), arguments.data()).value();
  };
  const GptOptions options = parse({"--freeze_embeddings"});
  EXPECT_EQ(options.model.vocab, 40);
  EXPECT_EQ(options.model.seq_len, 12);
  EXPECT_EQ(options.seq_len, 12);
  EXPECT_TRUE(options.model.freeze_embeddings);
  EXPECT_EQ(parse({"--seq_len", "5"}).seq_len, 5);
  EXPECT_EQ(parse({"--seq_len", "5"}).model.seq_len, 12);
  EXPECT_THAT(
      [&] {
        parse({"--seq_len", "13"});
      },
      ThrowsMessage<ds::ConfigError>(AllOf(HasSubstr("--seq_len 13"), HasSubstr("12 positions"))));
  EXPECT_THAT([&] { parse({"--layers", "3"}); }, ThrowsMessage<ds::ConfigError>(HasSubstr("--layers")));
}

}  // namespace
}  // namespace gpt
