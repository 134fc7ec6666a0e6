// Names of the kinds of schedules.
#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "core/ascii.h"
#include "core/check.h"
#include "core/json/near_miss.h"
#include "pipeline/schedule/schedule.h"

namespace ds::pipeline {
namespace {

struct KindName {
  ScheduleKind kind;
  const char* name;
  const char* torch_name;  // in torch.distributed.pipelining; "" where it has none
};

constexpr std::array<KindName, 8> kKindNames = {{
    {ScheduleKind::kGPipe, "gpipe", "ScheduleGPipe"},
    {ScheduleKind::k1F1B, "1f1b", "Schedule1F1B"},
    {ScheduleKind::kInterleaved, "interleaved", "ScheduleInterleaved1F1B"},
    {ScheduleKind::kZbH1, "zb_h1", ""},
    {ScheduleKind::kZbH2, "zb_h2", ""},
    {ScheduleKind::kZbV, "zbv", "ScheduleZBVZeroBubble"},
    {ScheduleKind::kDualPipeV, "dualpipev", "ScheduleDualPipeV"},
    {ScheduleKind::kInference, "inference", ""},
}};

std::string lower_case(const std::string& text) {
  std::string lower = ascii_lower(text);
  std::replace(lower.begin(), lower.end(), '-', '_');
  return lower;
}

// torch takes the names of its classes with and without "Schedule".
bool is_torch_name(const std::string& lower, const KindName& entry) {
  const std::string torch_name = lower_case(entry.torch_name);
  return !torch_name.empty() && (lower == torch_name || "schedule" + lower == torch_name);
}

}  // namespace

const char* name_of(ScheduleKind kind) {
  for (const KindName& entry : kKindNames) {
    if (entry.kind == kind) return entry.name;
  }
  return "?";
}

ScheduleKind parse_schedule_kind(const std::string& name) {
  const std::string lower = lower_case(name);
  std::vector<std::string> known;
  std::string list;
  for (const KindName& entry : kKindNames) {
    if (lower == entry.name || is_torch_name(lower, entry)) return entry.kind;
    known.emplace_back(entry.name);
    list += cat(list.empty() ? "" : ", ", entry.name);
  }
  const auto near = near_miss(lower, known);
  throw ConfigError(cat("pipeline schedule: expected one of ", list, "; found \"", name, "\"",
                        near ? cat("; did you mean ", *near, "?") : ""));
}

int default_chunks(ScheduleKind kind) {
  const bool two = kind == ScheduleKind::kInterleaved || kind == ScheduleKind::kZbV || kind == ScheduleKind::kDualPipeV;
  return two ? 2 : 1;
}

}  // namespace ds::pipeline
