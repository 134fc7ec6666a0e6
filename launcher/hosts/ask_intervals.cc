#include "launcher/hosts/ask_intervals.h"

#include <algorithm>

namespace ds::launcher {
namespace {

constexpr std::chrono::seconds kFirstInterval(3);
constexpr std::chrono::seconds kLongestInterval(300);
constexpr int kMostDoublings = 7;  // 3 s << 7 is beyond the longest

}  // namespace

std::chrono::seconds AskIntervals::of(const std::string& host) const {
  const auto found = doubled_.find(host);
  return std::min(kFirstInterval * (1 << (found == doubled_.end() ? 0 : found->second)), kLongestInterval);
}

void AskIntervals::on_ready(const std::string& host) {
  int& doubled = doubled_[host];
  doubled = std::min(doubled + 1, kMostDoublings);
}

}  // namespace ds::launcher
