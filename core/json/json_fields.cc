#include "core/json/json_fields.h"

#include <unordered_set>

#include "core/json/near_miss.h"
#include "core/text.h"

namespace ds {
using nlohmann::ordered_json;

namespace {

std::string number_in_words(double value) {
  return ordered_json(value) == static_cast<int64_t>(value) ? cat(static_cast<int64_t>(value)) : cat(value);
}

}  // namespace

bool ObjectKeys::has_object(const JsonKey& key) const {
  return (has(key.name) && at(key.name).is_object()) ||
         (!key.alias.empty() && has(key.alias) && at(key.alias).is_object());
}

const ordered_json* ObjectKeys::peek(const std::string& key) const {
  return has(key) && at(key) != kJsonAuto ? &at(key) : nullptr;
}

std::string ObjectKeys::spelling(const JsonKey& key) const {
  if (has(key.name)) return key.name;
  return !key.alias.empty() && has(key.alias) ? key.alias : "";
}

void ObjectKeys::declare(const JsonKey& key) {
  declared_.push_back(key.name);
  if (!key.alias.empty()) declared_.push_back(key.alias);
}

std::vector<std::string> ObjectKeys::undeclared() const {
  std::vector<std::string> keys;
  if (object_ == nullptr) return keys;
  const std::unordered_set<std::string> known(declared_.begin(), declared_.end());
  for (const auto& [key, value] : object_->items()) {
    if (!known.contains(key)) keys.push_back(key);
  }
  return keys;
}

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
    : reading_(&reading), keys_(object), pointer_(std::move(pointer)), null_is_absent_(null_is_absent) {}

JsonFields::JsonFields(ordered_json& out) : out_(&out) { *out_ = ordered_json::object(); }

std::string JsonFields::declare(const JsonKey& key) {
  keys_.declare(key);
  const std::string spelled = keys_.spelling(key);
  if (spelled == key.name && !key.alias.empty() && keys_.has(key.alias)) {
    error(key.alias, cat("is another name of \"", key.name, "\", which is given too; remove one of them"));
  }
  return spelled;
}

bool JsonFields::fetch(const JsonKey& key, const ordered_json& fallback, bool null_allowed, ordered_json& value) {
  const std::string spelled = declare(key);
  if (spelled.empty()) return false;
  value = keys_.at(spelled);
  if (value == kJsonAuto) {
    const std::string pointer = pointer_to_member(pointer_, spelled);
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
  const std::string spelled = declare(key);
  return spelled.empty() ? nullptr : keys_.peek(spelled);
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

void JsonFields::wrong(const JsonKey& key, const ordered_json& value, const std::string& rule) const {
  error(keys_.spelling(key), cat("expected ", rule, ", found ", shown(value)));
}

void JsonFields::error(const std::string& key, const std::string& message) const {
  reading_->problems.error(pointer_to_member(pointer_, key), message);
}

void JsonFields::warning(const std::string& key, const std::string& message) const {
  reading_->problems.warning(pointer_to_member(pointer_, key), message);
}

void JsonFields::finish(UnknownKeys unknown) const {
  const std::vector<std::string> undeclared = keys_.undeclared();
  if (undeclared.empty()) return;
  const NearMisses near(keys_.declared());
  const bool lists = unknown == UnknownKeys::kRefuseAndList;
  const bool refuses = lists || unknown == UnknownKeys::kRefuse || reading_->strict;
  for (const std::string& key : undeclared) {
    if (const auto meant = near.of(key)) {
      error(key, cat("unknown key; did you mean ", *meant, "?"));
      continue;
    }
    const std::string meaning = reading_->meaning ? reading_->meaning(pointer_to_member(pointer_, key)) : "";
    const std::string advice = meaning.empty() ? "" : cat("; ", meaning);
    if (refuses) {
      error(key, cat("unknown key", pointer_.empty() ? "" : cat(" in ", dotted_path(pointer_)),
                     !advice.empty() ? advice
                     : lists         ? cat("; known are ", quoted_list(keys_.declared()))
                                     : "; remove it or correct its name"));
    } else if (unknown == UnknownKeys::kWarn || !meaning.empty()) {
      warning(key, cat("unknown key, ignored", advice));
    }
  }
}

}  // namespace ds
