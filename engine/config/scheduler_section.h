// scheduler: {"type", "params"}. Torch-free.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "dsengine/lr_schedule.h"

namespace ds::engine::config {

struct SchedulerSection {
  std::string type;  // WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest, OneCycle; empty: none in the file
  nlohmann::ordered_json params = nlohmann::ordered_json::object();  // as written, "auto" replaced
  std::optional<optimizers::LrScheduleOptions> options;              // set for the five types
  int64_t last_batch_iteration = -1;                                 // a schedule that starts at its beginning

  bool given() const { return !type.empty(); }
};

}  // namespace ds::engine::config
