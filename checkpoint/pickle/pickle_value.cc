#include "checkpoint/pickle/pickle_value.h"

#include <cmath>

#include "core/text.h"

namespace ds::checkpoint {
namespace {

constexpr int kMostLevels = 100;
constexpr int64_t kMostParts = 1'000'000;

bool is_utf8(const std::string& text) {
  try {
    nlohmann::json(text).dump();
    return true;
  } catch (const nlohmann::json::exception&) {
    return false;
  }
}

class PlainJson {
 public:
  // Whether `value` is plain; writes it to `out`.
  bool convert(const PickleValue& value, int level, nlohmann::json& out) {
    if (++parts_ > kMostParts || level > kMostLevels) return false;
    switch (value.kind) {
      case PickleKind::kNone:
        out = nullptr;
        return true;
      case PickleKind::kBool:
        out = value.integer != 0;
        return true;
      case PickleKind::kInt:
        out = value.integer;
        return true;
      case PickleKind::kFloat:
        out = value.number;
        return std::isfinite(value.number);
      case PickleKind::kString:
        out = value.text;
        return is_utf8(value.text);
      case PickleKind::kList:
      case PickleKind::kTuple:
        return convert_items(value, level, out);
      case PickleKind::kDict:
        return convert_entries(value, level, out);
      default:
        return false;
    }
  }

 private:
  bool convert_items(const PickleValue& value, int level, nlohmann::json& out) {
    out = nlohmann::json::array();
    for (const PickleValue* item : value.items) {
      out.emplace_back();
      if (!convert(*item, level + 1, out.back())) return false;
    }
    return true;
  }

  bool convert_entries(const PickleValue& value, int level, nlohmann::json& out) {
    out = nlohmann::json::object();
    for (const auto& [key, content] : value.entries) {
      if (!key->is(PickleKind::kString) && !key->is(PickleKind::kInt)) return false;
      if (!is_utf8(key->text)) return false;
      const std::string name = key->is(PickleKind::kInt) ? cat(key->integer) : key->text;
      if (!convert(*content, level + 1, out[name])) return false;
    }
    return true;
  }

  int64_t parts_ = 0;
};

}  // namespace

int64_t TensorReference::numel() const {
  int64_t product = 1;
  for (const int64_t size : sizes) product *= size;
  return product;
}

bool TensorReference::contiguous() const {
  if (numel() == 0) return true;
  int64_t expected = 1;
  for (size_t dim = sizes.size(); dim-- > 0;) {
    if (sizes[dim] != 1 && strides[dim] != expected) return false;
    expected *= sizes[dim];
  }
  return true;
}

const PickleValue* PickleValue::find(std::string_view key) const {
  for (size_t i = entries.size(); i-- > 0;) {  // of equal keys the last counts
    if (entries[i].first->is(PickleKind::kString) && entries[i].first->text == key) return entries[i].second;
  }
  return nullptr;
}

const PickleValue* PickleValue::attribute(std::string_view name) const {
  return state != nullptr && state->is(PickleKind::kDict) ? state->find(name) : nullptr;
}

std::string PickleValue::in_words() const {
  switch (kind) {
    case PickleKind::kNone:
      return "None";
    case PickleKind::kBool:
      return "a bool";
    case PickleKind::kInt:
      return cat("the int ", integer);
    case PickleKind::kBigInt:
      return "an int beyond 64 bits";
    case PickleKind::kFloat:
      return cat("the float ", number);
    case PickleKind::kString:
      return "a string";
    case PickleKind::kBytes:
      return "bytes";
    case PickleKind::kList:
      return cat("a list of ", items.size());
    case PickleKind::kTuple:
      return cat("a tuple of ", items.size());
    case PickleKind::kDict:
      return cat("a dict of ", entries.size());
    case PickleKind::kSet:
      return "a set";
    case PickleKind::kTensor:
      return "a tensor";
    case PickleKind::kStorage:
      return "a storage";
    case PickleKind::kClass:
      return cat("the class ", text);
    case PickleKind::kObject:
      return cat("an object of class ", text);
  }
  return "nothing known";
}

std::optional<nlohmann::json> plain_json(const PickleValue& value) {
  nlohmann::json out;
  if (!PlainJson().convert(value, 0, out)) return std::nullopt;
  return out;
}

}  // namespace ds::checkpoint
