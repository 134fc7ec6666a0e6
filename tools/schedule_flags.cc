#include <sys/ioctl.h>
#include <unistd.h>

#include <iostream>
#include <memory>

#include "launcher/command_line/number_flags.h"
#include "tools/commands.h"
#include "tools/flag_limits.h"
#include "tools/schedule_command.h"

namespace ds::tool {
namespace {

constexpr int kPlainWidth = 120;  // of what is no terminal

// Colour and the whole width on a terminal alone.
void fit_to_terminal(ScheduleOptions& options) {
  winsize size{};
  options.color = isatty(STDOUT_FILENO) == 1;
  const bool known = options.color && ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  options.width = known ? size.ws_col : kPlainWidth;
}

}  // namespace

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
