#include "whole_file.h"

#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

#include "check.h"

namespace gpt {

namespace fs = std::filesystem;

WholeFile::WholeFile(std::string path) : path_(std::move(path)), temporary_(cat(path_, ".", getpid(), ".tmp")) {
  require<ds::IoError>(!fs::is_directory(path_), path_, ": cannot write: this is a folder; name a file");
  out_.open(temporary_, std::ios::binary | std::ios::trunc);
  require_good("cannot write");
}

WholeFile::~WholeFile() {
  std::error_code ignored;
  fs::remove(temporary_, ignored);
}

void WholeFile::write(const std::string& text) {
  out_ << text;
  require_good("cannot write");
}

void WholeFile::commit() {
  out_.close();
  require_good("cannot write");
  std::error_code failure;
  fs::rename(temporary_, path_, failure);
  require<ds::IoError>(!failure, path_, ": cannot rename the finished file into place: ", failure.message());
}

void WholeFile::require_good(const char* what) const {
  require<ds::IoError>(out_.good(), path_, ": ", what, ": ", std::generic_category().message(errno),
                       "; check that the folder exists, may be written and has space");
}

}  // namespace gpt
