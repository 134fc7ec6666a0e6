// Times on a machine whose speed drifts within seconds: each run stands between two runs of a stream of memory.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <ctime>
#include <functional>
#include <vector>

#include "core/check.h"

namespace ds::benchmarks {

inline double seconds(const std::function<void()>& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// The CPU time of this thread, to which other programs add little.
inline double thread_seconds() {
  timespec now{};
  ensure(clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now) == 0, "no CPU time of the thread");
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

inline double quantile(std::vector<double> values, double share) {
  const auto place = values.begin() + std::lround(share * static_cast<double>(values.size() - 1));
  std::nth_element(values.begin(), place, values.end());
  return *place;
}

struct PairedTimes {
  std::vector<double> body, stream;  // seconds
  std::vector<double> paired;        // mean of the two streams beside a run over the run
};

// After one run of each that is not counted.
inline PairedTimes paired_times(int64_t rounds, const std::function<void()>& body,
                                const std::function<void()>& stream) {
  body();
  stream();
  PairedTimes times;
  times.stream.push_back(seconds(stream));
  for (int64_t round = 0; round < rounds; ++round) {
    times.body.push_back(seconds(body));
    times.stream.push_back(seconds(stream));
    times.paired.push_back((times.stream.end()[-2] + times.stream.back()) / 2 / times.body.back());
  }
  return times;
}

}  // namespace ds::benchmarks
