#include "hf_folder.h"

#include <ATen/ATen.h>
#include <dsengine/checkpoint.h>
#include <dsengine/errors.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "../gpt/check.h"

namespace llama {
namespace {

namespace fs = std::filesystem;
using ds::checkpoint::Source;
using ds::checkpoint::weight_path;
using gpt::cat;
using gpt::require;
using nlohmann::json;
using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

constexpr const char* kIndex = "model.safetensors.index.json";
const std::map<std::string, std::string> kMetadata = {{"format", "pt"}};

std::string in(const std::string& folder, const std::string& file) { return (fs::path(folder) / file).string(); }

std::string name_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kBFloat16:
      return "bfloat16";
    case at::kHalf:
      return "float16";
    case at::kDouble:
      return "float64";
    default:
      return "float32";
  }
}

// The tensors of each file of a folder of weights.
std::map<std::string, std::vector<std::string>> files_of(const std::string& folder, const Source& source) {
  std::map<std::string, std::vector<std::string>> files;
  if (!fs::exists(in(folder, ds::checkpoint::kWeightFile)) && fs::exists(in(folder, kIndex))) {
    const json index = read_json(in(folder, kIndex));
    for (const auto& [name, file] : index.at("weight_map").items()) files[file.get<std::string>()].push_back(name);
    return files;
  }
  for (const auto& entry : source.tensors()) {
    files[ds::checkpoint::kWeightFile].push_back(ds::checkpoint::name_in("weights/", entry.first));
  }
  return files;
}

// The adapters of a folder, by the weight that they are added to.
class Adapters {
 public:
  Adapters(const LlamaConfig& config, const std::string& folder)
      : lora_(read_lora(config, folder)), source_(ds::checkpoint::open_weights(adapter_file(folder))) {
    size_t expected = 0;
    for (const std::string& target : lora_.targets) {
      for (const char* part : {".lora_A.weight", ".lora_B.weight"}) {
        source_->info(weight_path(adapter_name(target + part)));  // IoError where it lacks
        ++expected;
      }
    }
    require<ds::IoError>(source_->tensors().size() == expected, adapter_file(folder), ": expected ", expected,
                         " tensors, of the layers that target_modules names, found ", source_->tensors().size());
  }

  size_t count() const { return lora_.targets.size(); }
  bool has(const std::string& weight) const {
    return weight.ends_with(".weight") && lora_.targets.contains(weight.substr(0, weight.size() - 7));
  }
  // scale B A, float32 (float64 for float64 weights).
  at::Tensor product(const std::string& weight, at::ScalarType dtype) const {
    const std::string layer = weight.substr(0, weight.size() - 7);
    const auto part = [&](const char* name) {
      return source_->tensor(weight_path(adapter_name(layer + name)))
          .to(dtype == at::kDouble ? at::kDouble : at::kFloat);
    };
    return at::mm(part(".lora_B.weight"), part(".lora_A.weight")) * lora_.scale();
  }

 private:
  LoraConfig lora_;
  std::unique_ptr<Source> source_;
};

// `config` with the dtype of the weights beside it. transformers 4 writes torch_dtype, 5 writes dtype and reads both.
void write_config(json config, const std::string& out, at::ScalarType dtype) {
  config[config.contains("torch_dtype") && !config.contains("dtype") ? "torch_dtype" : "dtype"] = name_of(dtype);
  std::ofstream file(in(out, "config.json"));
  file << config.dump(2) << '\n';
  file.close();
  require<ds::IoError>(file.good(), in(out, "config.json"), ": cannot be written");
}

}  // namespace

void copy_config(const std::string& from, const std::string& out, at::ScalarType dtype) {
  fs::create_directories(out);
  write_config(read_json(in(from, "config.json")), out, dtype);
  for (const char* name :
       {"generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
        "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja"}) {
    if (fs::exists(in(from, name))) fs::copy_file(in(from, name), in(out, name), fs::copy_options::overwrite_existing);
  }
}

void write_new(const std::string& config_file, const std::string& out, uint64_t seed) {
  const json config = read_json(config_file);
  const Build build{.config = parse_config(config, config_file)};
  at::manual_seed(seed);
  const CausalLm model(build);
  NamedTensors tensors;
  for (const auto& item : model.named_parameters()) {
    start_value(build.config, item.key(), item.value().detach());
    tensors.emplace_back(item.key(), item.value().detach());
  }
  fs::create_directories(out);
  write_config(config, out, at::kFloat);
  ds::checkpoint::write_weights(in(out, ds::checkpoint::kWeightFile), tensors, kMetadata);
}

void export_model(ds::engine::Engine& engine, const std::string& base, const std::string& out) {
  engine.save_16bit_model(out);
  if (engine.global_rank() != 0) return;
  const auto parameters = engine.module()->parameters();
  copy_config(base, out, parameters.at(0).scalar_type());
}

void export_adapter(ds::engine::Engine& engine, const LoraConfig& lora, const std::string& base,
                    const std::string& out) {
  if (engine.global_rank() == 0) fs::create_directories(out);
  const std::string file = engine.save_weights(adapter_file(out));
  if (engine.global_rank() != 0) return;
  NamedTensors tensors;
  {
    const auto source = ds::checkpoint::open_weights(file);
    for (const auto& entry : source->tensors()) {
      tensors.emplace_back(adapter_name(ds::checkpoint::name_in("weights/", entry.first)),
                           source->tensor(entry.first).clone());
    }
  }
  ds::checkpoint::write_weights(file, tensors, kMetadata);
  write_lora(lora, base, out);
}

void set_weights(ds::engine::InitializeOptions& options, const Build& build, const std::string& base,
                 const std::string& adapter) {
  options.weights = base;
  if (!build.lora) return;
  options.weights_options.rename = [](const std::string& name) {
    return name.find(".lora_") == std::string::npos ? name : adapter_name(name);
  };
  if (!adapter.empty()) {
    options.weights_options.over = {adapter_file(adapter)};
    return;
  }
  require<ds::UsageError>(build.device.is_meta(), "new adapters: expected a model on the meta device, where every ",
                          "weight that the files lack is noticed; found one on ", build.device);
  options.weights_options.strict = false;
  options.weights_options.fill = [config = build.config, base](const std::string& name, const at::Tensor& values) {
    require<ds::IoError>(name.find(".lora_") != std::string::npos, base, ": lacks ", name);
    start_value(config, name, values);
  };
}

void merge_adapter(const std::string& base, const std::string& adapter, const std::string& out, Merge way) {
  require<ds::UsageError>(!fs::exists(out) || !fs::equivalent(base, out), "merge: ", out,
                          " is the folder of the base, which stays as it is; name another one");
  const Adapters adapters(read_config(base), adapter);
  const auto source = ds::checkpoint::open_weights(base);
  fs::create_directories(out);
  size_t merged = 0;
  at::ScalarType dtype = at::kFloat;
  for (const auto& [file, names] : files_of(base, *source)) {
    NamedTensors tensors;
    for (const std::string& name : names) {
      at::Tensor weight = source->tensor(weight_path(name));
      dtype = weight.scalar_type();
      if (adapters.has(name)) {
        const at::Tensor product = adapters.product(name, dtype);
        weight = (way == Merge::kAdd ? weight.to(product.scalar_type()) + product
                                     : weight.to(product.scalar_type()) - product)
                     .to(dtype);
        ++merged;
      }
      tensors.emplace_back(name, weight);
    }
    ds::checkpoint::write_weights(in(out, file), tensors, kMetadata);
  }
  require<ds::IoError>(merged == adapters.count(), base, ": has ", merged, " of the ", adapters.count(),
                       " weights that the adapter is for");
  copy_config(base, out, dtype);
  if (fs::exists(in(base, kIndex)) && !fs::exists(in(out, ds::checkpoint::kWeightFile))) {
    fs::copy_file(in(base, kIndex), in(out, kIndex), fs::copy_options::overwrite_existing);
  }
}

}  // namespace llama
