// The reference of ds_config keys: the tables of configs/README.md, which are built into the program. Torch-free.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ds::tool {

// The text of configs/README.md at build time.
std::string_view key_reference_text();

class KeyReference {
 public:
  struct Entry {
    std::string path;             // "zero_optimization.stage"
    std::string standard;         // what holds without the key, in words; may be empty
    std::string meaning;          // may be empty
    std::string refused;          // when a config with it is refused; else empty
    bool without_effect = false;  // read and checked alone
  };

  // Reads the tables of a Markdown text that have a column "Key". A heading of one name in backquotes names the section
  // of the tables below it; a * in it stands for any name, as in "curriculum_metrics.*".
  explicit KeyReference(std::string_view markdown);

  // The entry of a key, or of the nearest section around it that has one, with the path that it has in the file.
  std::optional<Entry> find(const std::string& path) const;
  // Whether there are entries of keys inside of this one.
  bool has_below(const std::string& path) const;

 private:
  void read_row(const std::string& section, const std::vector<std::string>& columns,
                const std::vector<std::string>& cells);
  Entry& entry(const std::string& path);

  std::vector<Entry> entries_;
};

// A key of a ds_config with its explanation.
struct ExplainedKey {
  std::string path;  // "zero_optimization.stage"
  std::string text;  // one or two sentences: what it does, and what holds without it
};

// Explains every value of the ds_config `written` that is no object, in the order of the file.
std::vector<ExplainedKey> explain_keys(const nlohmann::ordered_json& written, const KeyReference& reference);

}  // namespace ds::tool
