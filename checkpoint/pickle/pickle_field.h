// A value of a pickle together with where it stands, read with checks.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/pickle/pickle_value.h"

namespace ds::checkpoint {

// Every method throws IoError naming the place, what was expected and what was found. The value outlives it.
class PickleField {
 public:
  // `where`: "path/of/file.pt".
  PickleField(const PickleValue& value, std::string where) : value_(&value), where_(std::move(where)) {}

  const PickleValue& value() const { return *value_; }
  const std::string& where() const { return where_; }
  bool is(PickleKind kind) const { return value_->is(kind); }
  bool is_none() const { return is(PickleKind::kNone); }
  bool is_list() const { return is(PickleKind::kList) || is(PickleKind::kTuple); }

  // The value under a key of a dict.
  PickleField at(const std::string& key) const;
  // The value under a key of a dict; nothing where there is no such key, or None is its value.
  std::optional<PickleField> find(const std::string& key) const;
  std::vector<std::pair<std::string, PickleField>> entries() const;
  // The number of items of a list or tuple, and one of them.
  size_t size() const;
  PickleField item(size_t index) const;

  bool boolean() const;
  int64_t integer() const;
  double number() const;  // int or float
  const std::string& text() const;
  const TensorReference& tensor() const;
  // A tuple or list of sizes whose product is an int64_t.
  std::vector<int64_t> sizes() const;

  [[noreturn]] void fail(const std::string& what) const;

 private:
  [[noreturn]] void expected(const char* what) const;
  const PickleValue& dict() const;

  const PickleValue* value_;
  std::string where_;
};

}  // namespace ds::checkpoint
