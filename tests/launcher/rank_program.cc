// What the ranks run in the tests of ds-launch. Its arguments are actions, done in order:
//   print TEXT, error TEXT     a line on standard output or error, flushed
//   part TEXT                  no line end; "\r" in it is a carriage return
//   lines N LENGTH             N lines of that many copies of the rank's letter
//   env NAME                   prints NAME=value
//   tty                        prints which of the streams 0, 1, 2 are terminals
//   cpus                       prints how many CPUs the rank may run on
//   copy                       standard input to standard output
//   exit N                     ends at once
//   raise N                    sends itself a signal
//   pause                      waits for a signal, for ever
//   ignore N                   ignores a signal
//   catch N FILE               on that signal: makes FILE and ends with 0
//   touch FILE, until FILE     makes a file (with its pid in it); waits until there is one (at most a minute)
//   gone FILE                  waits until the process whose pid is in FILE has ended
//   child FILE, daemon FILE    starts a process that pauses, in the same or in a new session; its pid is in FILE
//   allocate MIB               touches that much memory
//   on RANK, not-on RANK       the next action is for that rank, or for all others, only
//   start N                    the next action is for that start of the job only (DS_RESTART_COUNT). Such conditions
//                              may follow each other
// A '%' in a TEXT or FILE stands for the rank.
#include <fcntl.h>
#include <sched.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

std::string rank() {
  const char* value = std::getenv("RANK");
  return value == nullptr ? "none" : value;
}

std::string start() {
  const char* value = std::getenv("DS_RESTART_COUNT");
  return value == nullptr ? "none" : value;
}

std::string filled(const std::string& text) {
  std::string result;
  for (size_t at = 0; at < text.size(); ++at) {
    if (text[at] == '%') {
      result += rank();
    } else if (text.compare(at, 2, "\\r") == 0) {
      result.push_back('\r');
      ++at;
    } else {
      result.push_back(text[at]);
    }
  }
  return result;
}

void make_file(const std::string& path, pid_t pid) {
  const std::string temporary = path + ".new";
  const int fd = open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
  const std::string text = std::to_string(pid);
  if (fd < 0 || write(fd, text.data(), text.size()) < 0 || rename(temporary.c_str(), path.c_str()) != 0) _exit(98);
  close(fd);
}

std::string caught_file;
void on_signal(int) {
  make_file(caught_file, getpid());
  _exit(0);
}

void until(const std::string& path) {
  for (int i = 0; i < 60000; ++i) {
    if (access(path.c_str(), F_OK) == 0) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  std::fprintf(stderr, "no %s came\n", path.c_str());
  _exit(97);
}

// As a peer sees it: its connections are closed. A zombie, which is what is left until the launcher looks, counts.
void gone(const std::string& path) {
  std::ifstream file(path);
  pid_t pid = 0;
  file >> pid;
  for (int i = 0; i < 1000000; ++i) {
    std::ifstream stat("/proc/" + std::to_string(pid) + "/stat");
    std::string number, name, state;
    if (!(stat >> number >> name >> state) || state == "Z" || state == "X") return;
    std::this_thread::yield();
  }
  _exit(94);
}

void start_child(const std::string& path, bool new_session) {
  if (const pid_t child = fork(); child == 0) {
    if (new_session) setsid();
    make_file(path, getpid());
    for (;;) pause();
  }
  until(path);
}

void print_cpus() {
  cpu_set_t set;
  sched_getaffinity(0, sizeof(set), &set);
  std::printf("cpus=%d\n", CPU_COUNT(&set));
}

void copy_input() {
  for (int c; (c = std::getchar()) != EOF;) std::putchar(c);
}

void print_lines(int count, int length) {
  const std::string line(static_cast<size_t>(length), static_cast<char>('a' + std::atoi(rank().c_str()) % 26));
  for (int i = 0; i < count; ++i) std::printf("%s\n", line.c_str());
}

int run(const std::vector<std::string>& words) {
  const std::map<std::string, size_t> parameters = {
      {"print", 1},    {"error", 1}, {"part", 1},   {"lines", 2}, {"env", 1},   {"tty", 0},
      {"cpus", 0},     {"copy", 0},  {"exit", 1},   {"raise", 1}, {"pause", 0}, {"ignore", 1},
      {"catch", 2},    {"touch", 1}, {"until", 1},  {"gone", 1},  {"child", 1}, {"daemon", 1},
      {"allocate", 1}, {"on", 1},    {"not-on", 1}, {"start", 1}};
  bool skip = false;
  for (size_t at = 0; at < words.size();) {
    const std::string& action = words[at];
    const auto known = parameters.find(action);
    if (known == parameters.end() || at + known->second >= words.size()) {
      std::fprintf(stderr, "unknown action %s\n", action.c_str());
      return 96;
    }
    const std::string a = known->second > 0 ? filled(words[at + 1]) : "";
    const std::string b = known->second > 1 ? filled(words[at + 2]) : "";
    at += 1 + known->second;
    if (skip) {
      skip = action == "on" || action == "not-on" || action == "start";
      continue;
    }
    if (action == "print") std::printf("%s\n", a.c_str());
    if (action == "error") std::fprintf(stderr, "%s\n", a.c_str());
    if (action == "part") std::printf("%s", a.c_str());
    if (action == "lines") print_lines(std::stoi(a), std::stoi(b));
    if (action == "env") std::printf("%s=%s\n", a.c_str(), std::getenv(a.c_str()) ? std::getenv(a.c_str()) : "(unset)");
    if (action == "tty") std::printf("tty=%d%d%d\n", isatty(0), isatty(1), isatty(2));
    if (action == "cpus") print_cpus();
    if (action == "copy") copy_input();
    std::fflush(stdout);
    if (action == "exit") _exit(std::stoi(a));
    if (action == "raise") raise(std::stoi(a));
    if (action == "pause")
      for (;;) pause();
    if (action == "ignore") std::signal(std::stoi(a), SIG_IGN);
    if (action == "catch") {
      caught_file = b;
      std::signal(std::stoi(a), on_signal);
    }
    if (action == "touch") make_file(a, getpid());
    if (action == "until") until(a);
    if (action == "gone") gone(a);
    if (action == "child") start_child(a, false);
    if (action == "daemon") start_child(a, true);
    if (action == "allocate") {
      static std::vector<char> memory;
      memory.assign(static_cast<size_t>(std::stoi(a)) << 20, 'x');
    }
    if (action == "on") skip = a != rank();
    if (action == "not-on") skip = a == rank();
    if (action == "start") skip = a != start();
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return run({argv + 1, argv + argc}); }
