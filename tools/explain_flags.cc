#include <iostream>
#include <memory>

#include "launcher/command_line/number_flags.h"
#include "tools/commands.h"
#include "tools/explain_command.h"
#include "tools/flag_limits.h"

namespace ds::tool {

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
