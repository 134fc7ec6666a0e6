// The C locale of one thread, for code of others that asks the C library for the decimal point. Torch-free.
#pragma once

#include <locale.h>  // NOLINT(modernize-deprecated-headers): uselocale() is POSIX's

namespace ds {

// While it lives, functions of the C library that the calling thread calls follow the C locale, whatever setlocale()
// has chosen for the program: strtod, and the lexer of nlohmann::json, which asks localeconv() for the decimal point
// and takes its first byte alone (in fa_IR it has two). Other threads keep theirs. Its end stands in the thread of its
// beginning.
class ClassicScope {
 public:
  ClassicScope() : before_(uselocale(c_locale())) {}
  ~ClassicScope() { uselocale(before_); }
  ClassicScope(const ClassicScope&) = delete;
  ClassicScope& operator=(const ClassicScope&) = delete;

 private:
  // Made once and never freed: glibc has this locale at hand, and needs no memory for it.
  static locale_t c_locale() {
    static const locale_t kMade = newlocale(LC_ALL_MASK, "C", locale_t{});
    return kMade;
  }

  locale_t before_;
};

}  // namespace ds
