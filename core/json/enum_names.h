// Enumerators and the names they have in JSON. Torch-free.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace ds {

template <class E>
using EnumNames = std::vector<std::pair<std::string, E>>;

// Nothing for an enumerator that has none.
template <class E>
std::optional<std::string> enum_name(const std::vector<std::pair<std::string, E>>& names, E wanted) {
  for (const auto& [name, value] : names) {
    if (value == wanted) return name;
  }
  return std::nullopt;
}

template <class E>
std::vector<std::string> enum_names(const std::vector<std::pair<std::string, E>>& names) {
  std::vector<std::string> all;
  for (const auto& entry : names) all.push_back(entry.first);
  return all;
}

}  // namespace ds
