#include "text_corpus.h"

#include <dirent.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <system_error>
#include <utility>

#include "check.h"

namespace gpt {
namespace {

namespace fs = std::filesystem;

constexpr const char* kVariable = "DS_GPT_DATA";

// The prose that comes with the program: the build and the installation have it in share/ beside the program's folder.
fs::path default_text() {
  return fs::read_symlink("/proc/self/exe").parent_path().parent_path() / "share/dsengine/text/king_james.txt";
}

struct Child {
  std::string name;
  bool is_folder = false;
  int64_t bytes = 0;  // of a regular file
};

// The visible files and folders of a folder by name; links to files count as files, links to folders are left out. Asks
// for sizes relative to the open folder: a third of the time that whole paths take.
std::vector<Child> children_of(const std::string& path) {
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir(path.c_str()), closedir);
  require<ds::IoError>(folder != nullptr, path, ": cannot read the folder: ", std::generic_category().message(errno));
  std::vector<Child> children;
  while (const dirent* entry = readdir(folder.get())) {
    if (entry->d_name[0] == '.') continue;
    struct stat status {};
    if (entry->d_type == DT_DIR) {
      children.push_back({entry->d_name, true});
    } else if (fstatat(dirfd(folder.get()), entry->d_name, &status, 0) == 0) {
      if (S_ISREG(status.st_mode)) children.push_back({entry->d_name, false, status.st_size});
      if (S_ISDIR(status.st_mode) && entry->d_type != DT_LNK) children.push_back({entry->d_name, true});
    }
  }
  std::sort(children.begin(), children.end(), [](const Child& a, const Child& b) { return a.name < b.name; });
  return children;
}

}  // namespace

TextCorpus TextCorpus::open(const std::string& path, int64_t folder_limit) {
  TextCorpus corpus;
  corpus.path_ = path;
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  require<ds::IoError>(fs::exists(status), path, ": no such file or folder");
  require<ds::IoError>(fs::is_directory(status) || fs::is_regular_file(status), path,
                       ": expected a file or a folder of text, found something else");
  if (fs::is_directory(status)) {
    corpus.add_folder(path, folder_limit);
  } else {
    corpus.add_file(path, static_cast<int64_t>(fs::file_size(path)), std::numeric_limits<int64_t>::max());
  }
  require<ds::IoError>(corpus.size_ > 0, path, ": expected text, found ",
                       fs::is_directory(status) ? "no file with content below this folder" : "an empty file");
  return corpus;
}

TextCorpus TextCorpus::open_or_default(const std::optional<std::string>& data_option) {
  if (data_option) return open(*data_option);
  if (const char* variable = std::getenv(kVariable); variable != nullptr && *variable != '\0') {
    try {
      return open(variable);
    } catch (const ds::IoError& error) {
      throw ds::IoError(cat("environment variable ", kVariable, ": ", error.what()));
    }
  }
  const std::string text = default_text();
  require<ds::IoError>(fs::exists(text), text,
                       ": the text that comes with the examples is not there; pass --data FILE|DIR or set ", kVariable);
  return open(text);
}

void TextCorpus::add_file(std::string path, int64_t bytes, int64_t limit) {
  const int64_t size = std::min(bytes, limit - size_);
  if (size <= 0) return;
  files_.push_back({std::move(path), size_, size});
  size_ += size;
}

void TextCorpus::add_folder(const std::string& path, int64_t limit) {
  for (const Child& child : children_of(path)) {
    if (size_ >= limit) return;
    std::string child_path = path + (path.ends_with('/') ? "" : "/") + child.name;
    if (child.is_folder) {
      add_folder(child_path, limit);
    } else {
      add_file(std::move(child_path), child.bytes, limit);
    }
  }
}

void TextCorpus::read(int64_t offset, std::span<uint8_t> tokens) {
  require(offset >= 0 && offset + static_cast<int64_t>(tokens.size()) <= size_, "corpus: tokens ", offset, " to ",
          offset + static_cast<int64_t>(tokens.size()), " asked for, it has ", size_);
  auto file = std::upper_bound(files_.begin(), files_.end(), offset,
                               [](int64_t position, const File& candidate) { return position < candidate.begin; });
  --file;
  auto inside = static_cast<size_t>(offset - file->begin);
  while (!tokens.empty()) {
    const size_t count = std::min(static_cast<size_t>(file->size) - inside, tokens.size());
    std::ifstream in(file->path, std::ios::binary);
    in.seekg(static_cast<std::streamoff>(inside));
    in.read(reinterpret_cast<char*>(tokens.data()), static_cast<std::streamsize>(count));
    require<ds::IoError>(in.good(), file->path, ": expected ", file->size,
                         " bytes as at the start of the run; the file was changed or cannot be read");
    tokens = tokens.subspan(count);
    inside = 0;
    ++file;
  }
}

}  // namespace gpt
