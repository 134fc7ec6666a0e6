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
#include "core/json/near_miss.h"

namespace ds {

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
    field_if(key, out, wanted_within(out, range), [&range](const nlohmann::ordered_json& json, const T& value) {
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
    if (!reading() && !out) return put(key.name, "auto");
    if constexpr (std::is_arithmetic_v<T>) {
      field(key, out, range);
    } else {
      field(key, out);
    }
  }
  // Describes a string, or optional string, out of a few.
  template <class T>
  void choice(const JsonKey& key, T& out, const std::vector<std::string>& choices) {
    field_if(key, out, "one of " + joined(choices), [&choices](const nlohmann::ordered_json& json, const T&) {
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
  void section(const JsonKey& key, S& out, void (*describe)(JsonFields&, S&), UnknownKeys unknown) {
    if (!reading()) {
      JsonFields inner((*out_)[key.name]);
      describe(inner, out);
    } else if (const nlohmann::ordered_json* object = find_object(key, [&] { return shape_of(out, describe); })) {
      JsonFields inner(*reading_, pointer_to(key.name), *object, unknown != UnknownKeys::kRefuse);
      describe(inner, out);
      inner.finish(unknown);
    }
  }
  // Describes a nested object that is present only where the document has it.
  template <class S>
  void section(const JsonKey& key, std::optional<S>& out, void (*describe)(JsonFields&, S&), UnknownKeys unknown) {
    if (!reading()) {
      put(key.name, nullptr);
      if (!out) return;
    } else if (has_object(key)) {
      out.emplace();
    }
    S unused;
    section(key, out ? *out : unused, describe, unknown);
  }

  // Declares keys that something else reads.
  void ignore(const std::string& key) { known_.push_back(key); }
  // The value of a key, null pointer when absent, "auto" or unreadable. Declares the key.
  const nlohmann::ordered_json* find(const JsonKey& key);
  // The value of a key that something else declares, null pointer when absent, "auto" or unreadable.
  const nlohmann::ordered_json* peek(const std::string& key) const;
  bool has(const std::string& key) const { return reading() && object_->contains(key); }

  void error(const std::string& key, const std::string& message) const;
  void warning(const std::string& key, const std::string& message) const;
  // Makes messages on unknown keys name the known ones.
  void list_known_keys() { lists_known_keys_ = true; }
  // Deals with the keys that no call above has named.
  void finish(UnknownKeys unknown);

  std::string pointer_to(const std::string& key) const;
  const std::vector<std::string>& known() const { return known_; }

 private:
  template <class T, class Accepts>
  void field_if(const JsonKey& key, T& out, const std::string& rule, Accepts accepts) {
    if (!reading()) return put(key.name, to_ordered_json(out));
    nlohmann::ordered_json value;
    if (!fetch(key, to_ordered_json(out), null_allowed(out), value)) return;
    T converted = out;
    if (convert(value, converted) && accepts(value, converted)) {
      out = std::move(converted);
    } else {
      wrong(key, value, rule);
    }
  }
  // "an integer > 0 or null"
  template <class T>
  static std::string wanted_within(const T& value, const JsonRange& range) {
    return wanted(value) + range.in_words();
  }
  template <class T>
  static std::string wanted_within(const std::optional<T>&, const JsonRange& range) {
    return wanted(T{}) + range.in_words() + " or null";
  }
  template <class T>
  static bool null_allowed(const T&) {
    return std::is_same_v<T, nlohmann::ordered_json> || requires(T t) { t.reset(); };
  }
  // "a", "b", "c"
  static std::string joined(const std::vector<std::string>& choices);

  void put(const std::string& key, nlohmann::ordered_json value);
  // Reads the value to convert, with "auto" replaced; returns whether there is one.
  bool fetch(const JsonKey& key, const nlohmann::ordered_json& fallback, bool null_allowed,
             nlohmann::ordered_json& value);
  // The spelling the document uses; empty: absent. Both spellings are an error.
  std::string spelling(const JsonKey& key);
  bool has_object(const JsonKey& key);
  // `shape`: what the object could be like, for a message. Then the config is refused, so that `section` may change.
  const nlohmann::ordered_json* find_object(const JsonKey& key, const std::function<nlohmann::ordered_json()>& shape);
  template <class S>
  static nlohmann::ordered_json shape_of(S& section, void (*describe)(JsonFields&, S&)) {
    nlohmann::ordered_json keys;
    JsonFields writer(keys);
    describe(writer, section);
    return keys;
  }
  void wrong(const JsonKey& key, const nlohmann::ordered_json& value, const std::string& rule);
  void report_unknown(const std::string& key, UnknownKeys unknown, const NearMisses& near);

  const JsonReading* reading_ = nullptr;
  nlohmann::ordered_json* out_ = nullptr;
  const nlohmann::ordered_json* object_ = nullptr;
  std::string pointer_;
  bool null_is_absent_ = false;
  bool lists_known_keys_ = false;
  std::vector<std::string> known_;
};

}  // namespace ds
