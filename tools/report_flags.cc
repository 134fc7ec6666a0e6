#include <iostream>
#include <memory>

#include "tools/commands.h"
#include "tools/report/report_command.h"

namespace ds::tool {

void add_report(CLI::App& app, Command& chosen) {
  const auto options = std::make_shared<report::ReportOptions>();
  CLI::App* flags =
      app.add_subcommand("report",
                         "Describes this machine for a bug report: versions, devices, CPUs, backends, network, limits, "
                         "environment, and what to change. Sends nothing anywhere.");
  flags->add_flag("--json", options->json, "Print one JSON object");
  flags->add_flag("--devices_only", options->devices_only)->group("");  // for the child that asks the driver
  flags->callback([options, &chosen] { chosen = [options] { return report::run(*options, std::cout, std::cerr); }; });
}

}  // namespace ds::tool
