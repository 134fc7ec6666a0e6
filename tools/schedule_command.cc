#include "tools/schedule_command.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "core/check.h"
#include "core/files/atomic_file.h"
#include "core/shown_text.h"
#include "launcher/command_line/number_flags.h"
#include "pipeline/schedule/schedule.h"
#include "pipeline/schedule/schedule_check.h"
#include "pipeline/schedule/schedule_file.h"
#include "pipeline/schedule/schedule_timing.h"
#include "pipeline/schedule/schedule_view.h"
#include "tools/commands.h"
#include "tools/flag_limits.h"

namespace ds::tool {
namespace {

using nlohmann::ordered_json;
using pipeline::Action;
using pipeline::Schedule;
using pipeline::ScheduleKind;
using pipeline::StageTimes;
using pipeline::Timetable;

struct ScheduleReport {
  Schedule schedule;
  Timetable plan;
  std::optional<Timetable> measured;
  std::vector<double> peaks;
  size_t messages = 0;
};

bool has_several_chunks(ScheduleKind kind) {
  return kind == ScheduleKind::kInterleaved || kind == ScheduleKind::kZbV || kind == ScheduleKind::kDualPipeV;
}

Schedule chosen_schedule(const ScheduleOptions& options) {
  const bool by_numbers = options.kind || options.stages || options.micro_batches || options.chunks;
  if (!options.file.empty()) {
    require<ConfigError>(!by_numbers, "ds-tool schedule: --file ", options.file,
                         " says everything itself; leave out --kind, --stages, --micro_batches and --chunks");
    return pipeline::read_schedule(options.file);
  }
  require<ConfigError>(options.kind && options.stages && options.micro_batches,
                       "ds-tool schedule: expected --kind, --stages and --micro_batches, or --file");
  const ScheduleKind kind = pipeline::parse_schedule_kind(*options.kind);
  const pipeline::ScheduleShape shape{.ranks = *options.stages,
                                      .chunks = options.chunks.value_or(has_several_chunks(kind) ? 2 : 1),
                                      .micro_batches = *options.micro_batches};
  const double forwards = static_cast<double>(shape.ranks) * shape.chunks * shape.micro_batches;
  require<ConfigError>(forwards <= static_cast<double>(kMostForwards), "ds-tool schedule: expected at most ",
                       kMostForwards, " for --stages x --chunks x --micro_batches, found ", forwards);
  return pipeline::make_schedule(kind, shape);
}

constexpr double kLongest = 1e30;  // a time

// "1,1,1": times of F, I and W.
StageTimes parse_times(const std::string& text) {
  std::vector<double> numbers;
  const char* next = text.data();
  const char* const end = next + text.size();
  bool complete = false;
  for (;;) {
    double number = 0;
    const auto [after, error] = std::from_chars(next, end, number);
    if (error != std::errc()) break;
    numbers.push_back(number);
    next = after;
    if (next == end) complete = true;
    if (next == end || *next != ',') break;
    ++next;
  }
  const bool sound =
      std::all_of(numbers.begin(), numbers.end(), [](double time) { return time >= 0 && time <= kLongest; });
  require<ConfigError>(complete && sound && numbers.size() == 3,
                       "--times: expected three numbers of at least 0, of F, ", "I and W, as in \"1,1,1\", found \"",
                       shown_text(text), "\"");
  return {numbers[0], numbers[1], numbers[2]};
}

ScheduleReport examine(const ScheduleOptions& options) {
  ScheduleReport report;
  require<ConfigError>(options.message >= 0 && options.message <= kLongest,
                       "--message: expected a number of at least 0, ", "found ", options.message);
  report.schedule = chosen_schedule(options);
  if (!options.measured.empty()) report.measured = pipeline::read_trace(options.measured, report.schedule);
  std::vector<StageTimes> times = {StageTimes()};
  if (!options.times.empty()) {
    times = {parse_times(options.times)};
  } else if (report.measured) {
    times = pipeline::typical_times(report.schedule, *report.measured);
  }
  report.plan = pipeline::simulate(report.schedule, times, options.message);
  report.peaks = pipeline::peak_activations(report.schedule);
  for (const std::vector<Action>& list : report.schedule.actions) {
    for (const Action& action : list) report.messages += pipeline::is_send(action.kind) ? 1 : 0;
  }
  return report;
}

void write_file(const std::string& path, const std::string& text) {
  if (path.empty()) return;
  write_whole_file(path, text, /*durable=*/false);
}

void write_files(const ScheduleOptions& options, const ScheduleReport& report) {
  if (!options.csv.empty()) write_file(options.csv, pipeline::to_csv(report.schedule));
  if (!options.svg.empty()) {
    write_file(options.svg,
               pipeline::to_svg(report.schedule, report.plan, report.measured ? &*report.measured : nullptr));
  }
}

ordered_json to_json(const Timetable& table) {
  return {{"bubble", table.bubble()}, {"idle", table.idle()}, {"makespan", table.makespan}};
}

ordered_json to_json(const ScheduleReport& report, bool with_list) {
  const pipeline::ScheduleShape& shape = report.schedule.shape;
  ordered_json json = {{"ok", true},
                       {"schedule", report.schedule.name},
                       {"ranks", shape.ranks},
                       {"chunks", shape.chunks},
                       {"micro_batches", shape.micro_batches},
                       {"rank_of_stages", report.schedule.rank_of},
                       {"planned", to_json(report.plan)},
                       {"measured", report.measured ? to_json(*report.measured) : ordered_json()},
                       {"peak_activations", report.peaks},
                       {"messages", report.messages}};
  if (!with_list) return json;
  ordered_json lists = ordered_json::array();
  for (const std::vector<Action>& list : report.schedule.actions) {
    ordered_json texts = ordered_json::array();
    for (const Action& action : list) texts.push_back(pipeline::to_text(action));
    lists.push_back(std::move(texts));
  }
  json["actions"] = std::move(lists);
  return json;
}

std::string shares(const Timetable& table) {
  return cat("bubble ", fixed(100 * table.bubble(), 1), "%; idle ", fixed(100 * table.idle(), 1),
             "% where all ranks meet at the step; ", table.makespan, " in all");
}

void print(const ScheduleReport& report, const ScheduleOptions& options, std::ostream& out) {
  out << pipeline::headline(report.schedule) << ", " << report.messages
      << (report.messages == 1 ? " message\n" : " messages\n");
  out << (report.measured ? "planned:  " : "") << shares(report.plan) << '\n';
  if (report.measured) out << "measured: " << shares(*report.measured) << ", microseconds\n";
  out << '\n' << pipeline::to_terminal(report.schedule, report.plan, options.width, options.color);
  if (!options.list) return;
  for (size_t rank = 0; rank < report.schedule.actions.size(); ++rank) {
    out << "\nrank " << rank << ':';
    for (const Action& action : report.schedule.actions[rank]) out << ' ' << pipeline::to_text(action);
    out << '\n';
  }
}

constexpr int kPlainWidth = 120;  // of what is no terminal

// Colour and the whole width on a terminal alone.
void fit_to_terminal(ScheduleOptions& options) {
  winsize size{};
  options.color = isatty(STDOUT_FILENO) == 1;
  const bool known = options.color && ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  options.width = known ? size.ws_col : kPlainWidth;
}

}  // namespace

int schedule(const ScheduleOptions& options, std::ostream& out, std::ostream& err) {
  try {
    const ScheduleReport report = examine(options);
    write_files(options, report);
    if (options.json) {
      out << to_json(report, options.list).dump(2, ' ', false, ordered_json::error_handler_t::replace) << '\n';
    } else {
      print(report, options, out);
    }
    out.flush();
    require<IoError>(out.good(), "the timetable cannot be written; check the disk or the program that reads it");
    return 0;
  } catch (const Error& error) {
    err << shown_message(error.what()) << '\n';
    if (options.json) {
      const ordered_json refusal = {{"ok", false}, {"error", shown_message(error.what())}};
      out << refusal.dump(2, ' ', false, ordered_json::error_handler_t::replace) << std::endl;
    }
    return 2;
  }
}

void add_schedule(CLI::App& app, Command& chosen) {
  const auto options = std::make_shared<ScheduleOptions>();
  CLI::App* flags = app.add_subcommand(
      "schedule", "Draws a pipeline schedule: when each rank does what. Exit code 0: it is sound; 2: it is not.");
  flags->add_option("--kind", options->kind, "gpipe, 1f1b, interleaved, zb_h1, zb_h2, zbv, dualpipev or inference")
      ->type_name("KIND");
  flags->add_option("--stages", options->stages, "Ranks of the pipeline")
      ->transform(whole_number(1, kMostStages))
      ->type_name("N");
  flags->add_option("--micro_batches", options->micro_batches, "Micro-batches of a batch")
      ->transform(whole_number(1, kMostMicroBatches))
      ->type_name("N");
  flags
      ->add_option("--chunks", options->chunks,
                   "Stages a rank; 2 by default for interleaved, zbv and dualpipev, 1 for the others")
      ->transform(whole_number(1, kMostStages))
      ->type_name("N");
  flags->add_option("--file", options->file, "A schedule as CSV, a line for each rank, instead of the above")
      ->type_name("FILE");
  flags
      ->add_option("--times", options->times,
                   "Times of forward, backward of the input and of the weights (1,1,1, or as --measured has them)")
      ->type_name("F,I,W");
  flags->add_option("--message", options->message, "Time of a message from one rank to another")
      ->check(real_number(0))
      ->type_name("TIME");
  flags->add_option("--measured", options->measured, "A trace of a step, or a folder of traces, to compare with")
      ->type_name("PATH");
  flags->add_option("--csv", options->csv, "File to write the schedule to")->type_name("FILE");
  flags->add_option("--svg", options->svg, "File to draw the timetable to")->type_name("FILE");
  flags->add_flag("--list", options->list, "Print each rank's actions, with messages");
  flags->add_flag("--json", options->json, "Print one JSON object");
  flags->callback([options, &chosen] {
    fit_to_terminal(*options);
    chosen = [options] { return schedule(*options, std::cout, std::cerr); };
  });
}

}  // namespace ds::tool
