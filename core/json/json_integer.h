// Integers of JSON from elsewhere. Torch-free.
#pragma once

#include <concepts>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "core/text.h"

namespace ds {

// The value as a T. Throws json::type_error for what is no integer, or none of that type: nlohmann's get() converts
// 1e300, whose value as an integer is undefined, and cuts numbers off.
template <std::integral T>
T json_integer(const nlohmann::json& value) {
  const bool fits = value.is_number_unsigned() ? std::in_range<T>(value.get<uint64_t>())
                                               : value.is_number_integer() && std::in_range<T>(value.get<int64_t>());
  if (!fits) throw nlohmann::json::type_error::create(302, cat("expected an integer, found ", value), &value);
  return value.is_number_unsigned() ? static_cast<T>(value.get<uint64_t>()) : static_cast<T>(value.get<int64_t>());
}

// A list of them.
template <std::integral T>
std::vector<T> json_integers(const nlohmann::json& value) {
  if (!value.is_array()) throw nlohmann::json::type_error::create(302, cat("expected a list, found ", value), &value);
  std::vector<T> integers;
  for (const nlohmann::json& item : value) integers.push_back(json_integer<T>(item));
  return integers;
}

}  // namespace ds
