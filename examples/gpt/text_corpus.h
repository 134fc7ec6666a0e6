// Text as tokens: every byte is one. A file, or the files of a folder one behind another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace gpt {

// Files are opened when their bytes are asked for: ranks of one machine share what the system has cached, and opening a
// corpus costs a listing of the folder at most. Not thread safe.
class TextCorpus {
 public:
  // A whole file; or the regular files below a folder, in the order of their paths (folder by folder, bytewise), hidden
  // ones left out, up to `folder_limit` bytes. Throws ds::IoError when there is nothing to read.
  static TextCorpus open(const std::string& path, int64_t folder_limit = kFolderLimit);

  // --data, else the environment variable DS_GPT_DATA, else the prose that comes with the program: a mebibyte of the
  // King James Bible. Throws ds::IoError saying which of them is wrong.
  static TextCorpus open_or_default(const std::optional<std::string>& data_option);

  // Tokens.
  int64_t size() const { return size_; }
  const std::string& path() const { return path_; }
  int64_t file_count() const { return static_cast<int64_t>(files_.size()); }

  // Copies the tokens from `offset` on. offset + tokens.size() <= size(). Throws ds::IoError when a file has become
  // shorter.
  void read(int64_t offset, std::span<uint8_t> tokens);

  static constexpr int64_t kFolderLimit = 32 << 20;

 private:
  struct File {
    std::string path;
    int64_t begin = 0;  // offset of its first byte
    int64_t size = 0;   // bytes that count
  };

  void add_file(std::string path, int64_t bytes, int64_t limit);
  void add_folder(const std::string& path, int64_t limit);

  std::string path_;
  std::vector<File> files_;
  int64_t size_ = 0;
};

}  // namespace gpt
