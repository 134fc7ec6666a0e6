#include "benchmarks/gpu/kernel_profile.h"

#include <torch/csrc/autograd/profiler_kineto.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace ds::bench {
namespace {

using nlohmann::ordered_json;
using torch::autograd::profiler::KinetoEvent;
using torch::profiler::impl::ActivityType;

constexpr double kNanosecond = 1e-9;

struct Spent {
  int64_t calls = 0;
  double seconds = 0;
};

// The time that is covered by at least one of the spans, which may overlap.
double covered_seconds(std::vector<std::pair<uint64_t, uint64_t>> spans) {
  std::sort(spans.begin(), spans.end());
  uint64_t covered = 0;
  uint64_t until = 0;
  for (const auto& [begin, end] : spans) {
    if (end <= until) continue;
    covered += end - std::max(begin, until);
    until = end;
  }
  return static_cast<double>(covered) * kNanosecond;
}

ordered_json table_of(const std::map<std::string, Spent>& kernels, size_t most) {
  std::vector<std::pair<std::string, Spent>> rows(kernels.begin(), kernels.end());
  std::sort(rows.begin(), rows.end(), [](const auto& a, const auto& b) { return a.second.seconds > b.second.seconds; });
  ordered_json table = ordered_json::array();
  Spent others;
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto& [name, spent] = rows[i];
    if (i < most) {
      table.push_back({{"name", name}, {"calls", spent.calls}, {"seconds", spent.seconds}});
    } else {
      others.calls += spent.calls;
      others.seconds += spent.seconds;
    }
  }
  if (others.calls > 0) table.push_back({{"name", "others"}, {"calls", others.calls}, {"seconds", others.seconds}});
  return table;
}

}  // namespace

ordered_json profile_kernels(const std::function<void()>& work, size_t most) {
  const torch::profiler::impl::ProfilerConfig config(torch::profiler::impl::ProfilerState::KINETO);
  const std::set<ActivityType> activities = {ActivityType::CPU, ActivityType::CUDA};
  torch::autograd::profiler::prepareProfiler(config, activities);
  torch::autograd::profiler::enableProfiler(config, activities);
  const auto begin = std::chrono::steady_clock::now();
  work();
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  const auto result = torch::autograd::profiler::disableProfiler();
  std::map<std::string, Spent> kernels;
  std::vector<std::pair<uint64_t, uint64_t>> spans;
  for (const KinetoEvent& event : result->events()) {
    if (event.deviceType() == c10::DeviceType::CPU || event.durationNs() == 0) continue;
    Spent& spent = kernels[event.name()];
    ++spent.calls;
    spent.seconds += static_cast<double>(event.durationNs()) * kNanosecond;
    spans.emplace_back(event.startNs(), event.endNs());
  }
  return {{"seconds", seconds.count()},
          {"busy_seconds", covered_seconds(std::move(spans))},
          {"kernels", table_of(kernels, most)}};
}

}  // namespace ds::bench
