#include "core/write_signals.h"

#include <csignal>
#include <cstdlib>
#include <string_view>

namespace ds {

void let_writes_fail(std::initializer_list<int> signals) {
  const char* const wanted = std::getenv("DS_WRITE_SIGNALS");
  if (wanted != nullptr && std::string_view(wanted) == "0") return;
  for (const int number : signals) {
    struct sigaction action {};
    if (sigaction(number, nullptr, &action) != 0 || action.sa_handler != SIG_DFL) continue;
    action.sa_handler = [](int) {};
    action.sa_flags = SA_RESTART;
    sigaction(number, &action, nullptr);
  }
}

}  // namespace ds
