#include "tests/fuzz/readers.h"

#include <algorithm>
#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "comm/flight/flight_log.h"
#include "comm/flight/stall_explanation.h"
#include "comm/meeting/arrival.h"
#include "comm/meeting/started_place.h"
#include "config/plan/plan.h"
#include "core/check.h"
#include "core/json/hjson.h"
#include "core/number_text.h"
#include "core/secret/job_secret.h"
#include "dsengine/config.h"
#include "launcher/command_line/host_list.h"
#include "launcher/command_line/options.h"
#include "launcher/protocol/message.h"
#include "pipeline/schedule/schedule_file.h"
#include "tests/fuzz/refusing.h"
#include "tools/commands.h"

namespace ds::fuzz {
namespace {

std::vector<std::string> lines_of(std::string_view bytes) {
  std::vector<std::string> lines;
  while (!bytes.empty()) {
    const size_t end = std::min(bytes.find('\n'), bytes.size());
    lines.emplace_back(bytes.substr(0, end));
    bytes.remove_prefix(std::min(end + 1, bytes.size()));
  }
  return lines;
}

void resolve(const engine::config::ConfigSource& source, bool assume) {
  engine::config::ParseOptions options{.world_size = 4};
  if (assume) options.assumed_values = engine::config::hugging_face_values();
  const engine::config::DsConfig config = engine::config::parse(source, options);
  static_cast<void>(engine::config::to_json(config).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
  const engine::Topology topology{
      .world_size = 4, .dp = config.dp_world_size, .pipe = config.pipeline.stages.value_or(1)};
  engine::make_plan(config, topology, {.parameters = 1'000'000, .pipeline_module = topology.pipe > 1});
}

}  // namespace

void read_config(std::string_view bytes) {
  refusing([&] {
    const HjsonDocument document = parse_hjson(bytes, "input");
    if (!document.root.is_object()) return;
    for (const bool assume : {false, true}) refusing([&] { resolve(document.root, assume); });
  });
}

void read_config_base64(std::string_view bytes) {
  // The alphabet alone: other text would name a file.
  static constexpr std::string_view kAlphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_==";
  std::string text = "ey";
  for (const char byte : bytes) text += kAlphabet[static_cast<unsigned char>(byte) % kAlphabet.size()];
  refusing([&] { resolve(text, false); });
}

void read_hosts(std::string_view bytes) {
  const size_t gap = bytes.find("\n\n");
  const std::string choice(gap == std::string_view::npos ? std::string_view() : bytes.substr(gap + 2));
  refusing([&] {
    const auto hosts = launcher::parse_hostfile(bytes.substr(0, gap), "hostfile");
    ensure(!hosts.empty(), "a hostfile without hosts is refused");
    for (const auto kind : {launcher::Choice::kInclude, launcher::Choice::kExclude}) {
      refusing([&] { static_cast<void>(launcher::choose_hosts(hosts, kind, choice)); });
    }
  });
}

void read_slurm(std::string_view bytes) {
  const std::string list(bytes);
  refusing([&] { ensure(!comm::first_slurm_host(list, "input").empty(), "an empty list is refused"); });
  for (const int node : {0, 1, 1000000}) {
    refusing([&] { static_cast<void>(comm::slurm_tasks_on_node(list, node, "input")); });
  }
}

void read_schedule(std::string_view bytes) {
  refusing([&] {
    const pipeline::Schedule schedule = pipeline::parse_schedule(std::string(bytes), "input.csv");
    static_cast<void>(pipeline::to_csv(schedule));
  });
}

void read_flight(std::string_view bytes) {
  const auto use = [](const comm::FlightLog& log) {
    static_cast<void>(comm::to_bytes(log));
    for (const comm::FlightEntry& entry : log.entries) {
      if (entry.group < log.groups.size()) static_cast<void>(comm::operation_text(entry, log.groups[entry.group]));
    }
    static_cast<void>(comm::explain_stall({log}, 4, 5));
  };
  refusing([&] { use(comm::log_from_bytes(std::string(bytes), "input")); });
  refusing([&] { use(comm::log_from_memory(bytes.data(), bytes.size(), "input")); });
}

void read_messages(std::string_view bytes) {
  for (const bool greeted : {false, true}) {
    refusing([&] {
      launcher::MessageReader reader(greeted);
      for (std::string_view rest = bytes; !rest.empty();) {
        const size_t piece = std::min<size_t>(rest.size(), 7);
        reader.feed(rest.substr(0, piece));
        rest.remove_prefix(piece);
        while (const auto message = reader.next()) static_cast<void>(launcher::encode(*message));
      }
    });
  }
}

void read_arguments(std::string_view bytes) {
  refusing([&] { static_cast<void>(launcher::parse_options(lines_of(bytes))); });
}

void read_tool_arguments(std::string_view bytes) {
  std::vector<std::string> words = lines_of(bytes);
  std::reverse(words.begin(), words.end());  // as CLI11 takes them
  CLI::App app("", "ds-tool");
  tool::Command chosen;
  for (const tool::AddCommand add :
       {tool::add_check, tool::add_explain, tool::add_report, tool::add_schedule, tool::add_simulate}) {
    add(app, chosen);
  }
  refusing([&] {
    try {
      app.parse(words);
    } catch (const CLI::ParseError&) {  // a refusal, or a call for help
    }
  });
}

void read_numbers(std::string_view bytes) {
  const auto whole = parse_whole_number(bytes);
  const auto finite = parse_finite_number(bytes);
  ensure(!whole || finite, "a whole number is a number");
}

void read_arrivals(std::string_view bytes) {
  const std::string text(bytes);
  refusing([&] {
    const comm::RankPlace place = comm::read_arrival(text, 1, 2, {});
    ensure(!comm::text_of(place).empty(), "a place has words");
    static_cast<void>(comm::read_arrival(comm::arrival_text(place, 1, 2, {}), 1, 2, {}));
  });
  bool believed = false;
  refusing([&] {
    static_cast<void>(comm::read_arrival(text, 1, 2, JobSecret("no fuzzer knows this one")));
    believed = true;
  });
  ensure(!believed, "nobody proves what he does not know");
}

}  // namespace ds::fuzz
