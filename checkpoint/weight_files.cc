#include "checkpoint/weight_files.h"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "checkpoint/file_in_folder.h"
#include "checkpoint/source/training_state.h"
#include "checkpoint/stored_file.h"
#include "checkpoint/torch_weights.h"
#include "core/ascii.h"
#include "core/check.h"
#include "core/files/safetensors.h"
#include "core/json/json_depth.h"
#include "core/json/parse_json.h"
#include "dsengine/checkpoint.h"

namespace ds::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kWeights = "weights/";

class WeightFiles : public Source {
 public:
  explicit WeightFiles(std::string location) : location_(std::move(location)) {}

  // Adds a file's tensors and aliases.
  void add(const std::string& path) {
    const auto file = std::make_shared<SafetensorsFile>(path);
    for (const SafetensorsFile::Entry& entry : file->entries()) {
      const auto [place, is_new] = files_.emplace(weight_path(entry.name), file);
      require<IoError>(is_new, path, ": tensor \"", entry.name, "\" is also in ", place->second->path(),
                       "; expected every tensor in one file");
      tensors_[weight_path(entry.name)] = {.dtype = entry.dtype, .sizes = entry.sizes};
    }
    for (const auto& [name, stored] : file->metadata()) {
      if (file->contains(stored) && !file->contains(name)) aliases_[name] = stored;
    }
  }

  const std::string& location() const override { return location_; }
  const TrainingState& state() const override { return state_; }
  const std::map<std::string, TensorInfo>& tensors() const override { return tensors_; }
  const std::map<std::string, std::string>& aliases() const override { return aliases_; }

  void read(const std::string& path, int64_t offset, const at::Tensor& destination) override {
    const TensorInfo& wanted = info(path);
    require<IoError>(offset >= 0 && offset + destination.numel() <= wanted.numel(), location_, ": \"", path, "\" has ",
                     wanted.numel(), " elements, asked for ", destination.numel(), " from ", offset);
    if (path != opened_path_) {
      opened_ = files_.at(path)->tensor(path.substr(kWeights.size())).view({-1});
      opened_path_ = path;
    }
    destination.view({-1}).copy_(opened_.narrow(0, offset, destination.numel()));
  }

 private:
  std::string location_;
  TrainingState state_;
  std::map<std::string, TensorInfo> tensors_;
  std::map<std::string, std::string> aliases_;
  std::map<std::string, std::shared_ptr<SafetensorsFile>> files_;  // by path of a tensor
  // The tensor that was read last, flat: of a file with unaligned data it is a copy, which is not made for every part.
  std::string opened_path_;
  at::Tensor opened_;
};

// Tensor -> file, as the index says.
std::map<std::string, std::string> read_weight_map(const std::string& path) {
  const std::string text = read_text(path);
  nlohmann::json index;
  try {
    if (!is_deep_json(text)) index = parse_json<nlohmann::json>(text);
  } catch (const nlohmann::json::exception& error) {
    throw IoError(cat(path, ": not JSON: ", error.what()));
  }
  const bool has_map = index.is_object() && index.contains("weight_map") && index["weight_map"].is_object();
  require<IoError>(has_map, path, ": expected an object with \"weight_map\": {tensor: file}");
  std::map<std::string, std::string> result;
  for (const auto& [name, file] : index["weight_map"].items()) {
    require<IoError>(file.is_string(), path, ": tensor \"", name, "\": expected the name of a file, found ", file);
    result[name] = file.get<std::string>();
  }
  return result;
}

std::unique_ptr<Source> open_shards(const fs::path& folder) {
  const std::string index = (folder / kWeightIndex).string();
  const std::map<std::string, std::string> weight_map = read_weight_map(index);
  std::map<std::string, std::string> first_of;  // file -> a tensor in it
  for (const auto& [name, file] : weight_map) first_of.emplace(file, name);
  auto source = std::make_unique<WeightFiles>(folder.string());
  for (const auto& [file, name] : first_of) {
    const fs::path path = file_in_folder(folder.string(), file, cat(index, ": tensor \"", name, "\""));
    require<IoError>(fs::exists(path), path.native(), ": no such file, in which ", index, " has tensor \"", name,
                     "\"; copy all files of the checkpoint");
    const size_t before = source->tensors().size();
    source->add(path.string());
    size_t expected = 0;
    for (const auto& [tensor, place] : weight_map) {
      if (place != file) continue;
      ++expected;
      require<IoError>(source->contains(weight_path(tensor)), path.native(), ": no tensor \"", tensor, "\", which ",
                       index, " says is there; index and files are of different checkpoints");
    }
    require<IoError>(source->tensors().size() == before + expected, path.native(), ": holds ",
                     source->tensors().size() - before, " tensors, expected the ", expected, " that ", index,
                     " names; index and files are of different checkpoints");
  }
  return source;
}

}  // namespace

std::string shard_name(int64_t number, int64_t count) {
  char name[64];
  std::snprintf(name, sizeof name, "model-%05lld-of-%05lld.safetensors", static_cast<long long>(number),
                static_cast<long long>(count));
  return name;
}

bool is_shard_name(const std::string& file) {
  constexpr std::string_view kPattern = "model-#####-of-#####.safetensors";
  return file.size() == kPattern.size() &&
         std::equal(file.begin(), file.end(), kPattern.begin(), kPattern.end(), [](char found, char expected) {
           return expected == '#' ? is_ascii_digit(found) : found == expected;
         });
}

std::unique_ptr<Source> open_weights(const std::string& path) {
  const fs::path place(path);
  require<IoError>(fs::exists(place), path, ": no such file or folder");
  if (!fs::is_directory(place) && is_torch_file(path)) return open_torch_weights(path);
  if (!fs::is_directory(place) || fs::exists(place / kWeightFile)) {
    auto source = std::make_unique<WeightFiles>(path);
    source->add(fs::is_directory(place) ? (place / kWeightFile).string() : path);
    return source;
  }
  require<IoError>(fs::exists(place / kWeightIndex), path, ": neither ", kWeightFile, " nor ", kWeightIndex,
                   " in this folder; shards without an index are an export that did not end");
  return open_shards(place);
}

void write_weights(const std::string& path, const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                   const std::map<std::string, std::string>& metadata) {
  write_safetensors(path, tensors, metadata);
}

}  // namespace ds::checkpoint
