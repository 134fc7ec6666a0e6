#include "checkpoint/torch_weights.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <map>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "checkpoint/deepspeed/stored_tensors.h"
#include "checkpoint/pickle/torch_archive.h"
#include "checkpoint/source/training_state.h"
#include "core/check.h"
#include "core/listed.h"
#include "core/text.h"
#include "exported/archive.h"

namespace ds::checkpoint {
namespace {

constexpr const char* kAdvice =
    "; expected a file of torch.save(model.state_dict(), path) in Python or torch::save(model, path) in C++";

class TorchWeights : public Source {
 public:
  explicit TorchWeights(std::string path) : path_(std::move(path)) {
    const auto archive = std::make_shared<TorchArchive>(path_, ArchiveContents::kModules);
    const PickleValue& root = archive->root();
    const bool is_module = is_archived_module(root);
    require<IoError>(is_module || root.is(PickleKind::kDict), path_, ": holds ", root.in_words(),
                     ", which has no tensors by name", kAdvice);
    add(archive, root, "", 0);
    require<IoError>(!tensors().empty(), path_, ": holds no tensor", kAdvice);
    archive->forget();
  }

  const std::string& location() const override { return path_; }
  const TrainingState& state() const override { return state_; }
  const std::map<std::string, TensorInfo>& tensors() const override { return stored_.tensors(); }
  const std::map<std::string, std::string>& aliases() const override { return aliases_; }

  void read(const std::string& path, int64_t offset, const at::Tensor& destination) override {
    const TensorInfo& wanted = info(path);
    require<IoError>(offset >= 0 && offset + destination.numel() <= wanted.numel(), path_, ": \"", path, "\" has ",
                     wanted.numel(), " elements, asked for ", destination.numel(), " from ", offset);
    stored_.read(path, offset, destination);
  }

 private:
  static bool is_archived_module(const PickleValue& value) {
    return value.is(PickleKind::kObject) && value.text.starts_with("__torch__.") && value.state != nullptr &&
           value.state->is(PickleKind::kDict);
  }

  // Whether a value is none of tensor and module: flags such as "training" are.
  static bool is_plain(const PickleValue& value) {
    using enum PickleValue::Kind;
    return value.is(kNone) || value.is(kBool) || value.is(kInt) || value.is(kFloat) || value.is(kString) ||
           value.is(kList) || value.is(kTuple) || value.is(kDict);
  }

  // A dict of tensors, or a module.
  void add(const std::shared_ptr<TorchArchive>& archive, const PickleValue& from, const std::string& prefix,
           int depth) {
    constexpr int kDeepest = 100;     // values may contain themselves
    constexpr int kMost = 1'000'000;  // one value may be in many places, so that a small file could have any number
    constexpr size_t kLongestPath = 1024;
    const bool is_module = is_archived_module(from);
    require<IoError>(depth < kDeepest && ++containers_ < kMost, path_, ": \"", prefix.substr(0, 100),
                     "\": expected at most ", kDeepest, " modules in one another, and ", kMost, " in all");
    for (const auto& [key, value] : is_module ? from.state->entries : from.entries) {
      require<IoError>(key->is(PickleKind::kString), path_, ": an entry behind \"", prefix, "\" has ", key->in_words(),
                       " for a name", kAdvice);
      require<IoError>(prefix.size() + key->text.size() <= kLongestPath, path_, ": a name that begins with \"",
                       (prefix + key->text.substr(0, 100)).substr(0, 100), "\" has ", prefix.size() + key->text.size(),
                       " characters: expected at most ", kLongestPath);
      const std::string name = prefix + key->text;
      if (value->is(PickleKind::kTensor)) {
        require<IoError>(++found_ <= kMost, path_, ": expected at most ", kMost, " tensors, found more at \"", name,
                         "\"");
        stored_.define_whole(path_, weight_path(name), stored_.add(archive, *value->tensor));
      } else if (is_module && is_archived_module(*value)) {
        add(archive, *value, name + '.', depth + 1);
      } else if (!is_module || !is_plain(*value)) {
        const char* hint =
            value->is(PickleKind::kDict) ? " (several things in one file: save one state_dict by itself)" : "";
        throw IoError(cat(path_, ": \"", name, "\" is ", value->in_words(), ", not a tensor", hint, kAdvice));
      }
    }
  }

  std::string path_;
  TrainingState state_;
  StoredTensors stored_;
  std::map<std::string, std::string> aliases_;
  int containers_ = 0;
  int found_ = 0;  // tensors
};

// The weights of a model of torch.export: what its program reads from Python's state dict.
class ExportedWeights : public Source {
 public:
  explicit ExportedWeights(const std::string& path) : archive_(path) {
    constexpr const char* kUsual = "model";
    const std::vector<std::string>& programs = archive_.programs();
    const bool usual = std::find(programs.begin(), programs.end(), kUsual) != programs.end();
    require<IoError>(usual || programs.size() == 1, path, ": has the programs ", listed(programs, 10),
                     "; expected one, or one of the name \"", kUsual, "\"");
    stored_ = archive_.weights(usual ? kUsual : programs.front());
    const std::map<std::string, std::string> tied = exported::tied_names(stored_);
    for (const auto& [name, stored] : stored_) {
      const auto same = tied.find(name);
      if (same == tied.end() || !stored.is_parameter) {
        infos_[weight_path(name)] = {
            .dtype = stored.dtype, .sizes = stored.sizes, .frozen = stored.is_parameter && !stored.requires_grad};
      } else {
        aliases_[weight_path(name)] = weight_path(same->second);
      }
    }
  }

  const std::string& location() const override { return archive_.path(); }
  const TrainingState& state() const override { return state_; }
  const std::map<std::string, TensorInfo>& tensors() const override { return infos_; }
  const std::map<std::string, std::string>& aliases() const override { return aliases_; }

  void read(const std::string& path, int64_t offset, const at::Tensor& destination) override {
    info(path);
    archive_.read(stored_.at(name_in(weight_path(""), path)), offset, destination);
  }

 private:
  exported::Archive archive_;
  exported::StoredTensors stored_;
  std::map<std::string, TensorInfo> infos_;
  std::map<std::string, std::string> aliases_;
  TrainingState state_;
};

}  // namespace

bool is_torch_file(const std::string& path) {
  constexpr std::array<std::string_view, 5> kNames = {".pt", ".pt2", ".pth", ".ckpt", ".bin"};
  const std::string extension = std::filesystem::path(path).extension().string();
  for (const std::string_view name : kNames) {
    if (extension == name) return true;
  }
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) return false;  // to open a pipe waits for its writer
  std::array<char, 4> begin = {};
  auto in = classic_stream<std::ifstream>(path, std::ios::binary);
  in.read(begin.data(), begin.size());
  return in.good() && std::string_view(begin.data(), begin.size()) == "PK\3\4";
}

std::unique_ptr<Source> open_torch_weights(const std::string& path) {
  if (exported::is_exported_file(path)) return std::make_unique<ExportedWeights>(path);
  return std::make_unique<TorchWeights>(path);
}

}  // namespace ds::checkpoint
