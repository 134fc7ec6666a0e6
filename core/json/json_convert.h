// Conversions from a JSON value to a C++ one, as leniently as pydantic (which checks DeepSpeed's configs) in its lax
// mode, and back. Torch-free.
#pragma once

#include <array>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

namespace ds {

// Each convert() sets `out` and returns true, or leaves it and returns false. A bool is true, false, 0, 1, "true",
// "yes", "on", "t", "y", "1" and their opposites in any case.
bool convert(const nlohmann::ordered_json& value, bool& out);
// An integer is 5, 5e8, 5.0, "5", true; not 1.5, "5e8", null.
bool convert(const nlohmann::ordered_json& value, int64_t& out);
// A number is finite: 0.1, 1, "0.1", true.
bool convert(const nlohmann::ordered_json& value, double& out);
bool convert(const nlohmann::ordered_json& value, std::string& out);
bool convert(const nlohmann::ordered_json& value, nlohmann::ordered_json& out);

template <class T>
bool convert(const nlohmann::ordered_json& value, std::vector<T>& out) {
  if (!value.is_array()) return false;
  std::vector<T> items(value.size());
  for (size_t i = 0; i < items.size(); ++i) {
    if (!convert(value[i], items[i])) return false;
  }
  out = std::move(items);
  return true;
}

template <class T, size_t N>
bool convert(const nlohmann::ordered_json& value, std::array<T, N>& out) {
  std::vector<T> items;
  if (!convert(value, items) || items.size() != N) return false;
  std::copy(items.begin(), items.end(), out.begin());
  return true;
}

// An optional is emptied by null.
template <class T>
bool convert(const nlohmann::ordered_json& value, std::optional<T>& out) {
  if (value.is_null()) {
    out.reset();
    return true;
  }
  T item{};
  if (!convert(value, item)) return false;
  out = std::move(item);
  return true;
}

// The words for what convert() expects: "an integer".
inline std::string wanted(const bool&) { return "true or false"; }
inline std::string wanted(const int64_t&) { return "an integer"; }
inline std::string wanted(const double&) { return "a number"; }
inline std::string wanted(const std::string&) { return "a string"; }
inline std::string wanted(const nlohmann::ordered_json&) { return "a value"; }
template <class T>
std::string wanted(const std::vector<T>&) {
  return "a list, each item " + wanted(T{});
}
template <class T, size_t N>
std::string wanted(const std::array<T, N>&) {
  return "a list of " + std::to_string(N) + ", each " + wanted(T{});
}
template <class T>
std::string wanted(const std::optional<T>&) {
  return wanted(T{}) + " or null";
}

// The words with limits of the number in them: "an integer > 0 or null".
template <class T>
std::string wanted(const T& value, const std::string& limits) {
  return wanted(value) + limits;
}
template <class T>
std::string wanted(const std::optional<T>&, const std::string& limits) {
  return wanted(T{}) + limits + " or null";
}

// Whether null is a value for a T, which is then an optional or any JSON.
template <class T>
inline constexpr bool kTakesNull = std::is_same_v<T, nlohmann::ordered_json> || requires(T t) {
  t.reset();
};

template <class T>
nlohmann::ordered_json to_ordered_json(const T& value) {
  return value;
}
template <class T>
nlohmann::ordered_json to_ordered_json(const std::optional<T>& value) {
  return value ? to_ordered_json(*value) : nlohmann::ordered_json(nullptr);
}

// The value as a message shows it: shortened when it is long.
std::string shown(const nlohmann::ordered_json& value);
// The words as a message lists them: "a", "b", "c" with their quotes.
std::string quoted_list(const std::vector<std::string>& words);

}  // namespace ds
