// The values of a Python pickle, as plain data.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace ds::checkpoint {

// A tensor of torch.save: its elements lie in a record of the archive (checkpoint/pickle/torch_archive.h). Counts in
// elements.
struct TensorReference {
  std::string storage;                               // record "<archive>/data/<storage>"
  at::ScalarType dtype = at::ScalarType::Undefined;  // Undefined: a type that cannot be read
  std::string storage_type;                          // "torch.FloatStorage"
  int64_t storage_numel = 0;
  int64_t offset = 0;  // the first element's place in the storage
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;  // never negative; the tensor lies inside its storage

  int64_t numel() const;
  bool contiguous() const;
};

// Values belong to their Pickle (checkpoint/pickle/pickle_reader.h). They may contain one another more than once, and
// themselves: whoever walks through them bounds the walk.
struct PickleValue {
  enum class Kind {
    kNone,
    kBool,
    kInt,
    kBigInt,  // beyond 64 bits
    kFloat,
    kString,
    kBytes,
    kList,
    kTuple,
    kDict,  // also OrderedDict, defaultdict
    kSet,
    kTensor,  // also Parameter
    kStorage,
    kClass,   // a class or function by name, also torch.float32
    kObject,  // an object of any other class; nothing of it was run
  };
  using Entry = std::pair<const PickleValue*, const PickleValue*>;

  Kind kind = Kind::kNone;
  int64_t integer = 0;                      // kBool, kInt
  double number = 0.0;                      // kFloat
  std::string text;                         // kString (UTF-8), kBytes, kBigInt; kClass, kObject: "module.Name"
  std::vector<const PickleValue*> items;    // kList, kTuple, kSet; kObject: arguments of its making, items appended
  std::vector<Entry> entries;               // kDict, and of a kObject that is one, in the order of writing
  const PickleValue* state = nullptr;       // the argument of __setstate__; usually a dict of attributes
  std::unique_ptr<TensorReference> tensor;  // kTensor; kStorage

  bool is(Kind wanted) const { return kind == wanted; }
  // The value that a kDict has under a string; null when there is none.
  const PickleValue* find(std::string_view key) const;
  // The attribute of a kObject, taken from its state; null when there is none.
  const PickleValue* attribute(std::string_view name) const;
  // "an int", "an object of class a.B": for messages.
  std::string in_words() const;
};

using PickleKind = PickleValue::Kind;

// Converts to JSON: None, booleans, 64-bit integers, finite floats, UTF-8 strings, and lists, tuples and dicts (keys:
// strings or integers) of them. Nothing for any other value, and for one with more than a million parts or 100 levels.
std::optional<nlohmann::json> plain_json(const PickleValue& value);

}  // namespace ds::checkpoint
