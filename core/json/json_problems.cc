#include "core/json/json_problems.h"

#include <utility>

#include "core/shown_text.h"

namespace ds {

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
  const std::string path = pointer.empty() ? std::string("the config") : shown_text(dotted_path(pointer));
  return line == 0 ? path : cat(path, " (line ", line, ")");
}

void JsonProblems::Lines::add(std::string line) {
  if (!seen_.insert(line).second) return;
  if (lines.size() < kMostLines) lines.push_back(std::move(line));
}

std::vector<std::string> JsonProblems::Lines::told(const char* kind) const {
  std::vector<std::string> all = lines;
  if (count() > lines.size()) all.push_back(cat("and ", count() - lines.size(), " more ", kind));
  return all;
}

void JsonProblems::error(const std::string& pointer, const std::string& message) {
  errors_.add(cat(place(pointer), ": ", message));
}

void JsonProblems::warning(const std::string& pointer, const std::string& message) {
  warnings_.add(cat(place(pointer), ": ", message));
}

void JsonProblems::throw_errors(const std::string& name) const {
  if (!has_errors()) return;
  std::string text = cat(name, ": ", errors_.count(), errors_.count() == 1 ? " mistake" : " mistakes");
  for (const std::string& line : errors_.told("mistakes")) text += "\n  " + line;
  throw ConfigError(text);
}

}  // namespace ds
