#include "tools/key_reference.h"

#include <algorithm>

#include "config/supported.h"
#include "core/text.h"

namespace ds::tool {
namespace {

std::string_view trimmed(std::string_view text) {
  const size_t begin = text.find_first_not_of(' ');
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(' ') - begin + 1);
}

// The texts between the bars of a row.
std::vector<std::string> cells_of(std::string_view row) {
  std::vector<std::string> cells;
  row.remove_prefix(1);
  for (size_t bar = row.find('|'); bar != std::string_view::npos; bar = row.find('|')) {
    cells.emplace_back(trimmed(row.substr(0, bar)));
    row.remove_prefix(bar + 1);
  }
  return cells;
}

// Names in backquotes.
std::vector<std::string> names_in(std::string_view text) {
  std::vector<std::string> names;
  for (size_t begin = text.find('`'); begin != std::string_view::npos; begin = text.find('`', begin)) {
    const size_t end = text.find('`', begin + 1);
    if (end == std::string_view::npos) break;
    names.emplace_back(text.substr(begin + 1, end - begin - 1));
    begin = end + 1;
  }
  return names;
}

// "[docs](page.md)" as "docs", without backquotes: for a terminal.
std::string plain(std::string_view markdown) {
  std::string text;
  for (size_t i = 0; i < markdown.size(); ++i) {
    if (markdown[i] == '`') continue;
    if (markdown.substr(i).starts_with("](")) {
      i = std::min(markdown.find(')', i), markdown.size() - 1);
      continue;
    }
    const bool link = markdown[i] == '[' && markdown.find("](", i) != std::string_view::npos &&
                      markdown.find("](", i) < markdown.find(']', i) + 1;
    if (!link) text += markdown[i];
  }
  return text;
}

std::string cell_of(const char* name, const std::vector<std::string>& columns, const std::vector<std::string>& cells) {
  const auto column = std::find(columns.begin(), columns.end(), name);
  const auto index = static_cast<size_t>(column - columns.begin());
  return column == columns.end() || index >= cells.size() ? std::string() : plain(cells[index]);
}

// Whether a path is that of an entry, in which * stands for any one name.
bool is_path_of(std::string_view entry, std::string_view path) {
  for (;;) {
    const size_t star = entry.find('*');
    if (star == std::string_view::npos) return entry == path;
    if (path.substr(0, star) != entry.substr(0, star)) return false;
    const size_t dot = std::min(path.find('.', star), path.size());
    if (dot == star) return false;
    entry.remove_prefix(star + 1);
    path.remove_prefix(dot);
  }
}

// The section that a heading names: "### `fp16`"; nothing: keys are given from the top.
std::string section_of(std::string_view heading) {
  const std::vector<std::string> names = names_in(heading);
  return names.size() == 1 ? names.front() : std::string();
}

bool is_known(const std::string& path) {
  static const std::vector<std::string> kKnown = engine::config::known_keys();
  return std::binary_search(kKnown.begin(), kKnown.end(), path);
}

std::string sentence(std::string text) {
  if (!text.empty() && text.back() != '.') text += '.';
  return text;
}

std::string explanation(const std::string& path, const KeyReference& reference) {
  const auto entry = reference.find(path);
  const bool own = entry && entry->path == path;
  const bool refused = entry && !entry->refused.empty();
  if (refused && !own) {
    return cat("A part of ", entry->path, ", which is not in this version; refused: ", sentence(entry->refused));
  }
  if (refused && entry->meaning.empty()) return cat("Not in this version; refused: ", sentence(entry->refused));
  if (entry && entry->without_effect) {
    return own ? "Read and checked; without effect in C++." : cat("A part of ", entry->path, ", which has no effect.");
  }
  if (!own && is_known(path)) return "A key of DeepSpeed's; see configs/README.md.";
  if (!own && entry && !reference.has_below(entry->path)) {  // what that holds is of the file's own
    return cat("A part of ", entry->path, ": ", sentence(entry->meaning));
  }
  if (!own) return "No key of a ds_config: ignored.";
  const std::string without = entry->standard.empty() ? "" : cat(" Without it: ", sentence(entry->standard));
  const std::string limits = refused ? cat(" Refused: ", sentence(entry->refused)) : "";
  const std::string text = cat(sentence(entry->meaning), limits, without);
  return text.starts_with(' ') ? text.substr(1) : text;
}

void explain_object(const std::string& prefix, const nlohmann::ordered_json& written, const KeyReference& reference,
                    std::vector<ExplainedKey>& out) {
  for (const auto& [key, value] : written.items()) {
    const std::string path = cat(prefix, key);
    if (value.is_object() && !value.empty()) {
      explain_object(cat(path, "."), value, reference, out);
    } else {
      out.push_back({path, explanation(path, reference)});
    }
  }
}

}  // namespace

KeyReference::Entry& KeyReference::entry(const std::string& path) {
  const auto has_path = [&path](const Entry& entry) { return entry.path == path; };
  const auto found = std::find_if(entries_.begin(), entries_.end(), has_path);
  if (found != entries_.end()) return *found;
  entries_.push_back({.path = path, .standard = {}, .meaning = {}, .refused = {}});
  return entries_.back();
}

void KeyReference::read_row(const std::string& section, const std::vector<std::string>& columns,
                            const std::vector<std::string>& cells) {
  for (const std::string& key : names_in(cells.front())) {
    Entry& row = entry(section.empty() ? key : cat(section, ".", key));
    const auto fill = [&](std::string& out, const char* column) {
      if (out.empty()) out = cell_of(column, columns, cells);
    };
    fill(row.standard, "Default");
    fill(row.meaning, "Meaning");
    fill(row.refused, "Refused when");
  }
}

KeyReference::KeyReference(std::string_view markdown) {
  std::string section;
  bool without_effect = false;
  std::vector<std::string> columns;
  while (!markdown.empty()) {
    const size_t end = std::min(markdown.find('\n'), markdown.size());
    const std::string_view line = markdown.substr(0, end);
    markdown.remove_prefix(std::min(end + 1, markdown.size()));
    if (line.starts_with("#")) {
      section = section_of(line);
      without_effect = line == "## Without effect yet" || line == "## Python only";
      columns.clear();
    } else if (line.starts_with("|")) {
      const std::vector<std::string> cells = cells_of(line);
      if (columns.empty()) {
        columns = cells;
      } else if (!cells.empty() && !columns.empty() && columns.front() == "Key") {
        read_row(section, columns, cells);
      }
    } else if (without_effect) {
      for (const std::string& key : names_in(line)) entry(key).without_effect = true;
    } else {
      columns.clear();
    }
  }
}

bool KeyReference::has_below(const std::string& path) const {
  return std::any_of(entries_.begin(), entries_.end(),
                     [&path](const Entry& entry) { return entry.path.starts_with(path + "."); });
}

std::optional<KeyReference::Entry> KeyReference::find(const std::string& path) const {
  for (std::string nearest = path; !nearest.empty();) {
    for (const Entry& entry : entries_) {
      if (!is_path_of(entry.path, nearest)) continue;
      Entry found = entry;
      found.path = nearest;
      return found;
    }
    const size_t dot = nearest.rfind('.');
    nearest.resize(dot == std::string::npos ? 0 : dot);
  }
  return std::nullopt;
}

std::vector<ExplainedKey> explain_keys(const nlohmann::ordered_json& written, const KeyReference& reference) {
  std::vector<ExplainedKey> keys;
  explain_object("", written, reference, keys);
  return keys;
}

}  // namespace ds::tool
