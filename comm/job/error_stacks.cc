#include "comm/job/error_stacks.h"

#include <c10/util/Logging.h>

#include <cstdlib>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>

namespace ds::engine {

void hide_error_stacks() {
  static std::once_flag once;
  std::call_once(once, [] {
    const char* const asked = std::getenv("TORCH_SHOW_CPP_STACKTRACES");
    if (asked != nullptr && std::string_view(asked) == "1") return;
    c10::SetStackTraceFetcher(std::function<std::string()>([] { return std::string(); }));
  });
}

}  // namespace ds::engine
