// What ds-launch says itself: lines on standard error that start with "ds-launch: ".
#pragma once

#include "core/text.h"
#include "launcher/console.h"
#include "launcher/options.h"

namespace ds::launcher {

class Notices {
 public:
  Notices(Console& console, Verbosity verbosity) : console_(console), verbosity_(verbosity) {}

  template <class... Parts>
  void say(Verbosity level, const Parts&... parts) {
    if (level <= verbosity_) console_.line(Console::kErr, cat("ds-launch: ", parts...));
  }
  template <class... Parts>
  void error(const Parts&... parts) {
    say(Verbosity::kError, parts...);
  }
  template <class... Parts>
  void warning(const Parts&... parts) {
    say(Verbosity::kWarning, parts...);
  }
  template <class... Parts>
  void info(const Parts&... parts) {
    say(Verbosity::kInfo, parts...);
  }
  template <class... Parts>
  void debug(const Parts&... parts) {
    say(Verbosity::kDebug, parts...);
  }

  void plain(std::string_view line) { console_.line(Console::kErr, line); }

 private:
  Console& console_;
  Verbosity verbosity_;
};

}  // namespace ds::launcher
