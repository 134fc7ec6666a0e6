#include "core/json/object_keys.h"

#include <unordered_set>

namespace ds {

using nlohmann::ordered_json;

bool ObjectKeys::has_object(const JsonKey& key) const {
  return (has(key.name) && at(key.name).is_object()) ||
         (!key.alias.empty() && has(key.alias) && at(key.alias).is_object());
}

const ordered_json* ObjectKeys::peek(const std::string& key) const {
  return has(key) && at(key) != kJsonAuto ? &at(key) : nullptr;
}

std::string ObjectKeys::spelling(const JsonKey& key) const {
  if (has(key.name)) return key.name;
  return !key.alias.empty() && has(key.alias) ? key.alias : "";
}

void ObjectKeys::declare(const JsonKey& key) {
  declared_.push_back(key.name);
  if (!key.alias.empty()) declared_.push_back(key.alias);
}

std::vector<std::string> ObjectKeys::undeclared() const {
  std::vector<std::string> keys;
  if (object_ == nullptr) return keys;
  const std::unordered_set<std::string> known(declared_.begin(), declared_.end());
  for (const auto& [key, value] : object_->items()) {
    if (!known.contains(key)) keys.push_back(key);
  }
  return keys;
}

}  // namespace ds
