#include "checkpoint/tool/location.h"

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <optional>
#include <utility>

#include "checkpoint/index.h"
#include "checkpoint/tag_folder.h"
#include "checkpoint/weight_files.h"
#include "core/check.h"

namespace ds::checkpoint::tool {
namespace {

namespace fs = std::filesystem;

bool is_rank_file(const std::string& name) {
  return name.ends_with(".safetensors") && name.find("-of-") != std::string::npos &&
         (name.starts_with("weights-") || name.starts_with("optimizer-") || name.starts_with("ranks-"));
}

Format format_of(const fs::path& path) {
  if (!fs::is_directory(path)) return path.extension() == ".safetensors" ? Format::kHuggingFace : Format::kUnknown;
  if (fs::exists(path / kIndexName)) return Format::kDsengine;
  if (fs::exists(path / kWeightFile) || fs::exists(path / kWeightIndex)) return Format::kHuggingFace;
  for (const auto& entry : fs::directory_iterator(path)) {
    const std::string name = entry.path().filename().string();
    if (is_rank_file(name)) return Format::kDsengine;  // one that was not finished
    if (is_shard_name(name)) return Format::kHuggingFace;
    if (name.ends_with("_model_states.pt") || name.ends_with("_optim_states.pt")) return Format::kDeepSpeed;
  }
  return Format::kUnknown;
}

// "global_step20" -> 20, so that step 100 comes after step 20; tags without a number come first.
int64_t step_of(const std::string& tag) {
  size_t begin = tag.size();
  while (begin > 0 && std::isdigit(static_cast<unsigned char>(tag[begin - 1])) != 0) --begin;
  const std::string digits = tag.substr(begin);
  return digits.empty() || digits.size() > 18 ? -1 : std::stoll(digits);
}

std::vector<std::string> tags_in(const fs::path& folder) {
  std::vector<std::string> tags;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const bool hidden = entry.path().filename().string().starts_with('.');
    if (!hidden && entry.is_directory() && format_of(entry.path()) != Format::kUnknown) {
      tags.push_back(entry.path().filename().string());
    }
  }
  std::sort(tags.begin(), tags.end(), [](const std::string& a, const std::string& b) {
    return std::pair(step_of(a), a) < std::pair(step_of(b), b);
  });
  return tags;
}

std::string joined(const std::vector<std::string>& names) {
  std::string result;
  for (const std::string& name : names) result += cat(result.empty() ? "" : ", ", name);
  return result;
}

}  // namespace

const char* name_of(Format format) {
  switch (format) {
    case Format::kDsengine:
      return "dsengine";
    case Format::kHuggingFace:
      return "huggingface";
    case Format::kDeepSpeed:
      return "deepspeed";
    case Format::kUnknown:
      break;
  }
  return "unknown";
}

Location locate(const std::string& path) {
  const fs::path place = fs::path(path).has_filename() ? fs::path(path) : fs::path(path).parent_path();
  require<IoError>(fs::exists(place), path, ": no such file or folder");
  Location location{.folder = place.string(), .format = format_of(place), .latest = {}, .tags = {}};
  if (location.format != Format::kUnknown || !fs::is_directory(place)) return location;
  location.tags = tags_in(place);
  const std::optional<std::string> latest = read_latest(place.string());
  if (!latest) {
    require<IoError>(location.tags.empty(), path,
                     ": no file `latest` names one of its tags; name one of them: ", joined(location.tags));
    return location;
  }
  location.latest = *latest;
  require<IoError>(fs::is_directory(place / location.latest), (place / "latest").string(), ": names \"",
                   location.latest, "\", which is no folder here; tags: ", joined(location.tags));
  location.folder = (place / location.latest).string();
  location.format = format_of(place / location.latest);
  return location;
}

}  // namespace ds::checkpoint::tool
