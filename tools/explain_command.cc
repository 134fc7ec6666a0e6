// `ds-tool explain`: why the ranks of a job wait or failed, from their flight records. Torch-free.
#include <algorithm>
#include <filesystem>
#include <iostream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "comm/flight/flight_folder.h"
#include "comm/flight/flight_log.h"
#include "comm/flight/stall_explanation.h"
#include "comm/meeting/environment_reader.h"
#include "comm/meeting/host_identity.h"
#include "comm/meeting/process_state.h"
#include "core/check.h"
#include "core/flight_job.h"
#include "core/shown_text.h"
#include "launcher/command_line/number_flags.h"
#include "tools/commands.h"
#include "tools/flag_limits.h"

namespace ds::tool {
namespace {

namespace fs = std::filesystem;
using comm::FlightEntry;
using comm::FlightLog;

constexpr int kCannotRead = 2;
constexpr double kDeadAfter = 5;

struct ExplainOptions {
  std::string folder;  // holds records (rankN.flight), or several stalls; empty: that of the newest job on this host
  size_t entries = 5;  // operations to print of each rank
  std::optional<double> dead_after;  // seconds without a heartbeat; empty: as the job had it, else 5
  bool json = false;
};

bool is_record(const fs::path& file) { return file.extension() == ".flight"; }

bool has_records(const fs::path& folder) {
  const fs::directory_iterator files(folder);
  return std::any_of(begin(files), end(files), [](const auto& entry) { return is_record(entry.path()); });
}

fs::path newest_folder(const fs::path& in) {
  fs::path newest;
  fs::file_time_type when{};
  for (const auto& entry : fs::directory_iterator(in)) {
    if (!entry.is_directory()) continue;
    if (newest.empty() || entry.last_write_time() > when) {
      newest = entry.path();
      when = entry.last_write_time();
    }
  }
  return newest;
}

std::vector<FlightLog> records_in(const fs::path& folder) {
  std::vector<FlightLog> logs;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (is_record(entry.path())) logs.push_back(comm::read_flight_file(entry.path()));
  }
  std::sort(logs.begin(), logs.end(),
            [](const FlightLog& a, const FlightLog& b) { return a.header.rank < b.header.rank; });
  return logs;
}

double dead_after(const ExplainOptions& options, const std::vector<FlightLog>& logs) {
  double of_job = 0;
  for (const FlightLog& log : logs) of_job = std::max(of_job, log.dead_after_seconds);
  return options.dead_after.value_or(of_job > 0 ? of_job : kDeadAfter);
}

// A rank's own record; none where it is taken away or made at this moment.
std::optional<FlightLog> live_record(const fs::path& file) {
  try {
    return comm::read_flight_file(file);
  } catch (const Error&) {
    return std::nullopt;
  }
}

// Whether a rank went on after this stall, and did not end in good order: what came later is the news. A hopeless stall
// ends the job, though ranks may issue a little more before they hear of it.
bool went_on(const fs::path& job, const fs::path& stall) {
  const std::vector<FlightLog> stalled = records_in(stall);
  const bool last = explain_stall(stalled, stalled.front().header.world_size, dead_after({}, stalled)).hopeless();
  return std::any_of(stalled.begin(), stalled.end(), [&](const FlightLog& then) {
    const std::optional<FlightLog> now = live_record(comm::flight_file(job, then.header.rank));
    if (!now || now->header.left != 0) return false;
    const bool same_start =
        now->header.process == then.header.process && now->header.host.text() == then.header.host.text();
    return !same_start || (!last && now->header.next_sequence > then.header.next_sequence);
  });
}

// The folder to read: for one job its last stall, or its records where it went on; for a folder of jobs the newest job.
fs::path folder_with_records(const std::string& given) {
  fs::path folder = given.empty() ? flight_base(comm::process_environment) : given;
  for (int depth = 0; depth < 3; ++depth) {
    std::error_code error;
    require<IoError>(fs::is_directory(folder, error), folder.native(), ": expected a folder of flight records, found ",
                     fs::exists(folder, error) ? "a file" : "nothing");
    const fs::path inner = newest_folder(folder);
    if (has_records(folder) && (inner.empty() || !has_records(inner) || went_on(folder, inner))) return folder;
    require<IoError>(!inner.empty(), folder.native(), ": expected flight records (rankN.flight), found none; a rank ",
                     "that ends in good order removes its own");
    folder = inner;
  }
  throw IoError(cat(folder.native(), ": expected flight records (rankN.flight), found none"));
}

// Ranks of one host share a clock: how long each has been silent when the last of them wrote.
void note_silence(std::vector<FlightLog>& logs) {
  std::map<std::string, int64_t> newest;
  for (const FlightLog& log : logs) {
    int64_t& of_host = newest[log.header.host.text()];
    of_host = std::max(of_host, log.header.now_ns);
  }
  for (FlightLog& log : logs) {
    const double behind = static_cast<double>(newest[log.header.host.text()] - log.header.now_ns) * 1e-9;
    if (log.silent_seconds == 0 && behind > 1) log.silent_seconds = behind;
  }
}

// In a record that a process has left behind, what it waited for when it ended.
void note_ends(std::vector<FlightLog>& logs) {
  for (FlightLog& log : logs) {
    const bool here = log.header.host.text() == comm::host_name();
    if (!here || log.header.left != 0 || comm::state_of_process(log.header.process) != '-') continue;
    log.neighbours[log.header.rank] = '-';
    for (FlightEntry& entry : log.entries) {
      if (entry.state == comm::FlightState::kWaiting) entry.state = comm::FlightState::kIssued;
    }
  }
}

std::vector<FlightLog> read_records(const fs::path& folder) {
  std::vector<FlightLog> logs = records_in(folder);
  note_silence(logs);
  if (!comm::is_stall_folder(folder)) note_ends(logs);
  return logs;
}

const char* name_of(comm::StallCause cause) {
  constexpr const char* kNames[] = {"none", "late", "dead", "circle", "difference", "transport"};
  return kNames[static_cast<size_t>(cause)];
}

nlohmann::ordered_json to_json(const FlightLog& log, size_t entries) {
  nlohmann::ordered_json rank = {{"rank", log.header.rank},
                                 {"host", log.header.host.text()},
                                 {"process", log.header.process},
                                 {"phase", log.header.phase.text()},
                                 {"step", log.header.step},
                                 {"ended", log.header.left != 0},
                                 {"silent_seconds", log.silent_seconds},
                                 {"stack", log.stack}};
  for (const auto& group : log.groups) {
    rank["groups"].push_back(
        {{"name", group.name.text()}, {"ranks", group.ranks.text()}, {"collectives", group.position}});
  }
  for (size_t i = log.entries.size() - std::min(entries, log.entries.size()); i < log.entries.size(); ++i) {
    const FlightEntry& entry = log.entries[i];
    rank["operations"].push_back({{"operation", operation_text(entry, log.groups[entry.group])},
                                  {"state", comm::name_of(entry.state)},
                                  {"issued_ns", entry.issued_ns},
                                  {"waited_ns", entry.waited_ns},
                                  {"ended_ns", entry.ended_ns}});
  }
  return rank;
}

int print(const ExplainOptions& options, std::ostream& out) {
  const fs::path folder = folder_with_records(options.folder);
  const std::vector<FlightLog> logs = read_records(folder);
  const int world_size = logs.front().header.world_size;
  const comm::StallExplanation stall = explain_stall(logs, world_size, dead_after(options, logs));
  if (options.json) {
    nlohmann::ordered_json all = {{"folder", folder.string()},     {"world_size", world_size},
                                  {"cause", name_of(stall.cause)}, {"sentence", stall.sentence},
                                  {"guilty", stall.guilty},        {"ranks", nlohmann::ordered_json::array()}};
    for (const FlightLog& log : logs) all["ranks"].push_back(to_json(log, options.entries));
    out << all.dump(2) << '\n';
    return 0;
  }
  out << folder.string() << ": " << logs.size() << " of " << world_size << " ranks\n\n"
      << (stall.cause == comm::StallCause::kNone
              ? "no rank waits: these records were left by ranks that ended or failed, or they train"
              : stall.sentence)
      << "\n\n";
  for (const FlightLog& log : logs) out << comm::rank_report(log, options.entries) << '\n';
  return 0;
}

// Prints to `out`, errors to `err`. Returns 0, or 2 when there are no records or one cannot be read.
int explain(const ExplainOptions& options, std::ostream& out, std::ostream& err) {
  try {
    return print(options, out);
  } catch (const std::exception& error) {
    err << "ds-tool explain: " << shown_message(error.what()) << '\n';
    return kCannotRead;
  }
}

}  // namespace

void add_explain(CLI::App& app, Command& chosen) {
  const auto options = std::make_shared<ExplainOptions>();
  CLI::App* flags =
      app.add_subcommand("explain",
                         "Says from flight records why ranks wait for each other, and what each did last. "
                         "Exit code 0: done; 2: there are no records.");
  flags
      ->add_option("folder", options->folder,
                   "Folder of records, as reports of stalls name it; by default that of the newest job of this host")
      ->type_name("DIR");
  flags->add_option("--entries", options->entries, "Operations to print of each rank")
      ->transform(whole_number(0, kMostEntries))
      ->capture_default_str()
      ->type_name("N");
  flags
      ->add_option("--dead_after", options->dead_after,
                   "Seconds without a heartbeat after which a rank is dead [as in the job, else 5]")
      ->check(real_number(0))
      ->type_name("S");
  flags->add_flag("--json", options->json, "Print one JSON object");
  flags->callback([options, &chosen] { chosen = [options] { return explain(*options, std::cout, std::cerr); }; });
}

}  // namespace ds::tool
