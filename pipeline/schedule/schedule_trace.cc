#include "core/json/parse_json.h"
#include "pipeline/schedule/schedule_timing.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/system_call.h"
#include "pipeline/schedule/text_file.h"

namespace ds::pipeline {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

std::vector<std::string> trace_files(const std::string& path) {
  std::error_code error;
  if (!fs::is_directory(path, error)) return {path};
  std::vector<std::string> files;
  fs::directory_iterator entry(path, error);
  for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
    if (entry->path().extension() == ".json") files.push_back(entry->path().string());
  }
  require<IoError>(!error, path, ": cannot be read: ", SystemReason(error));
  require<IoError>(!files.empty(), path, ": expected traces, *.json, in this folder, found none");
  std::sort(files.begin(), files.end());
  return files;
}

// The format is an array of events, or an object that has one.
json events_of(const std::string& file) {
  json document = parse_json<json>(read_text_file(file), nullptr, /*allow_exceptions=*/false);
  if (document.is_object() && document.contains("traceEvents")) {
    document = json(std::move(document["traceEvents"]));
  }
  require<ConfigError>(document.is_array(), file,
                       ": expected a trace in Chrome's trace event format, JSON with an array of events or an object "
                       "with \"traceEvents\"; found something else");
  return document;
}

// The compute action that a name means; none for names of other things.
std::optional<Action> compute_action(const std::string& name) {
  try {
    const Action action = parse_action(name);
    if (is_compute(action.kind)) return action;
  } catch (const ConfigError&) {
    // A trace may show more than actions.
  }
  return std::nullopt;
}

class TraceReader {
 public:
  explicit TraceReader(const Schedule& schedule) : ranks_(schedule.actions.size()) {}

  void add_file(const std::string& file) {
    for (const json& event : events_of(file)) {
      if (!event.is_object() || event.value("ph", json()) != "X") continue;
      const auto name = event.find("name");
      if (name == event.end() || !name->is_string()) continue;
      if (const auto action = compute_action(name->get<std::string>())) add(file, event, *action);
    }
  }

  Timetable take() {
    double first = 0;
    bool any = false;
    for (std::vector<TimedAction>& list : ranks_) {
      std::stable_sort(list.begin(), list.end(),
                       [](const TimedAction& a, const TimedAction& b) { return a.start < b.start; });
      if (list.empty()) continue;
      first = any ? std::min(first, list.front().start) : list.front().start;
      any = true;
    }
    Timetable table;
    for (std::vector<TimedAction>& list : ranks_) {
      for (TimedAction& timed : list) {
        timed.start -= first;
        timed.end -= first;
        table.makespan = std::max(table.makespan, timed.end);
      }
    }
    table.ranks = std::move(ranks_);
    return table;
  }

 private:
  void add(const std::string& file, const json& event, const Action& action) {
    const double rank = number(file, event, "tid");
    require<ConfigError>(rank == std::floor(rank) && rank >= 0 && rank < static_cast<double>(ranks_.size()), file,
                         ": event ", action, ": expected a rank in [0, ", ranks_.size(), ") as \"tid\", found ", rank);
    const double start = number(file, event, "ts");
    const double duration = number(file, event, "dur");
    require<ConfigError>(duration >= 0, file, ": event ", action, ": expected \"dur\" of at least 0, found ", duration);
    ranks_[static_cast<size_t>(rank)].push_back({action, start, start + duration});
  }

  static double number(const std::string& file, const json& event, const char* key) {
    const auto found = event.find(key);
    require<ConfigError>(found != event.end() && found->is_number(), file, ": event ", event["name"],
                         ": expected a number as \"", key, "\", found ",
                         lazy([&] { return found == event.end() ? "none" : found->dump(); }));
    return found->get<double>();
  }

  std::vector<std::vector<TimedAction>> ranks_;
};

bool earlier_in_model(const Action& a, const Action& b) {
  return std::tie(a.stage, a.micro_batch, a.kind) < std::tie(b.stage, b.micro_batch, b.kind);
}

// Each compute action of the schedule, once.
void require_complete(const Timetable& table, const Schedule& schedule, const std::string& path) {
  for (size_t rank = 0; rank < table.ranks.size(); ++rank) {
    std::vector<Action> planned;
    for (const Action& action : schedule.actions[rank]) {
      if (is_compute(action.kind)) planned.push_back(action);
    }
    std::vector<Action> seen;
    for (const TimedAction& timed : table.ranks[rank]) seen.push_back(timed.action);
    std::sort(planned.begin(), planned.end(), earlier_in_model);
    std::sort(seen.begin(), seen.end(), earlier_in_model);
    for (size_t i = 1; i < seen.size(); ++i) {
      require<ConfigError>(!(seen[i] == seen[i - 1]), path, ": rank ", rank, ": ", seen[i],
                           " is there more than once; expected the trace of one step");
    }
    const auto [want, have] = std::mismatch(planned.begin(), planned.end(), seen.begin(), seen.end());
    if (want == planned.end() && have == seen.end()) continue;
    const bool lacks = have == seen.end() || (want != planned.end() && earlier_in_model(*want, *have));
    throw ConfigError(cat(path, ": rank ", rank, ": ", lacks ? "no event for " : "an event for ",
                          to_text(lacks ? *want : *have), lacks ? ", which " : ", which is not in ", "schedule ",
                          schedule.name, lacks ? " has on this rank" : " on this rank",
                          "; expected the trace of one step of this schedule"));
  }
}

}  // namespace

Timetable read_trace(const std::string& path, const Schedule& schedule) {
  TraceReader reader(schedule);
  for (const std::string& file : trace_files(path)) reader.add_file(file);
  Timetable table = reader.take();
  require_complete(table, schedule, path);
  return table;
}

}  // namespace ds::pipeline
