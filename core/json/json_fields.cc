#include "core/json/json_fields.h"

#include <unordered_set>

namespace ds {

using nlohmann::ordered_json;

namespace {

constexpr const char* kAuto = "auto";

std::string number_in_words(double value) {
  return ordered_json(value) == static_cast<int64_t>(value) ? cat(static_cast<int64_t>(value)) : cat(value);
}

}  // namespace

bool JsonRange::accepts(double value) const {
  if (minimum && (open_minimum ? value <= *minimum : value < *minimum)) return false;
  return !maximum || (open_maximum ? value < *maximum : value <= *maximum);
}

std::string JsonRange::in_words() const {
  std::string text;
  if (minimum) text += cat(open_minimum ? " > " : " >= ", number_in_words(*minimum));
  if (maximum) text += cat(minimum ? " and" : "", open_maximum ? " < " : " <= ", number_in_words(*maximum));
  return text;
}

JsonFields::JsonFields(const JsonReading& reading, std::string pointer, const ordered_json& object, bool null_is_absent)
    : reading_(&reading), object_(&object), pointer_(std::move(pointer)), null_is_absent_(null_is_absent) {}

JsonFields::JsonFields(ordered_json& out) : out_(&out) { *out_ = ordered_json::object(); }

std::string JsonFields::joined(const std::vector<std::string>& choices) {
  std::string text;
  for (const std::string& choice : choices) text += cat(text.empty() ? "\"" : ", \"", choice, "\"");
  return text;
}

std::string JsonFields::pointer_to(const std::string& key) const {
  std::string escaped;
  for (const char c : key) escaped += c == '~' ? "~0" : c == '/' ? "~1" : std::string(1, c);
  return pointer_ + "/" + escaped;
}

void JsonFields::put(const std::string& key, ordered_json value) { (*out_)[key] = std::move(value); }

std::string JsonFields::spelling(const JsonKey& key) {
  known_.push_back(key.name);
  if (key.alias.empty()) return object_->contains(key.name) ? key.name : "";
  known_.push_back(key.alias);
  const bool by_alias = object_->contains(key.alias);
  if (!object_->contains(key.name)) return by_alias ? key.alias : "";
  if (by_alias) error(key.alias, cat("is another name of \"", key.name, "\", which is given too; remove one of them"));
  return key.name;
}

bool JsonFields::fetch(const JsonKey& key, const ordered_json& fallback, bool null_allowed, ordered_json& value) {
  const std::string spelled = spelling(key);
  if (spelled.empty()) return false;
  value = (*object_)[spelled];
  if (value == kAuto) {
    const std::string pointer = pointer_to(spelled);
    const auto chosen = reading_->auto_value ? reading_->auto_value(pointer) : std::nullopt;
    if (reading_->on_auto) {
      reading_->on_auto(pointer, chosen ? chosen->value : fallback, chosen ? chosen->source : "default");
    }
    if (!chosen) return false;
    value = chosen->value;
  }
  return !value.is_null() || null_allowed || !null_is_absent_;
}

const ordered_json* JsonFields::find(const JsonKey& key) {
  if (!reading()) return nullptr;
  const std::string spelled = spelling(key);
  if (spelled.empty() || (*object_)[spelled] == kAuto) return nullptr;
  return &(*object_)[spelled];
}

const ordered_json* JsonFields::peek(const std::string& key) const {
  if (!has(key) || (*object_)[key] == kAuto) return nullptr;
  return &(*object_)[key];
}

bool JsonFields::has_object(const JsonKey& key) {
  return (object_->contains(key.name) && (*object_)[key.name].is_object()) ||
         (!key.alias.empty() && object_->contains(key.alias) && (*object_)[key.alias].is_object());
}

const ordered_json* JsonFields::find_object(const JsonKey& key, const std::function<ordered_json()>& shape) {
  const ordered_json* value = find(key);
  if (value == nullptr || value->is_null()) return nullptr;
  if (value->is_object()) return value;
  // "fp16": true and "optimizer": "Adam" are what people write.
  const ordered_json keys = shape();
  const char* const inner = value->is_boolean() ? "enabled" : value->is_string() ? "type" : "";
  const bool fits = keys.contains(inner);
  wrong(key, *value, cat("an object {...}", fits ? cat(", as in {\"", inner, "\": ", shown(*value), "}") : ""));
  return nullptr;
}

void JsonFields::wrong(const JsonKey& key, const ordered_json& value, const std::string& rule) {
  const std::string& spelled = object_->contains(key.name) ? key.name : key.alias;
  error(spelled, cat("expected ", rule, ", found ", shown(value)));
}

void JsonFields::error(const std::string& key, const std::string& message) const {
  reading_->problems.error(pointer_to(key), message);
}

void JsonFields::warning(const std::string& key, const std::string& message) const {
  reading_->problems.warning(pointer_to(key), message);
}

void JsonFields::finish(UnknownKeys unknown) {
  const std::unordered_set<std::string> known(known_.begin(), known_.end());
  std::optional<NearMisses> near;
  for (const auto& [key, value] : object_->items()) {
    if (known.contains(key)) continue;
    if (!near) near.emplace(known_);
    report_unknown(key, unknown, *near);
  }
}

void JsonFields::report_unknown(const std::string& key, UnknownKeys unknown, const NearMisses& near) {
  if (const auto meant = near.of(key)) return error(key, cat("unknown key; did you mean ", *meant, "?"));
  const std::string meaning = reading_->meaning ? reading_->meaning(pointer_to(key)) : "";
  const std::string advice = meaning.empty() ? "" : cat("; ", meaning);
  if (unknown == UnknownKeys::kRefuse || reading_->strict) {
    error(key, cat("unknown key", pointer_.empty() ? "" : cat(" in ", dotted_path(pointer_)),
                   !advice.empty()     ? advice
                   : lists_known_keys_ ? cat("; known are ", joined(known_))
                                       : "; remove it or correct its name"));
  } else if (unknown == UnknownKeys::kWarn || !meaning.empty()) {
    warning(key, cat("unknown key, ignored", advice));
  }
}

}  // namespace ds
