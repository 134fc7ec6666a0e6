// The contents of a file, for tests that compare or damage them.
#pragma once

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

namespace ds::test {

// All bytes of the file; empty where it cannot be read.
inline std::string file_text(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace ds::test
