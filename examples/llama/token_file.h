// Token sequences of a file, as a dataset for the engine's loader.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace llama {

// A file of text, whose bytes are tokens, or one that ends in .bin: token ids of 16 bits, little endian, without a
// header. Sequences lie one behind the other; the target of each token is the one behind it.
class TokenFile {
 public:
  struct Example {
    at::Tensor data;    // int64 [length]
    at::Tensor target;  // the same, one token later
  };
  // Throws ds::IoError for a file that cannot be read, ds::ConfigError for one that is too short.
  TokenFile(const std::string& path, int64_t length, int64_t vocab);

  // Throws ds::ConfigError for a token that the vocabulary lacks.
  Example get(size_t index) const;
  size_t size() const;
  int64_t tokens() const;

 private:
  std::string path_;
  int64_t length_, vocab_;
  int width_;                                 // bytes of a token
  std::shared_ptr<const std::string> bytes_;  // of all tokens; shared by copies
};

}  // namespace llama
