#include "tests/launcher/launched.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string_view>
#include <thread>

#include "core/text.h"

namespace ds::launcher::testing {
namespace {

// The test's environment without what a launcher, or the machine it runs on, may have put there.
std::vector<std::string> clean_environment() {
  std::vector<std::string> entries;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const std::string_view name = text.substr(0, text.find('='));
    if (name != "OMP_NUM_THREADS" && name != "CUDA_VISIBLE_DEVICES" && name != "RANK") entries.emplace_back(text);
  }
  entries.emplace_back("CUDA_VISIBLE_DEVICES=");  // after the test's own settings, of which the first counts
  return entries;
}

std::vector<char*> pointers(const std::vector<std::string>& words) {
  std::vector<char*> result;
  for (const std::string& word : words) result.push_back(const_cast<char*>(word.c_str()));
  result.push_back(nullptr);
  return result;
}

}  // namespace

std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

bool wait_until(const std::function<bool()>& condition, double seconds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

bool exists(const std::string& path) { return std::filesystem::exists(path); }

pid_t pid_in(const std::string& path) { return static_cast<pid_t>(std::stol(read_file(path))); }

bool process_gone(pid_t pid) {
  const std::string stat = read_file(cat("/proc/", pid, "/stat"));
  const size_t after_name = stat.rfind(')');
  return after_name == std::string::npos || stat[after_name + 2] == 'Z';
}

Launched::Launched(const Settings& settings) {
  std::vector<std::string> words = {DS_LAUNCH};
  words.insert(words.end(), settings.flags.begin(), settings.flags.end());
  words.insert(words.end(), settings.program.begin(), settings.program.end());
  words.insert(words.end(), settings.actions.begin(), settings.actions.end());
  std::vector<std::string> environment = settings.environment;  // first, so that they are found
  for (std::string& entry : clean_environment()) environment.push_back(std::move(entry));
  const std::vector<char*> argv = pointers(words), envp = pointers(environment);
  const std::string out = folder_ / "out", err = folder_ / "err";
  pid_ = fork();
  if (pid_ != 0) return;
  setpgid(0, 0);
  signal(SIGHUP, settings.hangup_ignored ? SIG_IGN : SIG_DFL);
  signal(SIGCHLD, settings.child_ends_ignored ? SIG_IGN : SIG_DFL);
  dup2(open(settings.input.c_str(), O_RDONLY), 0);
  const bool terminal = settings.terminal >= 0;
  dup2(terminal ? settings.terminal : open(out.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600), 1);
  dup2(terminal ? settings.terminal : open(err.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600), 2);
  for (int fd = 3; fd < 256; ++fd) close(fd);
  execve(argv[0], argv.data(), envp.data());
  _exit(95);
}

Launched::~Launched() {
  if (pid_ > 0) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
}

int Launched::wait(double seconds) {
  int status = 0;
  if (!wait_until([&] { return waitpid(pid_, &status, WNOHANG) == pid_; }, seconds)) return kHung;
  pid_ = -1;
  return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

void Launched::send(int signal) const { kill(pid_, signal); }

}  // namespace ds::launcher::testing
