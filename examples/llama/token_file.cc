#include "token_file.h"

#include <ATen/ops/empty.h>
#include <dsengine/errors.h>

#include <fstream>
#include <iterator>

#include "../gpt/check.h"

namespace llama {

using gpt::require;

TokenFile::TokenFile(const std::string& path, int64_t length, int64_t vocab)
    : path_(path), length_(length), vocab_(vocab), width_(path.ends_with(".bin") ? 2 : 1) {
  std::ifstream file(path, std::ios::binary);
  require<ds::IoError>(file.is_open(), path, ": cannot be opened");
  bytes_ = std::make_shared<const std::string>(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  require<ds::IoError>(!file.bad(), path, ": cannot be read");
  require<ds::ConfigError>(tokens() > length, path, ": expected more than ", length, " tokens, found ", tokens());
}

int64_t TokenFile::tokens() const { return static_cast<int64_t>(bytes_->size()) / width_; }

size_t TokenFile::size() const { return static_cast<size_t>((tokens() - 1) / length_); }

TokenFile::Example TokenFile::get(size_t index) const {
  const at::Tensor ids = at::empty({length_ + 1}, at::kLong);
  auto* const values = ids.mutable_data_ptr<int64_t>();
  const int64_t first = static_cast<int64_t>(index) * length_;
  for (int64_t i = 0; i <= length_; ++i) {
    int64_t id = 0;
    for (int byte = width_ - 1; byte >= 0; --byte) {
      id = id * 256 + static_cast<unsigned char>((*bytes_)[static_cast<size_t>((first + i) * width_ + byte)]);
    }
    require<ds::ConfigError>(id < vocab_, path_, ": token ", first + i, ": expected an id below the vocabulary of ",
                             vocab_, ", found ", id);
    values[i] = id;
  }
  return {ids.narrow(0, 0, length_), ids.narrow(0, 1, length_)};
}

}  // namespace llama
