#include "checkpoint/pickle/pickle_field.h"

#include <algorithm>

#include "core/check.h"

namespace ds::checkpoint {

void PickleField::fail(const std::string& what) const { throw IoError(cat(where_, ": ", what)); }

void PickleField::expected(const char* what) const { fail(cat("expected ", what, ", found ", value_->in_words())); }

const PickleValue& PickleField::dict() const {
  if (!is(PickleKind::kDict)) expected("a dict");
  return *value_;
}

PickleField PickleField::at(const std::string& key) const {
  const PickleValue* found = dict().find(key);
  if (found == nullptr) fail(cat("no key \"", key, "\""));
  return {*found, cat(where_, ": ", key)};
}

std::optional<PickleField> PickleField::find(const std::string& key) const {
  const PickleValue* found = dict().find(key);
  if (found == nullptr || found->is(PickleKind::kNone)) return std::nullopt;
  return PickleField(*found, cat(where_, ": ", key));
}

std::vector<std::pair<std::string, PickleField>> PickleField::entries() const {
  std::vector<std::pair<std::string, PickleField>> result;
  for (const auto& [key, content] : dict().entries) {
    if (!key->is(PickleKind::kString)) fail(cat("expected keys that are strings, found ", key->in_words()));
    result.emplace_back(key->text, PickleField(*content, cat(where_, ": ", key->text)));
  }
  return result;
}

size_t PickleField::size() const {
  if (!is_list()) expected("a list");
  return value_->items.size();
}

PickleField PickleField::item(size_t index) const {
  if (index >= size()) fail(cat("expected more than ", index, " items, found ", size()));
  return {*value_->items[index], cat(where_, "[", index, "]")};
}

bool PickleField::boolean() const {
  if (!is(PickleKind::kBool)) expected("a bool");
  return value_->integer != 0;
}

int64_t PickleField::integer() const {
  if (!is(PickleKind::kInt)) expected("an int");
  return value_->integer;
}

double PickleField::number() const {
  if (is(PickleKind::kInt)) return static_cast<double>(value_->integer);
  if (!is(PickleKind::kFloat)) expected("a number");
  return value_->number;
}

const std::string& PickleField::text() const {
  if (!is(PickleKind::kString)) expected("a string");
  return value_->text;
}

const TensorReference& PickleField::tensor() const {
  if (!is(PickleKind::kTensor)) expected("a tensor");
  return *value_->tensor;
}

std::vector<int64_t> PickleField::sizes() const {
  std::vector<int64_t> result;
  int64_t product = 1;
  for (size_t dim = 0; dim < size(); ++dim) {
    const PickleField field = item(dim);
    result.push_back(field.integer());
    // Strides are computed without sizes of 0.
    const int64_t size = std::max<int64_t>(result.back(), 1);
    if (result.back() < 0 || __builtin_mul_overflow(product, size, &product)) expected("sizes of a tensor");
  }
  return result;
}

}  // namespace ds::checkpoint
