#include "gpt2_names.h"

#include <ATen/core/grad_mode.h>
#include <dsengine/checkpoint.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "check.h"
#include "whole_file.h"

namespace gpt {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr double kEpsilon = 1e-5;
constexpr const char* kPrefix = "transformer.";
constexpr const char* kHead = "lm_head.weight";

struct PartName {
  const char* ours;
  const char* theirs;
  bool transposed;  // its weight
};

// The parts of a block.
constexpr std::array kPartNames = {
    PartName{".ln1.", ".ln_1.", false},
    PartName{".attn.qkv.", ".attn.c_attn.", true},
    PartName{".attn.proj.", ".attn.c_proj.", true},
    PartName{".ln2.", ".ln_2.", false},
    PartName{".mlp.fc.", ".mlp.c_fc.", true},
    PartName{".mlp.proj.", ".mlp.c_proj.", true},
};

const PartName* part_of(const std::string& name) {
  for (const PartName& part : kPartNames) {
    if (name.find(part.ours) != std::string::npos) return &part;
  }
  return nullptr;
}

std::string config_path(const std::string& folder) { return (fs::path(folder) / "config.json").string(); }

int64_t natural(const json& config, const std::string& where, const char* key) {
  require<ds::ConfigError>(config.contains(key) && config[key].is_number_integer() && config[key] > 0, where, ": ", key,
                           ": expected a positive integer, found ", config.value(key, json()));
  return config[key];
}

// Keys that change the computation, with the only value that this model follows (absent counts as it).
void require_followed(const json& config, const std::string& where) {
  const int64_t hidden = config["n_embd"];
  const auto require_value = [&](const char* key, const json& expected) {
    const json found = config.value(key, expected);
    require<ds::ConfigError>(found == expected, where, ": ", key, ": expected ", expected, ", found ", found,
                             "; this model computes it no other way");
  };
  require_value("model_type", "gpt2");
  require_value("layer_norm_epsilon", kEpsilon);
  require_value("scale_attn_weights", true);
  require_value("scale_attn_by_inverse_layer_idx", false);
  require_value("add_cross_attention", false);
  if (!config.value("n_inner", json()).is_null()) require_value("n_inner", 4 * hidden);
}

bool reads_tanh_gelu(const json& config, const std::string& where) {
  const std::string name = config.value("activation_function", "gelu_new");
  require<ds::ConfigError>(name == "gelu_new" || name == "gelu", where,
                           ": activation_function: expected \"gelu_new\" or \"gelu\", found \"", name, "\"");
  return name == "gelu_new";
}

bool is_mask(const std::string& name) { return name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias"); }

}  // namespace

std::string gpt2_name(const std::string& name) {
  if (name == "head.weight") return kHead;
  std::string result = name;
  if (const PartName* part = part_of(name))
    result.replace(name.find(part->ours), std::string(part->ours).size(), part->theirs);
  return kPrefix + result;
}

bool is_transposed_in_gpt2(const std::string& name) {
  const PartName* part = part_of(name);
  return part != nullptr && part->transposed && name.ends_with(".weight");
}

GptConfig read_gpt2_config(const std::string& folder) {
  const std::string path = config_path(folder);
  std::ifstream in(path);
  require<ds::IoError>(in.good(), path, ": cannot be read; expected a folder in Hugging Face's layout");
  try {
    const json config = json::parse(in);
    GptConfig model{.layers = natural(config, path, "n_layer"),
                    .hidden = natural(config, path, "n_embd"),
                    .heads = natural(config, path, "n_head"),
                    .seq_len = natural(config, path, config.contains("n_positions") ? "n_positions" : "n_ctx"),
                    .vocab = natural(config, path, "vocab_size"),
                    .tie_embeddings = config.value("tie_word_embeddings", true)};
    require_followed(config, path);
    model.tanh_gelu = reads_tanh_gelu(config, path);
    return model;
  } catch (const json::exception& error) {
    throw ds::ConfigError(cat(path, ": ", error.what()));
  }
}

void load_gpt2_weights(Gpt& model, const std::string& folder) {
  const at::NoGradGuard no_grad;
  const auto source = ds::checkpoint::open_weights(folder);
  std::set<std::string> used;
  for (const auto& item : model.named_parameters()) {
    const std::string long_name = gpt2_name(item.key());
    const std::string name = long_name.starts_with(kPrefix) && !source->contains(ds::checkpoint::weight_path(long_name))
                                 ? long_name.substr(std::string(kPrefix).size())
                                 : long_name;
    const std::string path = ds::checkpoint::weight_path(name);
    require<ds::IoError>(source->contains(path), folder, ": no tensor \"", name, "\", which config.json asks for");
    const at::Tensor stored = source->tensor(path);
    const bool transposed = is_transposed_in_gpt2(item.key());
    const at::Tensor value = transposed && stored.dim() == 2 ? stored.t() : stored;
    require<ds::IoError>(value.sizes() == item.value().sizes(), folder, ": \"", name, "\" is ", stored.sizes(),
                         ", config.json asks for ", item.value().sizes(), transposed ? " transposed" : "");
    item.value().copy_(value);
    used.insert(path);
  }
  for (const auto& [path, info] : source->tensors()) {
    const bool tied_head = model.config().tie_embeddings && path == ds::checkpoint::weight_path(kHead);
    require<ds::IoError>(used.contains(path) || is_mask(path) || tied_head, folder, ": holds \"", path,
                         "\", which this model has not");
  }
}

void export_gpt2(const GptConfig& config, const std::vector<std::pair<std::string, at::Tensor>>& weights,
                 const std::string& folder) {
  std::error_code failure;  // what it means for the files is said when they cannot be made
  fs::create_directories(folder, failure);
  const json description = {{"model_type", "gpt2"},
                            {"architectures", {"GPT2LMHeadModel"}},
                            {"n_layer", config.layers},
                            {"n_embd", config.hidden},
                            {"n_head", config.heads},
                            {"n_positions", config.seq_len},
                            {"n_ctx", config.seq_len},
                            {"n_inner", nullptr},
                            {"vocab_size", config.vocab},
                            {"activation_function", config.tanh_gelu ? "gelu_new" : "gelu"},
                            {"layer_norm_epsilon", kEpsilon},
                            {"tie_word_embeddings", config.tie_embeddings},
                            {"attn_pdrop", 0.0},
                            {"embd_pdrop", 0.0},
                            {"resid_pdrop", 0.0},
                            {"bos_token_id", nullptr},
                            {"eos_token_id", nullptr},
                            {"torch_dtype", "float32"}};
  const std::string text = description.dump(2) + "\n";
  WholeFile file(config_path(folder));
  file.write(text);
  std::vector<std::pair<std::string, at::Tensor>> renamed;
  for (const auto& [name, weight] : weights) {
    renamed.emplace_back(gpt2_name(name), is_transposed_in_gpt2(name) ? weight.t() : weight);
  }
  ds::checkpoint::write_weights((fs::path(folder) / ds::checkpoint::kWeightFile).string(), renamed, {{"format", "pt"}});
  file.commit();
}

}  // namespace gpt
