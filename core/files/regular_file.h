// Reads a small file as a whole, and nothing else: a fifo would wait for ever, a device may never end. Torch-free.
#pragma once

#include <cstddef>
#include <string>

namespace ds {

struct FileText {
  std::string text;
  std::string trouble;  // empty: all was read. Else what was expected and found, without the path
};

// Reads `path` where it is a regular file of at most `most` bytes (links are followed).
FileText read_regular_file(const std::string& path, size_t most);

}  // namespace ds
