// The locale of a program with windows, for the time of a scope, without locales that are installed.
#pragma once

#include <locale>
#include <string>

namespace ds::test {

// A std::locale::global() with a decimal comma, groups of digits ("1.032") and letters as in Turkish, where the small
// letter of I is no i. Functions of the C library do not follow it: tests/porting/locales.py has those.
class GroupedLocale {
 public:
  GroupedLocale() : before_(std::locale::global(made())) {}
  ~GroupedLocale() { std::locale::global(before_); }
  GroupedLocale(const GroupedLocale&) = delete;
  GroupedLocale& operator=(const GroupedLocale&) = delete;

 private:
  struct Digits final : std::numpunct<char> {
    char do_decimal_point() const override { return ','; }
    char do_thousands_sep() const override { return '.'; }
    std::string do_grouping() const override { return "\3"; }
  };
  struct Letters final : std::ctype<char> {
    char do_tolower(char c) const override { return c == 'I' ? c : std::ctype<char>::do_tolower(c); }
    char do_toupper(char c) const override { return c == 'i' ? c : std::ctype<char>::do_toupper(c); }
  };

  static std::locale made() { return {std::locale(std::locale::classic(), new Digits), new Letters}; }

  std::locale before_;
};

}  // namespace ds::test
