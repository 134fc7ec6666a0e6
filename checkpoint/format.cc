#include "checkpoint/format.h"

#include <filesystem>
#include <system_error>

#include "checkpoint/deepspeed/saved_files.h"
#include "checkpoint/index.h"
#include "checkpoint/rank_files.h"
#include "checkpoint/torch_weights.h"
#include "checkpoint/weight_files.h"
#include "core/check.h"
#include "core/system_call.h"

namespace ds::checkpoint {
namespace {

namespace fs = std::filesystem;

template <class Predicate>
bool has_file(const fs::path& folder, const Predicate& is_wanted) {
  std::error_code error;
  fs::directory_iterator entry(folder, error);
  for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
    if (is_wanted(entry->path().filename().string())) return true;
  }
  require<IoError>(!error, folder.native(), ": cannot list the folder: ", SystemReason(error));
  return false;
}

}  // namespace

const char* name_of(Format format) {
  switch (format) {
    case Format::kDsengine:
      return "dsengine";
    case Format::kDeepSpeed:
      return "deepspeed";
    case Format::kHuggingFace:
      return "huggingface";
    case Format::kTorch:
      return "torch";
    case Format::kUnknown:
      break;
  }
  return "unknown";
}

Format format_of(const std::string& path) {
  const fs::path place(path);
  if (!fs::is_directory(place)) {
    if (!fs::exists(place)) return Format::kUnknown;
    if (place.extension() == ".safetensors") return Format::kHuggingFace;
    return is_torch_file(path) ? Format::kTorch : Format::kUnknown;
  }
  if (fs::exists(place / kIndexName) || has_file(place, is_rank_file_name)) return Format::kDsengine;
  if (holds_deepspeed_files(path)) return Format::kDeepSpeed;
  const bool weights = fs::exists(place / kWeightFile) || fs::exists(place / kWeightIndex);
  return weights || has_file(place, is_shard_name) ? Format::kHuggingFace : Format::kUnknown;
}

}  // namespace ds::checkpoint
