// Flags that take numbers, for CLI11: written as people type them (4096, 1e9, 0.5), within limits that a refusal names.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>

#include "core/number_text.h"
#include "core/shown_text.h"
#include "core/text.h"

namespace ds {

// A whole number within limits, for CLI::Option::transform(): CLI11 itself reads digits alone.
inline CLI::Validator whole_number(int64_t least, int64_t most) {
  return {[least, most](std::string& text) -> std::string {
            const auto number = parse_whole_number(text);
            if (!number || *number < least || *number > most) {
              return cat("expected a whole number from ", least, " to ", most, ", found ", shown_text(text));
            }
            text = std::to_string(*number);
            return "";
          },
          ""};
}

// A finite number with a lower limit, for CLI::Option::check(). `above`: `least` itself is too small.
inline CLI::Validator real_number(double least, bool above = false) {
  return {[least, above](std::string& text) -> std::string {
            const auto number = parse_finite_number(text);
            if (number && (above ? *number > least : *number >= least)) return "";
            return cat("expected a number ", above ? "above " : "of at least ", least, ", found ", shown_text(text));
          },
          ""};
}

}  // namespace ds
