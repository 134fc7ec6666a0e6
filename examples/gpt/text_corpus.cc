#include "examples/gpt/text_corpus.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <limits>

#include "core/check.h"

namespace gpt {
namespace {

namespace fs = std::filesystem;

constexpr const char* kDefaultFolder = DS_GPT_DEFAULT_DATA;
constexpr const char* kVariable = "DS_GPT_DATA";

}  // namespace

TextCorpus TextCorpus::open(const std::string& path, int64_t folder_limit) {
  TextCorpus corpus;
  corpus.path_ = path;
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  ds::require<ds::IoError>(
      fs::exists(status), path, ": no such file or folder",
      error && fs::status_known(status) == false ? ds::cat(" (", error.message(), ")") : std::string());
  if (fs::is_directory(status)) {
    corpus.add_folder(path, folder_limit);
  } else {
    corpus.add_file(path, std::numeric_limits<int64_t>::max());
  }
  ds::require<ds::IoError>(corpus.size_ > 0, path, ": expected text, found ",
                           fs::is_directory(status) ? "no file with content below this folder" : "an empty file");
  return corpus;
}

TextCorpus TextCorpus::open_or_default(const std::optional<std::string>& data_option) {
  if (data_option) return open(*data_option);
  if (const char* variable = std::getenv(kVariable); variable != nullptr && *variable != '\0') {
    try {
      return open(variable);
    } catch (const ds::IoError& error) {
      throw ds::IoError(ds::cat("environment variable ", kVariable, ": ", error.what()));
    }
  }
  ds::require<ds::IoError>(
      fs::is_directory(kDefaultFolder), kDefaultFolder,
      ": the default text, the headers of the LibTorch this program was built with, is not there; pass --data "
      "FILE|DIR or set ",
      kVariable);
  return open(kDefaultFolder);
}

void TextCorpus::add_file(const std::string& path, int64_t limit) {
  std::error_code error;
  const auto bytes = static_cast<int64_t>(fs::file_size(path, error));
  ds::require<ds::IoError>(!error, path, ": cannot read: ", error.message());
  const int64_t size = std::min(bytes, limit - size_);
  if (size > 0) files_.push_back({path, size_, size, nullptr});
  size_ += std::max<int64_t>(size, 0);
}

void TextCorpus::add_folder(const std::string& path, int64_t limit) {
  std::vector<std::pair<std::string, bool>> children;  // name, is a folder
  std::error_code error;
  for (fs::directory_iterator it(path, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    const bool folder = it->is_directory() && !it->is_symlink();
    if (!name.starts_with('.') && (folder || it->is_regular_file())) children.emplace_back(name, folder);
  }
  ds::require<ds::IoError>(!error, path, ": cannot read the folder: ", error.message());
  std::sort(children.begin(), children.end());
  for (const auto& [name, folder] : children) {
    if (size_ >= limit) return;
    const std::string child = path + (path.ends_with('/') ? "" : "/") + name;
    if (folder) {
      add_folder(child, limit);
    } else {
      add_file(child, limit);
    }
  }
}

std::span<const uint8_t> TextCorpus::bytes_of(File& file) {
  if (!file.mapped) file.mapped = std::make_unique<ds::MappedFile>(file.path);
  const std::span<const uint8_t> bytes = file.mapped->bytes();
  ds::require<ds::IoError>(static_cast<int64_t>(bytes.size()) >= file.size, file.path, ": expected ", file.size,
                           " bytes as at the start of the run, found ", bytes.size(), "; the file was changed");
  return bytes.first(static_cast<size_t>(file.size));
}

void TextCorpus::read(int64_t offset, std::span<uint8_t> tokens) {
  ds::require(offset >= 0 && offset + static_cast<int64_t>(tokens.size()) <= size_, "corpus: tokens ", offset, " to ",
              offset + static_cast<int64_t>(tokens.size()), " asked for, it has ", size_);
  auto file = std::upper_bound(files_.begin(), files_.end(), offset,
                               [](int64_t position, const File& candidate) { return position < candidate.begin; });
  --file;
  auto inside = static_cast<size_t>(offset - file->begin);
  while (!tokens.empty()) {
    const std::span<const uint8_t> bytes = bytes_of(*file).subspan(inside);
    const size_t count = std::min(bytes.size(), tokens.size());
    std::memcpy(tokens.data(), bytes.data(), count);
    tokens = tokens.subspan(count);
    inside = 0;
    ++file;
  }
}

}  // namespace gpt
