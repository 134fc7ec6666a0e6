// The pages of the project, as tests read them. Torch-free.
#pragma once

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

namespace ds {

// `name` from the root of the source tree; empty when there is no such file.
inline std::string read_page(const std::string& name) {
  std::ifstream in(std::filesystem::path(DS_SOURCE_DIR) / name);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

inline std::vector<std::string> lines_of(const std::string& text) {
  std::istringstream in(text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

inline bool is_fence(const std::string& line) { return line.starts_with("```"); }

}  // namespace ds
