// scheduler: {"type", "params"}. Torch-free.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "optim/lr_schedule.h"

namespace ds::config {

struct SchedulerSection {
  std::string type;  // WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest, OneCycle; empty: none in the file
  nlohmann::ordered_json params = nlohmann::ordered_json::object();  // as written, "auto" replaced
  std::optional<optim::LrScheduleOptions> options;                   // set for the five types

  bool given() const { return !type.empty(); }
};

}  // namespace ds::config
