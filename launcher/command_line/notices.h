// Messages of ds-launch itself: lines on standard error that start with "ds-launch: ".
#pragma once

#include "core/text.h"
#include "launcher/command_line/console.h"
#include "launcher/command_line/options.h"

namespace ds::launcher {

class Notices {
 public:
  // `host`: where this ds-launch runs, when it is one of many.
  Notices(Console& console, Verbosity verbosity, const std::string& host = "")
      : console_(console),
        verbosity_(verbosity),
        speaker_(host.empty() ? "ds-launch: " : cat("ds-launch on ", host, ": ")) {}

  template <class... Parts>
  void say(Verbosity level, const Parts&... parts) {
    if (level <= verbosity_) console_.line(Console::kErr, cat(speaker_, parts...));
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
  std::string speaker_;
};

}  // namespace ds::launcher
