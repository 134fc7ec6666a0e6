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

// Lines without what indents them, as one text; empty ones and includes do not count.
inline std::string code_of(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) {
    const size_t begin = line.find_first_not_of(' ');
    if (begin != std::string::npos && line[begin] != '#') text += line.substr(begin) + "\n";
  }
  return text;
}

// The programs of a page: its blocks of C++, and those that do not stand in a source file.
struct ProgramsOfPage {
  int count = 0;
  std::vector<std::string> missing;
};
inline ProgramsOfPage programs_of_page(const std::string& page, const std::string& source) {
  const std::string code = code_of(lines_of(read_page(source)));
  ProgramsOfPage result;
  std::vector<std::string> block;
  bool inside = false;
  for (const std::string& line : lines_of(read_page(page))) {
    if (inside && is_fence(line)) {
      ++result.count;
      if (code.find(code_of(block)) == std::string::npos) result.missing.push_back(code_of(block));
      inside = false;
    } else if (inside) {
      block.push_back(line);
    } else if (line == "```cpp") {
      inside = true;
      block.clear();
    }
  }
  return result;
}

}  // namespace ds
