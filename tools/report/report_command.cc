// `ds-tool report`: what a bug report needs to say of the machine. Torch-free; LibTorch and the driver are asked by
// child processes, whose failures are part of the report.
#include <ctime>
#include <filesystem>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "comm/meeting/environment_reader.h"
#include "comm/meeting/host_identity.h"
#include "core/check.h"
#include "launcher/machine/accelerators.h"
#include "tools/commands.h"
#include "tools/report/environment.h"
#include "tools/report/libraries.h"
#include "tools/report/limits.h"
#include "tools/report/network.h"
#include "tools/report/processor.h"
#include "tools/report/section.h"
#include "tools/report/versions.h"
#include "tools/report/warnings.h"

namespace ds::tool::report {
namespace {

using nlohmann::ordered_json;

constexpr int kFine = 0;
constexpr int kFailed = 2;

struct ReportOptions {
  bool json = false;          // one JSON object instead of text
  bool devices_only = false;  // in the child that asks the driver: see ask_devices()
};

Machine look() {
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe");
  Machine machine{.processor = read_processor(),
                  .limits = read_limits(),
                  .interfaces = read_interfaces(),
                  .libraries = ask_libraries(program.parent_path()),
                  .devices = ask_devices(program, {"report", "--devices_only"}),
                  .variables = comm::process_environment};
  machine.gloo = gloo_choice(machine.interfaces, comm::process_environment, comm::address_towards);
  machine.nccl = nccl_choice(machine.interfaces, comm::process_environment);
  return machine;
}

Section describe_host() {
  Section section("host");
  section.add_text("name", comm::host_name());
  section.add_text("shared_memory_domain", comm::shared_memory_domain());
  const std::time_t now = std::time(nullptr);
  char text[32] = "";
  std::tm utc{};
  if (::gmtime_r(&now, &utc) != nullptr) std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &utc);
  section.add_text("time", text);
  return section;
}

std::vector<Section> sections_of(const Machine& machine) {
  return {describe_host(),
          describe_versions(machine.libraries),
          describe_devices(machine.devices, machine.libraries, launcher::count_gpu_devices()),
          describe(machine.processor),
          describe_backends(machine.libraries),
          describe(machine.interfaces, machine.gloo, machine.nccl),
          describe(machine.limits),
          describe(telling_variables(own_environment()))};
}

void print_text(const std::vector<Section>& sections, const std::vector<std::string>& warnings, std::ostream& out) {
  for (const Section& section : sections) {
    print(section, out);
    out << '\n';
  }
  out << "warnings\n";
  if (warnings.empty()) out << "  none\n";
  for (const std::string& warning : warnings) out << "  - " << warning << '\n';
}

void print_json(const std::vector<Section>& sections, const std::vector<std::string>& warnings, std::ostream& out) {
  ordered_json json = ordered_json::object();
  for (const Section& section : sections) json[section.name()] = to_json(section);
  json["warnings"] = warnings;
  out << json.dump(2, ' ', false, ordered_json::error_handler_t::replace) << '\n';
}

// Prints to `out`, errors to `err`. Returns the exit code: 0, or 2 when it cannot be written.
int run(const ReportOptions& options, std::ostream& out, std::ostream& err) {
  try {
    if (options.devices_only) {
      out << ask_nvml().dump(-1, ' ', false, ordered_json::error_handler_t::replace) << std::endl;
      return out.good() ? kFine : kFailed;
    }
    const Machine machine = look();
    (options.json ? print_json : print_text)(sections_of(machine), warnings_of(machine), out);
    out.flush();
    require<IoError>(out.good(), "the report cannot be written; check the disk or the program that reads it");
    return kFine;
  } catch (const std::exception& error) {
    err << "ds-tool report: " << error.what() << '\n';
    return kFailed;
  }
}

}  // namespace
}  // namespace ds::tool::report

void ds::tool::add_report(CLI::App& app, Command& chosen) {
  const auto options = std::make_shared<report::ReportOptions>();
  CLI::App* flags =
      app.add_subcommand("report",
                         "Describes this machine for a bug report: versions, devices, CPUs, backends, network, limits, "
                         "environment, and what to change. Sends nothing anywhere.");
  flags->add_flag("--json", options->json, "Print one JSON object");
  flags->add_flag("--devices_only", options->devices_only)->group("");  // for the child that asks the driver
  flags->callback([options, &chosen] { chosen = [options] { return report::run(*options, std::cout, std::cerr); }; });
}
