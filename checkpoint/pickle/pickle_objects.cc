#include "checkpoint/pickle/pickle_objects.h"

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <string_view>
#include <utility>

#include "core/shown_text.h"
#include "core/text.h"

namespace ds::checkpoint {
namespace {

// By the whole name.
constexpr std::array kNames = std::to_array<std::string_view>({
    "_codecs.encode",
    "argparse.Namespace",
    "builtins.bool",
    "builtins.bytearray",
    "builtins.bytes",
    "builtins.complex",
    "builtins.dict",
    "builtins.float",
    "builtins.frozenset",
    "builtins.int",
    "builtins.list",
    "builtins.object",
    "builtins.range",
    "builtins.set",
    "builtins.slice",
    "builtins.str",
    "builtins.tuple",
    "collections.Counter",
    "collections.OrderedDict",
    "collections.defaultdict",
    "collections.deque",
    "copy_reg._reconstructor",
    "copyreg._reconstructor",
    "datetime.date",
    "datetime.datetime",
    "datetime.time",
    "datetime.timedelta",
    "datetime.timezone",
    "decimal.Decimal",
    "fractions.Fraction",
    "numpy._core.multiarray._reconstruct",
    "numpy._core.multiarray.scalar",
    "numpy.core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar",
    "numpy.dtype",
    "numpy.ndarray",
    "numpy.random._pickle.__bit_generator_ctor",
    "numpy.random._pickle.__generator_ctor",
    "numpy.random._pickle.__randomstate_ctor",
    "pathlib.PosixPath",
    "pathlib.PurePosixPath",
    "pathlib.PureWindowsPath",
    "pathlib.WindowsPath",
    "pathlib._local.PosixPath",
    "pathlib._local.PurePosixPath",
    "pathlib._local.PureWindowsPath",
    "pathlib._local.WindowsPath",
    "torch.Size",
    "torch.Tensor",
    "torch.device",
    "torch.nn.parameter.Buffer",
    "torch.nn.parameter.Parameter",
    "torch.serialization._get_layout",
    "torch.torch_version.TorchVersion",
    "uuid.UUID",
});

// By the module that they are in, and the beginning of their names.
constexpr std::array kBeginnings = std::to_array<std::string_view>({
    "__torch__.",
    "deepspeed.checkpoint.",
    "deepspeed.runtime.",
    "deepspeed.utils.",
    "torch._tensor._rebuild_",
    "torch._utils._rebuild_",
    "torch.jit._pickle.",
});

constexpr std::string_view kOldBuiltins = "__builtin__.";

// Whether a class or function, "module.name", is among those that torch, LibTorch, DeepSpeed and numpy write into
// checkpoints, or a plain type of Python's library. None of them is run, whatever this says: a file that asks for
// another one was made to do something to whoever loads it in Python, or holds objects of a program of its own.
bool is_known_callable(std::string_view name) {
  // The names that Python 2 had, which pickles of protocol 2 have to this day.
  if (name.starts_with(kOldBuiltins)) return is_known_callable(cat("builtins.", name.substr(kOldBuiltins.size())));
  return std::find(kNames.begin(), kNames.end(), name) != kNames.end() ||
         std::any_of(kBeginnings.begin(), kBeginnings.end(),
                     [name](std::string_view beginning) { return name.starts_with(beginning); });
}

constexpr size_t kMostDimensions = 64;
constexpr size_t kLongestName = 1000;        // of a class or a storage
constexpr int64_t kLargestExpansion = 1024;  // elements of a tensor for each of its storage

at::ScalarType dtype_of_storage(const std::string& name) {
  static const std::map<std::string, at::ScalarType> kTypes = {
      {"torch.FloatStorage", at::kFloat},      {"torch.DoubleStorage", at::kDouble}, {"torch.HalfStorage", at::kHalf},
      {"torch.LongStorage", at::kLong},        {"torch.IntStorage", at::kInt},       {"torch.ShortStorage", at::kShort},
      {"torch.CharStorage", at::kChar},        {"torch.ByteStorage", at::kByte},     {"torch.BoolStorage", at::kBool},
      {"torch.BFloat16Storage", at::kBFloat16}};
  const auto found = kTypes.find(name);
  return found == kTypes.end() ? at::ScalarType::Undefined : found->second;
}

bool fits(const TensorReference& tensor) {
  int64_t last = tensor.offset;
  int64_t numel = 1;
  bool overflow = false;
  bool empty = false;
  for (size_t dim = 0; dim < tensor.sizes.size(); ++dim) {
    int64_t reach = 0;
    empty |= tensor.sizes[dim] == 0;
    overflow |= __builtin_mul_overflow(std::max<int64_t>(tensor.sizes[dim], 1), numel, &numel);
    overflow |= __builtin_mul_overflow(tensor.sizes[dim] - 1, tensor.strides[dim], &reach);
    overflow |= __builtin_add_overflow(last, reach, &last);
  }
  if (overflow) return false;
  return empty || (last < tensor.storage_numel && numel / kLargestExpansion <= tensor.storage_numel);
}

}  // namespace

PickleValue* PickleObjects::make(PickleKind kind) {
  values_.emplace_back();
  values_.back().kind = kind;
  return &values_.back();
}

std::string PickleObjects::class_name(const std::string& module, const std::string& name) const {
  cursor_.check(module.size() + name.size() <= kLongestName, "a class with a name of more than 1000 characters");
  return cat(module, ".", name);
}

void PickleObjects::spend(size_t parts) {
  copied_ += parts;
  cursor_.check(copied_ <= 1024 + 16 * cursor_.size(), "it repeats its values too often");
}

void PickleObjects::require_known(const std::string& name) const {
  if (is_known_callable(name)) return;
  cursor_.fail(
      cat("it asks its reader to call ", shown_text(name),
          ", which is none of the classes and functions that torch, DeepSpeed, numpy and plain Python values "
          "need; nothing was run. If you trust the file, load it in Python and save plain values and tensors"));
}

PickleValue* PickleObjects::call(const PickleValue& function, const PickleValue& arguments) {
  cursor_.check(function.is(PickleKind::kClass), "a call of what is no class or function");
  const std::string& name = function.text;
  const PickleItems& items = arguments.items;
  require_known(name);
  if (name == "torch._utils._rebuild_tensor_v2" || name == "torch._utils._rebuild_tensor") return tensor(items);
  if (name == "torch._utils._rebuild_parameter" || name == "torch._utils._rebuild_parameter_with_state") {
    cursor_.check(!items.empty() && items[0]->is(PickleKind::kTensor), "a parameter without a tensor");
    return const_cast<PickleValue*>(items[0]);  // of this machine's own values
  }
  // (function, type, arguments, state): of a tensor that has attributes.
  if (name == "torch._tensor._rebuild_from_type_v2" && items.size() >= 3 && items[2]->is(PickleKind::kTuple) &&
      items[0]->is(PickleKind::kClass) && items[0]->text != name) {
    return call(*items[0], *items[2]);
  }
  if (PickleValue* plain = plain_container(name, items)) return plain;
  if (name == "_codecs.encode" && !items.empty() && items[0]->is(PickleKind::kString)) return latin1_bytes(*items[0]);
  if (name == "copyreg._reconstructor" && !items.empty() && items[0]->is(PickleKind::kClass)) {
    return object(items[0]->text, {items.begin() + 1, items.end()});
  }
  return object(name, items);
}

PickleValue* PickleObjects::made_new(const PickleValue& type, const PickleValue& arguments) {
  PickleValue* plain = plain_container(type.text, arguments.items);
  return plain != nullptr ? plain : object(type.text, arguments.items);
}

PickleValue* PickleObjects::object(const std::string& type, PickleItems arguments) {
  PickleValue* result = make(PickleKind::kObject);
  spend(arguments.size());
  result->text = type;
  result->items = std::move(arguments);
  return result;
}

PickleValue* PickleObjects::plain_container(const std::string& type, const PickleItems& arguments) {
  const bool empty = arguments.empty();
  const bool from_list =
      arguments.size() == 1 && (arguments[0]->is(PickleKind::kList) || arguments[0]->is(PickleKind::kTuple));
  if (type == "collections.OrderedDict" && (empty || from_list)) return dict_of_pairs(arguments);
  if (type == "collections.defaultdict") return make(PickleKind::kDict);
  if (!empty && !from_list) return nullptr;
  const bool tuple = type == "torch.Size" || type == "builtins.tuple";
  const bool set = type == "builtins.set" || type == "builtins.frozenset" || type == "__builtin__.set" ||
                   type == "__builtin__.frozenset";
  if (!tuple && !set) return nullptr;
  if (tuple && from_list && arguments[0]->is(PickleKind::kTuple)) return const_cast<PickleValue*>(arguments[0]);
  PickleValue* result = make(tuple ? PickleKind::kTuple : PickleKind::kSet);
  if (from_list) spend(arguments[0]->items.size()), result->items = arguments[0]->items;
  return result;
}

PickleValue* PickleObjects::dict_of_pairs(const PickleItems& arguments) {
  PickleValue* dict = make(PickleKind::kDict);
  if (arguments.empty()) return dict;
  spend(arguments[0]->items.size());
  for (const PickleValue* pair : arguments[0]->items) {
    cursor_.check(pair->items.size() == 2, "an OrderedDict of what are no pairs");
    dict->entries.emplace_back(pair->items[0], pair->items[1]);
  }
  return dict;
}

PickleValue* PickleObjects::latin1_bytes(const PickleValue& text) {
  PickleValue* bytes = make(PickleKind::kBytes);
  spend(text.text.size());
  for (size_t i = 0; i < text.text.size(); ++i) {
    const auto first = static_cast<uint8_t>(text.text[i]);
    if (first < 0x80) {
      bytes->text += text.text[i];
      continue;
    }
    cursor_.check(i + 1 < text.text.size() && (first == 0xc2 || first == 0xc3), "bytes that are not in latin1");
    bytes->text += static_cast<char>((first & 3) << 6 | (static_cast<uint8_t>(text.text[++i]) & 0x3f));
  }
  return bytes;
}

PickleValue* PickleObjects::storage(const PickleValue& id) {
  const PickleItems& parts = id.items;
  cursor_.check(id.is(PickleKind::kTuple) && parts.size() >= 5 && parts[0]->is(PickleKind::kString) &&
                    parts[0]->text == "storage" && parts[1]->is(PickleKind::kClass) &&
                    parts[2]->is(PickleKind::kString) && parts[4]->is(PickleKind::kInt) && parts[4]->integer >= 0 &&
                    parts[2]->text.size() <= kLongestName,
                "a persistent id that is no storage of torch.save");
  PickleValue* storage = make(PickleKind::kStorage);
  storage->tensor = std::make_unique<TensorReference>();
  storage->tensor->storage = parts[2]->text;
  storage->tensor->storage_type = parts[1]->text;
  storage->tensor->dtype = dtype_of_storage(parts[1]->text);
  storage->tensor->storage_numel = parts[4]->integer;
  return storage;
}

PickleValue* PickleObjects::tensor(const PickleItems& parts) {
  cursor_.check(parts.size() >= 4 && parts[0]->is(PickleKind::kStorage) && parts[1]->is(PickleKind::kInt) &&
                    parts[1]->integer >= 0,
                "a tensor without storage, offset, sizes and strides");
  PickleValue* value = make(PickleKind::kTensor);
  value->tensor = std::make_unique<TensorReference>(*parts[0]->tensor);
  TensorReference& result = *value->tensor;
  result.offset = parts[1]->integer;
  result.sizes = numbers(*parts[2]);
  result.strides = numbers(*parts[3]);
  cursor_.check(result.sizes.size() == result.strides.size(), "a tensor with more sizes than strides, or fewer");
  cursor_.check(fits(result), "a tensor that does not fit its storage");
  return value;
}

std::vector<int64_t> PickleObjects::numbers(const PickleValue& tuple) const {
  cursor_.check(tuple.is(PickleKind::kTuple) && tuple.items.size() <= kMostDimensions,
                "sizes or strides that are no tuple");
  std::vector<int64_t> result;
  for (const PickleValue* item : tuple.items) {
    cursor_.check(item->is(PickleKind::kInt) && item->integer >= 0, "a size or stride that is no number from 0 on");
    result.push_back(item->integer);
  }
  return result;
}

}  // namespace ds::checkpoint
