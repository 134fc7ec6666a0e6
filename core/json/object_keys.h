// The keys of one object of a JSON document, and which of them a description has named. Torch-free.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/json/json_types.h"

namespace ds {

// Looks up the keys of an object that is read, and remembers which of them something reads: the others are unknown.
class ObjectKeys {
 public:
  // Makes the keys of an object that has none.
  ObjectKeys() = default;
  // `object` outlives it.
  explicit ObjectKeys(const nlohmann::ordered_json& object) : object_(&object) {}

  bool has(const std::string& key) const { return object_ != nullptr && object_->contains(key); }
  // Tells whether the value of the key, in either spelling, is an object.
  bool has_object(const JsonKey& key) const;
  // Returns the value of a key that the object has.
  const nlohmann::ordered_json& at(const std::string& key) const { return (*object_)[key]; }
  // Returns the value of a key, a null pointer when it is absent or "auto". Does not declare the key.
  const nlohmann::ordered_json* peek(const std::string& key) const;
  // Returns the spelling of the key that the object has, the name where it has both; empty: it has neither.
  std::string spelling(const JsonKey& key) const;

  // Notes that something reads the key, in either spelling.
  void declare(const JsonKey& key);
  // The spellings of all declared keys, in the order of their declarations.
  const std::vector<std::string>& declared() const { return declared_; }
  // Lists the keys of the object that were not declared, in the order of the document.
  std::vector<std::string> undeclared() const;

 private:
  const nlohmann::ordered_json* object_ = nullptr;  // null: an object without keys
  std::vector<std::string> declared_;
};

}  // namespace ds
