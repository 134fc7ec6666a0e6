#include "core/name_pattern.h"

#include <locale>
#include <utility>

namespace ds {
namespace {

bool matches_stars(std::string_view pattern, std::string_view name) {
  size_t at = 0;  // in the pattern
  size_t last_star = std::string_view::npos;
  size_t taken_to = 0;  // the end of the text that stands for the last star
  for (size_t i = 0; i < name.size();) {
    if (at < pattern.size() && pattern[at] == '*') {
      last_star = at++;
      taken_to = i;
    } else if (at < pattern.size() && pattern[at] == name[i]) {
      ++at;
      ++i;
    } else if (last_star != std::string_view::npos) {
      at = last_star + 1;
      i = ++taken_to;
    } else {
      return false;
    }
  }
  return pattern.find_first_not_of('*', at) == std::string_view::npos;
}

bool matches_regex(const std::regex& regex, const std::string& name, NamePart part) {
  if (part == NamePart::kWhole) return std::regex_match(name, regex);
  const auto flags =
      part == NamePart::kStart ? std::regex_constants::match_continuous : std::regex_constants::match_default;
  return std::regex_search(name, regex, flags);
}

}  // namespace

NamePattern NamePattern::stars(std::string text) {
  NamePattern result;
  result.stars_ = std::move(text);
  return result;
}

NamePattern NamePattern::numbers(const std::string& text) {
  std::string expression;
  for (const char& letter : text) expression += letter == '*' ? "\\d+" : regex_of_text({&letter, 1});
  return regex(expression);
}

NamePattern NamePattern::regex(const std::string& text, Letters letters) {
  auto flags = std::regex::ECMAScript;
  if (letters == Letters::kAnyCase) flags |= std::regex::icase;
  NamePattern result;
  result.regex_.emplace();
  result.regex_->imbue(std::locale::classic());  // whatever std::locale::global() says, before the text is compiled
  result.regex_->assign(text, flags);
  return result;
}

bool NamePattern::matches(const std::string& name, NamePart part) const {
  if (part == NamePart::kEnd) {
    if (matches(name)) return true;
    const size_t dot = name.find('.');
    return dot != std::string::npos && matches(name.substr(dot + 1), NamePart::kEnd);
  }
  if (regex_) return matches_regex(*regex_, name, part);
  const std::string before = part == NamePart::kAnywhere ? "*" : "";
  const std::string behind = part == NamePart::kWhole ? "" : "*";
  return matches_stars(before + stars_ + behind, name);
}

std::string regex_problem(const std::string& text) {
  try {
    NamePattern::regex(text);
  } catch (const std::regex_error& error) {
    return error.what();
  }
  return "";
}

std::string regex_of_text(std::string_view text) {
  constexpr std::string_view kSpecial = "\\^$.|?*+()[]{}/";
  std::string result;
  for (const char letter : text) {
    if (kSpecial.find(letter) != std::string_view::npos) result += '\\';
    result += letter;
  }
  return result;
}

}  // namespace ds
