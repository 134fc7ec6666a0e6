// What each key of a ds_config means: the tables of configs/README.md, which are built into the program. Torch-free.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ds::tool {

// configs/README.md, as it was when this was built.
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

  // Tables of Markdown with a column "Key" each; a heading of one name in backquotes says which section it is. In it *
  // is a name of the file's own: "curriculum_metrics.*".
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

}  // namespace ds::tool
