#include "pipeline/schedule/schedule_file.h"

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/shown_text.h"
#include "pipeline/schedule/schedule_check.h"
#include "pipeline/schedule/text_file.h"

namespace ds::pipeline {
namespace {

// torch writes a forward and a backward that run as one as "(0F3;7B0)OVERLAP_F_B".
constexpr std::string_view kOverlapEnd = ")OVERLAP_F_B";

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kBlank = " \t\r";
  const size_t first = text.find_first_not_of(kBlank);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kBlank) - first + 1);
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (;;) {
    const size_t end = text.find(separator);
    parts.push_back(text.substr(0, end));
    if (end == std::string_view::npos) return parts;
    text.remove_prefix(end + 1);
  }
}

// A place in the file, counted from 1 as editors do.
struct Cell {
  const std::string& file;
  size_t line;
  size_t column;
  std::string place() const { return cat(shown_text(file), ", line ", line, ", cell ", column, ": "); }
};

Action parse_compute(std::string_view text, const Cell& cell) {
  Action action;
  try {
    action = parse_action(std::string(text));
  } catch (const ConfigError& error) {
    throw ConfigError(cell.place() + error.what());
  }
  require<ConfigError>(is_compute(action.kind), lazy([&] { return cell.place(); }),
                       "expected F, B, I or W, as in \"0F3\", found \"", shown_text(text),
                       "\"; leave it out: messages and the end of the step are added");
  return action;
}

void parse_cell(std::string_view text, const Cell& cell, std::vector<Action>& order) {
  if (text.empty()) return;
  if (!text.starts_with('(') || !text.ends_with(kOverlapEnd)) {
    order.push_back(parse_compute(text, cell));
    return;
  }
  text = text.substr(1, text.size() - 1 - kOverlapEnd.size());
  for (const std::string_view part : split(text, ';')) order.push_back(parse_compute(trimmed(part), cell));
}

std::vector<std::vector<Action>> parse_lines(const std::string& text, const std::string& name) {
  std::vector<std::string_view> lines = split(text, '\n');
  while (!lines.empty() && trimmed(lines.back()).empty()) lines.pop_back();
  require<ConfigError>(!lines.empty(), name, ": expected a line for each rank, with cells as \"0F0,1F0,,1B0,0B0\", ",
                       "found an empty file");
  std::vector<std::vector<Action>> compute;
  for (size_t i = 0; i < lines.size(); ++i) {
    std::vector<Action> order;
    const std::vector<std::string_view> cells = split(lines[i], ',');
    for (size_t j = 0; j < cells.size(); ++j) parse_cell(trimmed(cells[j]), {name, i + 1, j + 1}, order);
    compute.push_back(std::move(order));
  }
  return compute;
}

// The rank of each stage: the one that has its actions.
std::vector<int> place_by_actions(const std::vector<std::vector<Action>>& compute, const std::string& name) {
  // What is missing would be found as well; this only keeps a slip, as 10000000F0, from taking all memory.
  size_t actions = 0;
  for (const std::vector<Action>& order : compute) actions += order.size();
  std::vector<int> rank_of;
  for (size_t rank = 0; rank < compute.size(); ++rank) {
    for (const Action& action : compute[rank]) {
      const auto stage = static_cast<size_t>(action.stage);
      require<ConfigError>(stage < actions && static_cast<size_t>(action.micro_batch) < actions, name, ", line ",
                           rank + 1, ": ", action, ": expected a stage and a micro-batch below ", actions,
                           ", the number of actions in the file; both are counted from 0 without gaps");
      if (stage >= rank_of.size()) rank_of.resize(stage + 1, -1);
      int& owner = rank_of[stage];
      require<ConfigError>(owner < 0 || owner == static_cast<int>(rank), name, ", line ", rank + 1, ": ", action,
                           ": stage ", action.stage, " is on rank ", owner, ", line ", owner + 1,
                           "; expected all actions of a stage in one line");
      owner = static_cast<int>(rank);
    }
  }
  return rank_of;
}

ScheduleShape shape_of(const std::vector<std::vector<Action>>& compute, const std::vector<int>& rank_of,
                       const std::string& name) {
  std::vector<size_t> stages(compute.size());
  for (size_t stage = 0; stage < rank_of.size(); ++stage) {
    require<ConfigError>(rank_of[stage] >= 0, name, ": expected actions of each stage in [0, ", rank_of.size(),
                         "), found none of stage ", stage);
    ++stages[rank_of[stage]];
  }
  for (size_t rank = 0; rank < stages.size(); ++rank) {
    require<ConfigError>(stages[rank] > 0 && stages[rank] == stages[0], name, ", line ", rank + 1,
                         ": expected at least 1 stage, and as many on each rank; found ", stages[rank],
                         ", and on rank 0 ", stages[0]);
  }
  int micro_batches = 0;
  for (const std::vector<Action>& order : compute) {
    for (const Action& action : order) micro_batches = std::max(micro_batches, action.micro_batch + 1);
  }
  return {
      .ranks = static_cast<int>(compute.size()), .chunks = static_cast<int>(stages[0]), .micro_batches = micro_batches};
}

}  // namespace

Schedule parse_schedule(const std::string& text, const std::string& name) {
  const std::vector<std::vector<Action>> compute = parse_lines(text, name);
  std::vector<int> rank_of = place_by_actions(compute, name);
  const ScheduleShape shape = shape_of(compute, rank_of, name);
  Schedule schedule = with_messages(name, shape, std::move(rank_of), compute);
  require_sound(schedule);
  return schedule;
}

Schedule read_schedule(const std::string& path) { return parse_schedule(read_text_file(path), path); }

std::string to_csv(const Schedule& schedule) {
  std::string text;
  for (const std::vector<Action>& list : schedule.actions) {
    bool first = true;
    for (const Action& action : list) {
      if (!is_compute(action.kind)) continue;
      if (!first) text += ',';
      first = false;
      text += to_text(action);
    }
    text += '\n';
  }
  return text;
}

bool is_schedule_file(const std::string& name) { return name.ends_with(".csv"); }

}  // namespace ds::pipeline
