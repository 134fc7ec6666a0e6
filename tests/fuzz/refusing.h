// What a reader may do with bytes that are none of its own.
#pragma once

#include <cstddef>
#include <string_view>

#include "core/check.h"

namespace ds::fuzz {

// Runs what may refuse its input. A refusal says in some words what is wrong; anything else that is thrown is a defect.
template <class Read>
void refusing(const Read& read) {
  try {
    read();
  } catch (const InternalError&) {
    throw;  // a defect of ours
  } catch (const Error& error) {
    // A message that is empty or endless would be a defect, too.
    constexpr size_t kLongest = size_t{1} << 20;
    const std::string_view text = error.what();
    ensure(!text.empty() && text.size() < kLongest, "a refusal says in some words what is wrong");
  }
}

}  // namespace ds::fuzz
