#include "tools/checkpoint/location.h"

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <optional>
#include <utility>

#include "checkpoint/tag_folder.h"
#include "core/ascii.h"
#include "core/check.h"

namespace ds::checkpoint::tool {
namespace {

namespace fs = std::filesystem;

// "global_step20" -> 20, so that step 100 comes after step 20; tags without a number come first.
int64_t step_of(const std::string& tag) {
  size_t begin = tag.size();
  while (begin > 0 && is_ascii_digit(tag[begin - 1])) --begin;
  const std::string digits = tag.substr(begin);
  return digits.empty() || digits.size() > 18 ? -1 : std::stoll(digits);
}

std::vector<std::string> tags_in(const fs::path& folder) {
  std::vector<std::string> tags;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const bool hidden = entry.path().filename().string().starts_with('.');
    if (!hidden && entry.is_directory() && format_of(entry.path().string()) != Format::kUnknown) {
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

Location locate(const std::string& path) {
  const fs::path place = fs::path(path).has_filename() ? fs::path(path) : fs::path(path).parent_path();
  require<IoError>(fs::exists(place), path, ": no such file or folder");
  Location location{.folder = place.string(), .format = format_of(place.string()), .latest = {}, .tags = {}};
  if (location.format != Format::kUnknown || !fs::is_directory(place)) return location;
  location.tags = tags_in(place);
  const std::optional<std::string> latest = read_latest(place.string());
  if (!latest) {
    require<IoError>(location.tags.empty(), path, ": no file `latest` names one of its tags; name one of them: ",
                     lazy([&] { return joined(location.tags); }));
    return location;
  }
  location.latest = *latest;
  require<IoError>(fs::is_directory(place / location.latest), (place / "latest").native(), ": names \"",
                   location.latest, "\", which is no folder here; tags: ", lazy([&] { return joined(location.tags); }));
  location.folder = (place / location.latest).string();
  location.format = format_of(location.folder);
  return location;
}

}  // namespace ds::checkpoint::tool
