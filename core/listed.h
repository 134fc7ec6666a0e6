// Lists of names or numbers in messages, cut where they would hide what is said about them. Torch-free.
#pragma once

#include <cstddef>
#include <sstream>
#include <string>
#include <utility>

#include "core/text.h"

namespace ds {

// Joins the first `most` items with commas and says how many more there are: "a, b and 3 more". `items`: a container of
// anything that has operator<<.
template <class Items>
std::string listed(const Items& items, size_t most) {
  auto out = classic_stream<std::ostringstream>();
  size_t count = 0;
  for (const auto& item : items) {
    if (count < most) out << (count == 0 ? "" : ", ") << item;
    ++count;
  }
  if (count > most) out << " and " << count - most << " more";
  return std::move(out).str();
}

}  // namespace ds
