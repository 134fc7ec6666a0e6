#include "launcher/ranks/joined_ranks.h"

#include <unistd.h>

#include <algorithm>
#include <functional>
#include <string_view>

#include "core/check.h"
#include "core/files/mapped_file.h"

namespace ds::launcher {

JoinedRanks::~JoinedRanks() {
  for (const std::string& file : files_) unlink(file.c_str());
}

bool JoinedRanks::has(size_t rank) const { return rank < files_.size() && access(files_[rank].c_str(), F_OK) == 0; }

bool JoinedRanks::any() const {
  return std::any_of(files_.begin(), files_.end(),
                     [](const std::string& file) { return access(file.c_str(), F_OK) == 0; });
}

bool uses_dsengine(const std::string& file) {
  // In two parts, so that ds-launch itself does not hold the word.
  const std::string library = cat("lib", "dsengine");
  try {
    const MappedFile program(file);
    const auto bytes = program.bytes();
    return std::search(bytes.begin(), bytes.end(),
                       std::boyer_moore_horspool_searcher(library.begin(), library.end())) != bytes.end();
  } catch (const IoError&) {
    return false;
  }
}

}  // namespace ds::launcher
