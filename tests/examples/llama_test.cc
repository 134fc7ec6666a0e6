// Models of transformers' families and adapters of PEFT: tests/examples/llama/ was made by both (llama_fixture.py).
#include <cmath>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "core/check.h"
#include "core/files/safetensors.h"
#include "dsengine/checkpoint.h"
#include "examples/llama/hf_folder.h"
#include "examples/llama/llama_model.h"
#include "examples/llama/token_file.h"
#include "tests/examples/llama_fixture.h"
#include "tests/support/scratch_folder.h"

namespace llama {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

// A model on the CPU with the weights of a folder, and those of an adapter where there is one.
std::unique_ptr<CausalLm> load(const std::string& folder, const std::string& adapter = "") {
  Build build{.config = read_config(folder)};
  if (!adapter.empty()) build.lora = read_lora(build.config, adapter);
  auto model = std::make_unique<CausalLm>(build);
  ds::checkpoint::load_module(*ds::checkpoint::open_weights(folder), *model, /*strict=*/adapter.empty());
  if (adapter.empty()) return model;
  const ds::SafetensorsFile file(adapter_file(adapter));
  const at::NoGradGuard no_grad;
  size_t adapters = 0;
  for (const auto& item : model->named_parameters()) {
    if (!item.value().requires_grad()) continue;
    at::Tensor(item.value()).copy_(file.tensor(adapter_name(item.key())));
    ++adapters;
  }
  EXPECT_EQ(adapters, file.entries().size()) << "the trained parameters are those of the adapter";
  model->eval();
  return model;
}

double difference(const at::Tensor& a, const at::Tensor& b) { return (a - b).abs().max().item<double>(); }

class LlamaFamilies : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Families, LlamaFamilies, testing::Values("llama", "mistral", "qwen2", "qwen3"),
                         [](const auto& family) { return family.param; });

TEST_P(LlamaFamilies, LogitsAreThoseOfTransformers) {
  const at::NoGradGuard no_grad;
  const std::string folder = fixture(GetParam());
  const ds::SafetensorsFile expected(folder + "/expected.safetensors");
  EXPECT_LT(difference(load(folder)->logits(expected.tensor("tokens")), expected.tensor("logits")), 1e-5);
}

TEST_P(LlamaFamilies, LogitsWithAnAdapterAreThoseOfPeft) {
  const at::NoGradGuard no_grad;
  const std::string folder = fixture(GetParam());
  const ds::SafetensorsFile expected(folder + "/expected.safetensors");
  const at::Tensor logits = load(folder, folder + "/adapter")->logits(expected.tensor("tokens"));
  EXPECT_LT(difference(logits, expected.tensor("adapted_logits")), 1e-5);
  EXPECT_GT(difference(logits, expected.tensor("logits")), 1e-2) << "the adapter must count";
}

TEST_P(LlamaFamilies, AMergedFolderGivesTheLogitsAndTheAdapterComesOutAgain) {
  const at::NoGradGuard no_grad;
  const ds::test::ScratchFolder scratch;
  const std::string folder = fixture(GetParam());
  const std::string adapter = folder + "/adapter";
  merge_adapter(folder, adapter, scratch / "merged", Merge::kAdd);
  const ds::SafetensorsFile expected(folder + "/expected.safetensors");
  const at::Tensor logits = load(scratch / "merged")->logits(expected.tensor("tokens"));
  EXPECT_LT(difference(logits, expected.tensor("adapted_logits")), 2e-5);
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const std::string name = entry.path().filename();
    if (!name.starts_with("model")) continue;
    EXPECT_TRUE(std::filesystem::exists(scratch / "merged/" + name)) << name << ": files are cut as those of the base";
  }
  merge_adapter(scratch / "merged", adapter, scratch / "base", Merge::kTakeOut);
  const auto before = ds::checkpoint::open_weights(folder);
  const auto after = ds::checkpoint::open_weights(scratch / "base");
  ASSERT_EQ(before->tensors().size(), after->tensors().size());
  for (const auto& entry : before->tensors()) {
    EXPECT_LT(difference(before->tensor(entry.first), after->tensor(entry.first)), 1e-6) << entry.first;
  }
}

TEST(LlamaConfigTest, WindowsHeadsAndBiasesAreThoseOfTheFamily) {
  const LlamaConfig mistral = read_config(fixture("mistral"));
  EXPECT_EQ(mistral.windows, (std::vector<int64_t>{5, 5}));
  EXPECT_FALSE(mistral.qkv_bias);
  const LlamaConfig qwen2 = read_config(fixture("qwen2"));
  EXPECT_EQ(qwen2.windows, (std::vector<int64_t>{0, 4}));
  EXPECT_TRUE(qwen2.qkv_bias && qwen2.tie_embeddings);
  EXPECT_FALSE(qwen2.o_bias || qwen2.head_norms);
  const LlamaConfig qwen3 = read_config(fixture("qwen3"));
  EXPECT_TRUE(qwen3.head_norms);
  EXPECT_EQ(qwen3.head_size, 8);
  EXPECT_EQ(qwen3.windows, (std::vector<int64_t>{0, 0}));
}

TEST(LlamaConfigTest, OlderSpellingsOfRotaryPositionsMeanTheSame) {
  json config = read_json(fixture("llama") + "/config.json");
  const RopeConfig now = parse_config(config, "now").rope;
  EXPECT_EQ(now.scaling, RopeConfig::Scaling::kLlama3);
  json scaling = config.at("rope_parameters");
  config.erase("rope_parameters");
  config["rope_theta"] = scaling.at("rope_theta");
  scaling.erase("rope_theta");
  scaling["type"] = scaling.at("rope_type");
  scaling.erase("rope_type");
  config["rope_scaling"] = scaling;
  const RopeConfig old = parse_config(config, "old").rope;
  EXPECT_EQ(old.scaling, RopeConfig::Scaling::kLlama3);
  EXPECT_EQ(old.theta, now.theta);
  EXPECT_EQ(old.factor, now.factor);
  EXPECT_EQ(old.original_positions, now.original_positions);
  config["rope_scaling"] = nullptr;
  EXPECT_EQ(parse_config(config, "plain").rope.scaling, RopeConfig::Scaling::kNone);
}

TEST(LlamaConfigTest, WhatTheModelCannotFollowIsRefusedByName) {
  const json original = read_json(fixture("qwen2") + "/config.json");
  const std::map<std::string, json> refused = {{"model_type", "gemma"},
                                               {"hidden_act", "gelu"},
                                               {"attention_dropout", 0.1},
                                               {"num_key_value_heads", 3},
                                               {"head_dim", 3},
                                               {"vocab_size", 0},
                                               {"layer_types", {"full_attention"}},
                                               {"quantization_config", {{"bits", 4}}},
                                               {"rope_parameters", {{"rope_type", "yarn"}, {"factor", 4.0}}}};
  for (const auto& entry : refused) {
    json config = original;
    config[entry.first] = entry.second;
    EXPECT_THAT([&] { parse_config(config, "DIR/config.json"); },
                ThrowsMessage<ds::ConfigError>(AllOf(HasSubstr("DIR/config.json: "), HasSubstr(entry.first))))
        << entry.first;
  }
}

TEST(LoraConfigTest, TargetsAreReadAsPeftReadsThem) {
  const LlamaConfig config = read_config(fixture("llama"));
  const std::set<std::string> queries = {"model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"};
  EXPECT_EQ(find_targets(config, {"q_proj"}), queries);
  EXPECT_EQ(find_targets(config, {"all-linear"}).size(), 14U);
  EXPECT_EQ(find_targets(config, {"lm_head"}), (std::set<std::string>{"lm_head"}));
  EXPECT_THAT([&] { find_targets(config, {"proj"}); }, ThrowsMessage<ds::ConfigError>(HasSubstr("\"proj\"")));
  EXPECT_THAT([&] { find_targets(read_config(fixture("qwen2")), {"lm_head"}); },
              ThrowsMessage<ds::ConfigError>(HasSubstr("lm_head")));
  const ds::test::ScratchFolder scratch;
  json adapter = read_json(fixture("llama") + "/adapter/adapter_config.json");
  const auto read_with = [&](const std::string& key, const json& value) {
    json changed = adapter;
    changed[key] = value;
    scratch.write("adapter_config.json", changed.dump());
    return read_lora(config, scratch.path().string());
  };
  EXPECT_EQ(read_with("target_modules", ".*\\.q_proj").targets, queries);
  EXPECT_DOUBLE_EQ(read_with("use_rslora", true).scale(), 6.0 / std::sqrt(2.0));
  EXPECT_DOUBLE_EQ(read_with("use_rslora", false).scale(), 3.0);
  const std::map<std::string, json> refused = {{"use_dora", true},
                                               {"bias", "all"},
                                               {"peft_type", "IA3"},
                                               {"rank_pattern", {{"q_proj", 4}}},
                                               {"modules_to_save", {"lm_head"}},
                                               {"r", 0},
                                               {"lora_dropout", 1.0}};
  for (const auto& entry : refused) {
    EXPECT_THAT([&] { read_with(entry.first, entry.second); },
                ThrowsMessage<ds::ConfigError>(AllOf(HasSubstr("adapter_config.json"), HasSubstr(entry.first))))
        << entry.first;
  }
}

TEST(TokenFileTest, BytesAndIdsOfSixteenBits) {
  const ds::test::ScratchFolder scratch;
  const TokenFile text(scratch.write("a.txt", "abcdefg"), 3, 256);
  EXPECT_EQ(text.size(), 2U);
  EXPECT_TRUE(torch::equal(text.get(1).data, torch::tensor({100, 101, 102}, torch::kLong)));
  EXPECT_TRUE(torch::equal(text.get(1).target, torch::tensor({101, 102, 103}, torch::kLong)));
  const TokenFile ids(scratch.write("a.bin", std::string("\x01\x02\x03\x00\x04\x00\x05\x00", 8)), 3, 1000);
  EXPECT_EQ(ids.size(), 1U);
  EXPECT_TRUE(torch::equal(ids.get(0).data, torch::tensor({513, 3, 4}, torch::kLong)));
  EXPECT_THAT([&] { TokenFile(scratch / "a.bin", 3, 500).get(0); },
              ThrowsMessage<ds::ConfigError>(AllOf(HasSubstr("token 0"), HasSubstr("513"))));
  EXPECT_THAT([&] { TokenFile(scratch / "a.bin", 4, 1000); }, ThrowsMessage<ds::ConfigError>(HasSubstr("found 4")));
}

}  // namespace
}  // namespace llama
