// One description of a struct's JSON fields, for reading and for writing. Torch-free.
//
//   void describe(JsonFields& json, Fp16Section& s) {
//     json.field("enabled", s.enabled);
//     json.field("loss_scale", s.loss_scale, at_least(0));
//   }
//
// Reading checks types and rules leniently (core/json/json_convert.h), replaces "auto", resolves aliases and finds
// unknown keys; every mistake goes to JsonProblems, none stops it, and a field that is absent or wrong keeps its
// default. Writing puts every field with its value.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/json/json_convert.h"
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

// Reads the fields of one object, or writes them.
class JsonFields {
 public:
  // Reads the object at `pointer`. `reading` outlives it. `null_is_absent`: null means the default for every field.
  JsonFields(const JsonReading& reading, std::string pointer, const nlohmann::ordered_json& object,
             bool null_is_absent);
  // Writes into `out`, which becomes an object.
  explicit JsonFields(nlohmann::ordered_json& out);

  bool reading() const { return reading_ != nullptr; }

  template <class T>
  void field(const JsonKey& key, T& out) {
    field_if(key, out, wanted(out), [](const nlohmann::ordered_json&, const T&) { return true; });
  }
  // Describes a number within a range: int64_t, double, or an optional of them.
  template <class T>
  void field(const JsonKey& key, T& out, const JsonRange& range) {
    field_if(key, out, wanted(out, range.in_words()), [&range](const nlohmann::ordered_json& json, const T& value) {
      if (json.is_boolean() && !range.booleans) return false;
      if constexpr (requires { value.has_value(); }) {
        return !value.has_value() || range.accepts(static_cast<double>(*value));
      } else {
        return range.accepts(static_cast<double>(value));
      }
    });
  }
  // Describes an optional whose absence is written "auto".
  template <class T>
  void field_or_auto(const JsonKey& key, std::optional<T>& out, const JsonRange& range = {}) {
    if (!reading() && !out) return write(key, kJsonAuto);
    if constexpr (std::is_arithmetic_v<T>) {
      field(key, out, range);
    } else {
      field(key, out);
    }
  }
  // Describes a string, or optional string, out of a few.
  template <class T>
  void choice(const JsonKey& key, T& out, const std::vector<std::string>& choices) {
    field_if(key, out, "one of " + quoted_list(choices), [&choices](const nlohmann::ordered_json& json, const T&) {
      if (json.is_null()) return true;
      for (const std::string& known : choices) {
        if (json == known) return true;
      }
      return false;
    });
  }
  // Describes an enumerator, or an optional one, by its name.
  template <class E>
  using Names = EnumNames<E>;
  template <class E>
  void enumerator(const JsonKey& key, E& out, const Names<E>& names) {
    std::optional<std::string> name = enum_name(names, out);
    std::string text = name.value_or("");
    choice(key, text, enum_names(names));
    for (const auto& [known, value] : names) {
      if (known == text) out = value;
    }
  }
  template <class E>
  void enumerator(const JsonKey& key, std::optional<E>& out, const Names<E>& names) {
    std::optional<std::string> text;
    if (out) text = enum_name(names, *out);
    choice(key, text, enum_names(names));
    if (!text) out.reset();
    for (const auto& [known, value] : names) {
      if (text == known) out = value;
    }
  }

  // Describes a nested object. In reading, "auto" and (where null_is_absent) null leave the defaults.
  template <class S>
  void section(const JsonKey& key, S& out, void (*describe)(JsonFields&, S&), UnknownKeys unknown);
  // Describes a nested object that is present only where the document has it.
  template <class S>
  void section(const JsonKey& key, std::optional<S>& out, void (*describe)(JsonFields&, S&), UnknownKeys unknown) {
    if (!reading()) {
      write(key, nullptr);
      if (!out) return;
    } else if (keys_.has_object(key)) {
      out.emplace();
    }
    S unused;
    section(key, out ? *out : unused, describe, unknown);
  }

  // The keys of the object that is read; none in writing.
  ObjectKeys& keys() { return keys_; }
  // Declares a key and returns its value, a null pointer when it is absent, "auto" or not read.
  const nlohmann::ordered_json* find(const JsonKey& key);

  void error(const std::string& key, const std::string& message) const;
  void warning(const std::string& key, const std::string& message) const;
  // Reports the keys of the object that were not declared.
  void finish(UnknownKeys unknown) const;

 private:
  // Reads a field whose value `accepts` passes, or reports that `rule` was expected; or writes it.
  template <class T, class Accepts>
  void field_if(const JsonKey& key, T& out, const std::string& rule, Accepts accepts) {
    if (!reading()) return write(key, to_ordered_json(out));
    nlohmann::ordered_json value;
    if (!fetch(key, to_ordered_json(out), kTakesNull<T>, value)) return;
    T converted = out;
    if (convert(value, converted) && accepts(value, converted)) {
      out = std::move(converted);
    } else {
      wrong(key, value, rule);
    }
  }
  void write(const JsonKey& key, nlohmann::ordered_json value) { (*out_)[key.name] = std::move(value); }
  // Reads the value to convert, with "auto" replaced; returns whether there is one.
  bool fetch(const JsonKey& key, const nlohmann::ordered_json& fallback, bool null_allowed,
             nlohmann::ordered_json& value);
  // Declares the key and returns the spelling that the object has; empty: absent. Both spellings are an error.
  std::string declare(const JsonKey& key);
  // Declares a key and returns its object, a null pointer when it is absent, "auto" or null. Reports another value,
  // with advice from `shape`, which writes the object with the fields as they are.
  const nlohmann::ordered_json* find_object(const JsonKey& key, const std::function<nlohmann::ordered_json()>& shape);
  void wrong(const JsonKey& key, const nlohmann::ordered_json& value, const std::string& rule) const;

  const JsonReading* reading_ = nullptr;
  nlohmann::ordered_json* out_ = nullptr;
  ObjectKeys keys_;
  std::string pointer_;
  bool null_is_absent_ = false;
};

// Returns the object that `describe` writes for `fields`.
template <class S>
nlohmann::ordered_json write_fields(S& fields, void (*describe)(JsonFields&, S&)) {
  nlohmann::ordered_json out;
  JsonFields json(out);
  describe(json, fields);
  return out;
}

template <class S>
void JsonFields::section(const JsonKey& key, S& out, void (*describe)(JsonFields&, S&), UnknownKeys unknown) {
  if (!reading()) return write(key, write_fields(out, describe));
  const nlohmann::ordered_json* const object = find_object(key, [&] { return write_fields(out, describe); });
  if (object == nullptr) return;
  const bool refuses = unknown == UnknownKeys::kRefuse || unknown == UnknownKeys::kRefuseAndList;
  JsonFields inner(*reading_, pointer_to_member(pointer_, key.name), *object, /*null_is_absent=*/!refuses);
  describe(inner, out);
  inner.finish(unknown);
}

}  // namespace ds
