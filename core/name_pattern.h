// Patterns that names of parameters, modules and layers are compared with. The dialect is the caller's to say: text
// with stars, or a regular expression.
#pragma once

#include <optional>
#include <regex>
#include <string>
#include <string_view>

namespace ds {

// The part of a name that a pattern has to match.
enum class NamePart {
  kWhole,
  kAnywhere,
  kStart,  // a part from the first letter on, as Python's re.match has it
  kEnd     // a part to the last letter, from the first letter or from behind a dot on
};

enum class Letters { kExact, kAnyCase };

// Copyable; thread safe once made.
class NamePattern {
 public:
  // "*" stands for any text, the empty one too; every other letter for itself.
  static NamePattern stars(std::string text);
  // "*" stands for a number ("layers.*.mlp"), every other letter for itself.
  static NamePattern numbers(const std::string& text);
  // ECMAScript, std::regex. Throws std::regex_error where regex_problem() has one.
  static NamePattern regex(const std::string& text, Letters letters = Letters::kExact);

  bool matches(const std::string& name, NamePart part = NamePart::kWhole) const;

 private:
  NamePattern() = default;

  std::string stars_;
  std::optional<std::regex> regex_;  // none: stars_
};

// The reason why the text is no regular expression; empty: it is one.
std::string regex_problem(const std::string& text);

// The regular expression that matches this text alone.
std::string regex_of_text(std::string_view text);

}  // namespace ds
