// Metrics of samples of a file of tokens, as the analyzers of DeepSpeed's examples have them. Torch-free.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/files/mapped_file.h"

namespace ds::efficiency {

// Tokens one behind the other, unsigned little-endian integers, cut into samples. Any thread.
class TokenFile {
 public:
  // `bytes`: of a token, 1, 2 or 4. Throws IoError for a file that is no whole number of them.
  TokenFile(const std::string& path, int bytes);

  int64_t size() const { return size_; }
  uint32_t token(int64_t place) const;
  // Samples of `length` tokens, each with the one that follows: sample i begins at i * length.
  void cut_by_length(int64_t length);
  // Samples between tokens of this kind, which belong to none; empty ones are none.
  void cut_at(uint32_t separator);
  int64_t samples() const { return static_cast<int64_t>(begins_.size()); }

  // Tokens of each sample.
  std::vector<int64_t> lengths() const { return lengths_; }
  // The sum of -ln(frequency) of a sample's tokens in the whole file, rounded down: rare words make it large.
  std::vector<int64_t> vocabulary_rarity() const;

 private:
  std::string path_;
  MappedFile file_;
  int bytes_;
  int64_t size_;
  std::vector<int64_t> begins_;   // of samples
  std::vector<int64_t> lengths_;  // of samples
};

}  // namespace ds::efficiency
