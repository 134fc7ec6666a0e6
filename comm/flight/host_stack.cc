#include "comm/flight/host_stack.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>

#include <array>
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <mutex>
#include <string_view>
#include <thread>

#include "core/text.h"

namespace ds::comm {
namespace {

constexpr int kMostFrames = 64;

// The stack that the signal handler writes. There is one in the process: handlers have no object.
struct Sample {
  std::array<void*, kMostFrames> frames{};
  std::atomic<int> count{-1};  // -1: nothing asked; 0: asked
};

Sample& sample() {
  static Sample sample;
  return sample;
}

void take_sample(int) {
  const int saved = errno;
  int asked = 0;
  Sample& to = sample();
  if (to.count.load(std::memory_order_acquire) == asked) {
    const int count = backtrace(to.frames.data(), kMostFrames);
    to.count.compare_exchange_strong(asked, count, std::memory_order_release);
  }
  errno = saved;
}

// A real-time signal that nobody uses, with our handler; 0 where there is none.
int take_signal() {
  std::array<void*, 2> first{};
  backtrace(first.data(), 2);  // loads the unwinder, which a handler must not do
  for (int number = SIGRTMIN + 4; number <= SIGRTMAX; ++number) {
    struct sigaction action {};
    if (sigaction(number, nullptr, &action) != 0 || action.sa_handler != SIG_DFL) continue;
    action = {};
    action.sa_handler = take_sample;
    action.sa_flags = SA_RESTART;
    sigfillset(&action.sa_mask);
    if (sigaction(number, &action, nullptr) == 0) return number;
  }
  return 0;
}

int sample_signal() {
  static const int kNumber = take_signal();
  return kNumber;
}

// Without arguments, template arguments and result: "ds::Loader::next".
std::string short_name(const char* mangled) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> full(abi::__cxa_demangle(mangled, nullptr, nullptr, &status),
                                                         std::free);
  if (status != 0) return mangled;
  std::string name;
  int depth = 0;
  for (const char* at = full.get(); *at != '\0'; ++at) {
    if (*at == '<') ++depth;
    if (depth == 0 && *at == '(' && !std::string_view(at).starts_with("(anonymous")) break;
    if (depth == 0) name.push_back(*at);
    if (*at == '>') --depth;
  }
  if (name.empty() || name.find("operator") != std::string::npos || name.find("(anonymous") != std::string::npos) {
    return name.empty() ? full.get() : name;
  }
  return name.substr(name.rfind(' ') + 1);
}

std::string frame_text(void* address) {
  Dl_info info{};
  if (dladdr(address, &info) == 0 || info.dli_fname == nullptr) return cat(address);
  if (info.dli_sname != nullptr) return short_name(info.dli_sname);
  const auto offset = static_cast<const char*>(address) - static_cast<const char*>(info.dli_fbase);
  return cat(std::filesystem::path(info.dli_fname).filename().string(), "+0x", std::hex, offset);
}

}  // namespace

HostStack::HostStack() : thread_(pthread_self()) { sample_signal(); }

std::vector<std::string> HostStack::frames(std::chrono::milliseconds limit) const {
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  const int number = sample_signal();
  if (number == 0) return {};
  Sample& from = sample();
  from.count.store(0, std::memory_order_release);
  if (pthread_kill(thread_, number) != 0) return {};
  const auto end = std::chrono::steady_clock::now() + limit;
  while (from.count.load(std::memory_order_acquire) == 0 && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  int count = 0;
  if (from.count.compare_exchange_strong(count, -1)) return {};  // a late handler finds nothing asked
  std::vector<std::string> names;
  constexpr int kOwnFrames = 2;  // the handler, and the trampoline that calls it
  for (int i = kOwnFrames; i < count; ++i) names.push_back(frame_text(from.frames[static_cast<size_t>(i)]));
  from.count.store(-1);
  return names;
}

}  // namespace ds::comm
