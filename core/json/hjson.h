// Reads JSON as people write it: the dialect of the Python package hjson (https://hjson.github.io/syntax.html), which
// is how DeepSpeed reads its configs. Torch-free.
//
// Beyond JSON: comments (#, //, /* */), trailing and missing commas (a line end separates), unquoted keys, unquoted
// strings up to the end of the line, single quotes, '''multi-line''' strings, an object without its outer braces.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace ds {

// The JSON pointer of the value under `key` in the object at `pointer`.
std::string pointer_to_member(const std::string& pointer, const std::string& key);

// A key that an object has more than once.
struct DuplicateKey {
  std::string pointer;     // JSON pointer of the key: "/zero_optimization/stage"
  std::vector<int> lines;  // where it stands, each time; counted from 1; 0: unknown
};

struct HjsonDocument {
  nlohmann::ordered_json root;       // where a key is there more than once, its last value
  std::map<std::string, int> lines;  // JSON pointer -> line of its key (of the element in a list), from 1
  std::vector<DuplicateKey> duplicates;

  // The line of a key; 0: unknown (the document was built in code).
  int line_of(const std::string& pointer) const;
};

// Parses a text. Throws ConfigError "NAME:LINE:COLUMN: expected ..., found ..." for a syntax error. `name` is used in
// messages only.
HjsonDocument parse_hjson(std::string_view text, const std::string& name);

}  // namespace ds
