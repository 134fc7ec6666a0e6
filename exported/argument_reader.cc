#include "exported/argument_reader.h"

#include <ATen/ScalarOps.h>
#include <ATen/core/List.h>
#include <c10/core/Device.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/shown_text.h"
#include "exported/archive.h"

namespace ds::exported {
namespace {

using nlohmann::json;

// Returns the type without the "optional" around it.
const c10::Type* bare_type(const c10::Type* type) {
  if (type == nullptr) return nullptr;
  const auto* optional = type->castRaw<c10::OptionalType>();
  return optional == nullptr ? type : optional->getElementType().get();
}

bool is_kind(const c10::Type* type, c10::TypeKind kind) { return type != nullptr && type->kind() == kind; }

// The type of a list's elements; null: it is no list, or not known.
const c10::Type* element_type(const c10::Type* type) {
  const auto* list = type == nullptr ? nullptr : type->castRaw<c10::ListType>();
  return list == nullptr ? nullptr : list->getElementType().get();
}

// A text, in place. Throws nlohmann's exception for a value that is none.
std::string_view text_of(const json& value) { return value.get_ref<const std::string&>(); }

// A number, where Infinity and NaN are texts because JSON has none.
double float_of(const json& value) {
  if (!value.is_string()) return value.get<double>();
  const std::string_view text = text_of(value);
  if (text == "Infinity") return std::numeric_limits<double>::infinity();
  if (text == "-Infinity") return -std::numeric_limits<double>::infinity();
  require<IoError>(text == "NaN", "the number \"", shown_text(text), "\" is none");
  return std::numeric_limits<double>::quiet_NaN();
}

// The place that an argument goes to: the type that the schema declares, without the "optional" around it.
struct Place {
  const ArgumentContext& context;
  const c10::Type* type = nullptr;
  const c10::Type* element = nullptr;  // of a list

  bool wants(c10::TypeKind kind) const { return is_kind(type, kind); }
};

Argument constant(c10::IValue value) { return {.kind = Argument::Kind::kConstant, .constant = std::move(value)}; }

Argument none(const Place& /*place*/, const json& /*value*/) { return constant({}); }

Argument tensor(const Place& place, const json& value) {
  return {.kind = Argument::Kind::kSlot, .slots = {place.context.slot(text_of(value.at("name")))}};
}

Argument optional_tensor(const Place& place, const json& value) {
  return value.contains("as_tensor") ? tensor(place, value.at("as_tensor")) : constant({});
}

// A list of tensors, some of which may be none.
Argument tensors(const Place& place, const json& value) {
  // An empty list of numbers is written as one of tensors.
  if (value.empty() && is_kind(place.element, c10::TypeKind::FloatType)) return constant(c10::List<double>());
  if (value.empty() && place.element != nullptr && place.element->kind() != c10::TypeKind::TensorType) {
    return constant(c10::List<int64_t>());
  }
  const c10::Type* const declared = element_type(place.type);
  const bool optional = declared != nullptr && declared->kind() == c10::TypeKind::OptionalType;
  Argument result{.kind = optional ? Argument::Kind::kOptionalTensors : Argument::Kind::kTensors};
  for (const json& one : value) {
    const json& named = one.contains("as_tensor") ? one.at("as_tensor") : one;
    const bool there = named.contains("name");
    require<IoError>(there || optional, "a list of tensors has one that is none");
    result.slots.push_back(there ? place.context.slot(text_of(named.at("name"))) : -1);
  }
  return result;
}

// One number, whatever the schema wants of it.
Argument scalar(const Place& place, const c10::IValue& value) {
  if (place.wants(c10::TypeKind::TensorType)) return constant(at::native::wrapped_scalar_tensor(value.toScalar()));
  if (is_kind(place.element, c10::TypeKind::FloatType))
    return constant(c10::List<double>({value.toScalar().toDouble()}));
  if (place.element != nullptr && value.isInt()) return constant(c10::List<int64_t>({value.toInt()}));
  if (place.wants(c10::TypeKind::FloatType)) return constant(value.toScalar().toDouble());
  return constant(value);
}
Argument whole(const Place& place, const json& value) { return scalar(place, value.get<int64_t>()); }
Argument real(const Place& place, const json& value) { return scalar(place, float_of(value)); }
Argument truth(const Place& place, const json& value) {
  return place.wants(c10::TypeKind::TensorType) ? constant(at::native::wrapped_scalar_tensor(value.get<bool>()))
                                                : constant(value.get<bool>());
}

Argument numbers(const Place& place, const json& value) {
  const bool of_floats = place.element != nullptr ? is_kind(place.element, c10::TypeKind::FloatType)
                                                  : !value.empty() && !value.at(0).is_number_integer();
  if (!of_floats) return constant(c10::List<int64_t>(c10::ArrayRef<int64_t>(value.get<std::vector<int64_t>>())));
  c10::List<double> list;
  for (const json& one : value) list.push_back(float_of(one));
  return constant(std::move(list));
}

Argument truths(const Place& /*place*/, const json& value) {
  c10::List<bool> list;
  for (const json& one : value) list.push_back(one.get<bool>());
  return constant(std::move(list));
}

// The device of the export is the model's when it runs; another one was named in Python.
Argument device(const Place& place, const json& value) {
  const auto type = value.at("type").get<std::string>();
  const std::string bare = type.substr(0, type.find(':'));
  if (bare == place.context.device_type || bare != "cpu") return {.kind = Argument::Kind::kDevice};
  return constant(at::Device(at::kCPU));
}

Argument text(const Place& place, const json& value) {
  // A device may be written as text where the schema has one.
  return place.wants(c10::TypeKind::DeviceObjType) ? device(place, {{"type", value}})
                                                   : constant(value.get<std::string>());
}
Argument texts(const Place& /*place*/, const json& value) {
  c10::List<std::string> list;
  for (const json& one : value) list.push_back(one.get<std::string>());
  return constant(std::move(list));
}

Argument complex(const Place& /*place*/, const json& value) {
  return constant(c10::complex<double>(float_of(value.at("real")), float_of(value.at("imag"))));
}

c10::IValue number(const json& value) {
  if (value.contains("as_int")) return value.at("as_int").get<int64_t>();
  if (value.contains("as_bool")) return value.at("as_bool").get<bool>();
  return float_of(value.at("as_float"));
}

Argument::Kind list_kind(const Place& place) {
  return is_kind(place.element, c10::TypeKind::FloatType) ? Argument::Kind::kFloats : Argument::Kind::kInts;
}

// A number that a node has computed, or a constant.
Argument size(const Place& place, const json& value) {
  if (!value.contains("as_name")) return scalar(place, number(value));
  const int slot = place.context.slot(text_of(value.at("as_name")));
  if (place.wants(c10::TypeKind::TensorType)) return {.kind = Argument::Kind::kWrappedNumber, .slots = {slot}};
  if (place.element == nullptr) return {.kind = Argument::Kind::kSlot, .slots = {slot}};
  return {.kind = list_kind(place), .slots = {slot}, .values = {{}}};
}

Argument sizes(const Place& place, const json& value) {
  Argument result{.kind = list_kind(place)};
  for (const json& one : value) {
    const bool computed = one.contains("as_name");
    result.slots.push_back(computed ? place.context.slot(text_of(one.at("as_name"))) : -1);
    result.values.emplace_back(computed ? c10::IValue() : number(one));
  }
  return result;
}

Argument scalar_type(const Place& /*place*/, const json& value) {
  return constant(static_cast<int64_t>(scalar_type_of(value.get<int64_t>())));
}
Argument layout(const Place& /*place*/, const json& value) {
  return constant(static_cast<int64_t>(layout_of(value.get<int64_t>())));
}
Argument memory_format(const Place& /*place*/, const json& value) {
  return constant(static_cast<int64_t>(memory_format_of(value.get<int64_t>())));
}

Argument graph(const Place& place, const json& value) {
  return {.kind = Argument::Kind::kGraph, .graph = place.context.graph(value.at("graph"))};
}

Argument read(std::string_view kind, const Place& place, const json& value) {
  using Read = Argument (*)(const Place&, const json&);
  static const std::unordered_map<std::string_view, Read> kReads = {
      {"as_none", none},
      {"as_tensor", tensor},
      {"as_tensors", tensors},
      {"as_optional_tensor", optional_tensor},
      {"as_optional_tensors", tensors},
      {"as_int", whole},
      {"as_ints", numbers},
      {"as_float", real},
      {"as_floats", numbers},
      {"as_bool", truth},
      {"as_bools", truths},
      {"as_string", text},
      {"as_strings", texts},
      {"as_complex", complex},
      {"as_sym_int", size},
      {"as_sym_float", size},
      {"as_sym_bool", size},
      {"as_sym_ints", sizes},
      {"as_sym_floats", sizes},
      {"as_scalar_type", scalar_type},
      {"as_layout", layout},
      {"as_memory_format", memory_format},
      {"as_device", device},
      {"as_graph", graph},
  };
  const auto found = kReads.find(kind);
  require<IoError>(found != kReads.end(), "an argument of the kind \"", lazy([&] { return shown_text(kind); }),
                   "\" cannot be run");
  return found->second(place, value);
}

}  // namespace

Argument read_argument(const json& argument, const ArgumentContext& context, const c10::Type* type) {
  require<IoError>(argument.is_object() && argument.size() == 1,
                   "an argument has to be an object with one kind, found ",
                   lazy([&] { return shown_text(argument.dump()); }));
  const c10::Type* const bare = bare_type(type);
  const Place place{.context = context, .type = bare, .element = bare_type(element_type(bare))};
  return read(argument.begin().key(), place, argument.begin().value());
}

}  // namespace ds::exported
