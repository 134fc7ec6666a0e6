#include "launcher/processes/exit_cause.h"

#include <sys/wait.h>

#include <csignal>
#include <cstring>

#include "core/text.h"

namespace ds::launcher {
namespace {

const char* signal_meaning(int signal) {
  switch (signal) {
    case SIGSEGV:
      return "segmentation fault: the program touched memory it does not own";
    case SIGBUS:
      return "bus error: memory behind a mapping is gone, often because /dev/shm or a disk is full";
    case SIGABRT:
      return "abort: an uncaught exception, a failed assertion or a damaged heap";
    case SIGILL:
      return "illegal instruction: built for another processor";
    case SIGFPE:
      return "arithmetic error: an integer division by zero";
    case SIGKILL:
      return "killed at once, without a chance to say why";
    case SIGTERM:
      return "asked to end";
    case SIGPIPE:
      return "wrote to a pipe or socket that nobody reads";
    default:
      return sigdescr_np(signal);  // null for real-time signals
  }
}

}  // namespace

std::string signal_words(int signal) {
  const char* name = sigabbrev_np(signal);
  const char* meaning = signal_meaning(signal);
  if (name == nullptr || meaning == nullptr) return cat("signal ", signal);
  return cat("SIG", name, " (", meaning, ")");
}

std::string exit_words(int status) {
  if (WIFSIGNALED(status)) {
    return cat("killed by ", signal_words(WTERMSIG(status)), WCOREDUMP(status) ? ", core dumped" : "");
  }
  const int code = WEXITSTATUS(status);
  if (code > 128 && sigabbrev_np(code - 128) != nullptr) {
    return cat("exit code ", code, ", which a shell gives for ", signal_words(code - 128));
  }
  return cat("exit code ", code);
}

int exit_code_of(int status) { return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status); }

}  // namespace ds::launcher
