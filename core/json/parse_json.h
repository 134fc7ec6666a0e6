// JSON of files and messages, read the same under every locale. Torch-free.
#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/classic_scope.h"

namespace ds {

// Json::parse(text, ...) of nlohmann::json or ordered_json, with its further arguments (callback, allow_exceptions).
// With a callback nlohmann looks at all values of an object once more behind each object in it: an object of tens of
// thousands takes minutes.
template <class Json, class Text, class... Arguments>
Json parse_json(const Text& text, Arguments&&... arguments) {
  const ClassicScope scope;
  return Json::parse(text, std::forward<Arguments>(arguments)...);
}

// Json::sax_parse(text, handler) of nlohmann::json. Returns whether the handler has heard the whole text.
template <class Text, class Handler>
bool sax_parse_json(const Text& text, Handler& handler) {
  const ClassicScope scope;
  return nlohmann::json::sax_parse(text, &handler);
}

// Hears a text as nlohmann's parser reads it (nlohmann::json_sax), and remembers the first key that its object has
// already. A value of nlohmann::json keeps the last of two equal keys only. Time n log n in the number of keys.
class DuplicateKeys {
 public:
  using Json = nlohmann::json;

  const std::optional<std::string>& found() const { return found_; }

  bool start_object(size_t /*elements*/) {
    keys_.emplace_back();
    return true;
  }
  bool end_object() {
    keys_.pop_back();
    return true;
  }
  bool key(std::string& name) {
    if (!keys_.back().insert(name).second && !found_) found_ = name;
    return true;
  }
  bool start_array(size_t /*elements*/) { return true; }
  bool end_array() { return true; }
  bool null() { return true; }
  bool boolean(bool /*value*/) { return true; }
  bool number_integer(int64_t /*value*/) { return true; }
  bool number_unsigned(uint64_t /*value*/) { return true; }
  bool number_float(double /*value*/, const std::string& /*text*/) { return true; }
  bool string(std::string& /*value*/) { return true; }
  bool binary(Json::binary_t& /*value*/) { return true; }
  bool parse_error(size_t /*position*/, const std::string& /*token*/, const Json::exception& /*error*/) {
    return false;
  }

 private:
  std::vector<std::set<std::string>> keys_;  // of the objects that are open
  std::optional<std::string> found_;
};

// Returns the first key of a JSON text that stands twice in one object; of a broken text, the first before the break.
inline std::optional<std::string> find_duplicate_key(std::string_view text) {
  DuplicateKeys keys;
  sax_parse_json(text, keys);
  return keys.found();
}

}  // namespace ds
