#include "core/json/json_problems.h"

#include <algorithm>

namespace ds {
namespace {

void append_once(std::vector<std::string>& lines, std::string line) {
  if (std::find(lines.begin(), lines.end(), line) == lines.end()) lines.push_back(std::move(line));
}

}  // namespace

std::string dotted_path(const std::string& pointer) {
  std::string out;
  for (size_t i = pointer.starts_with('/') ? 1 : 0; i < pointer.size(); ++i) {
    if (pointer[i] == '/') {
      out += '.';
    } else if (pointer[i] == '~' && i + 1 < pointer.size()) {
      out += pointer[++i] == '1' ? '/' : '~';
    } else {
      out += pointer[i];
    }
  }
  return out;
}

std::string JsonProblems::place(const std::string& pointer) const {
  const int line = document_.line_of(pointer);
  const std::string path = pointer.empty() ? std::string("the config") : dotted_path(pointer);
  return line == 0 ? path : cat(path, " (line ", line, ")");
}

void JsonProblems::error(const std::string& pointer, const std::string& message) {
  append_once(errors_, cat(place(pointer), ": ", message));
}

void JsonProblems::warning(const std::string& pointer, const std::string& message) {
  append_once(warnings_, cat(place(pointer), ": ", message));
}

void JsonProblems::throw_errors(const std::string& name) const {
  if (errors_.empty()) return;
  std::string text = cat(name, ": ", errors_.size(), errors_.size() == 1 ? " mistake" : " mistakes");
  for (const std::string& line : errors_) text += "\n  " + line;
  throw ConfigError(text);
}

}  // namespace ds
