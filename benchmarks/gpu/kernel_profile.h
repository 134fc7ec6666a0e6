// Where the time of a device goes: LibTorch's profiler (Kineto, CUPTI) around a piece of a program, summed by kernel.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>

namespace ds::bench {

// Runs `work`, which has to wait for the device at its end, and returns
//   {"seconds": of the host's clock, "busy_seconds": in which the device ran something, on any of its streams,
//    "kernels": [{"name", "calls", "seconds"}], the longest first, at most `most`, and "others" for the rest}
// The profiler itself makes launches slower: shares are good, `seconds` is more than without it.
nlohmann::ordered_json profile_kernels(const std::function<void()>& work, size_t most = 40);

}  // namespace ds::bench
