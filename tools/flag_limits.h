// The largest values that flags of ds-tool accept.
#pragma once

#include <cstdint>

namespace ds::tool {

inline constexpr int64_t kMostRanks = 1 << 24;
inline constexpr int64_t kMostParameters = int64_t{1} << 50;
inline constexpr int64_t kMostBytes = int64_t{1} << 60;
inline constexpr int64_t kMostLayers = 10'000;
inline constexpr int64_t kMostMicroBatches = 1 << 20;
inline constexpr int64_t kMostForwards = 1 << 20;  // of all stages: each is an action in memory
inline constexpr int64_t kMostStages = 1 << 16;
inline constexpr int64_t kMostWidth = int64_t{1} << 40;  // hidden, vocab, ... of a model
inline constexpr int64_t kMostSimulatedRanks = 1 << 20;  // each is a place in memory
inline constexpr int64_t kMostEntries = 1 << 20;

}  // namespace ds::tool
