// `ds-tool trace`: joins the traces of ranks, and checks them. Torch-free.
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "core/check.h"
#include "core/files/atomic_file.h"
#include "core/shown_text.h"
#include "core/text.h"
#include "tools/commands.h"
#include "tools/trace_events.h"

namespace ds::tool {
namespace {

constexpr int kFailed = 2;

struct TraceOptions {
  std::vector<std::string> files;
  std::string output;
};

int merge(const TraceOptions& options) {
  std::vector<TraceFile> files;
  for (const std::string& path : options.files) files.push_back(read_trace_file(path));
  write_whole_file(options.output, merge_traces(files).dump(), /*durable=*/false);
  std::cout << options.output << ": " << files.size() << " ranks; open it in ui.perfetto.dev\n";
  return 0;
}

int check(const TraceOptions& options) {
  int result = 0;
  for (const std::string& path : options.files) {
    const TraceSummary summary = check_trace(read_trace_file(path).trace);
    std::cout << path << ": " << summary.spans << " spans, " << summary.steps << " steps";
    if (summary.steps > 0)
      std::cout << ", of which spans cover at least " << fixed(summary.least_cover * 100, 1) << " %";
    for (const auto& [kind, bytes] : summary.sent_bytes) std::cout << "; " << kind << " sent " << bytes << " bytes";
    std::cout << '\n';
    for (const std::string& mistake : summary.mistakes) std::cout << "  " << shown_message(mistake) << '\n';
    if (!summary.mistakes.empty()) result = 1;
  }
  return result;
}

// Returns what `run` returns, or 2 with a message where it throws.
int guarded(int (*run)(const TraceOptions&), const TraceOptions& options) {
  try {
    return run(options);
  } catch (const std::exception& error) {
    std::cerr << "ds-tool trace: " << shown_message(error.what()) << '\n';
    return kFailed;
  }
}

}  // namespace

void add_trace(CLI::App& app, Command& chosen) {
  const auto options = std::make_shared<TraceOptions>();
  CLI::App* trace = app.add_subcommand("trace", "Joins and checks traces of LibTorch's profiler: merge, check.");
  trace->require_subcommand(1);
  CLI::App* merges = trace->add_subcommand(
      "merge", "Joins the traces of all ranks into one file. Exit code 0: it is written; 2: it is not.");
  merges->add_option("files", options->files, "Traces, one for each rank")->required()->type_name("FILE");
  merges->add_option("-o,--output", options->output, "File to write")->required()->type_name("FILE");
  merges->callback([options, &chosen] { chosen = [options] { return guarded(&merge, *options); }; });
  CLI::App* checks = trace->add_subcommand(
      "check",
      "Checks the format of traces and whether spans nest, and prints steps and bytes. Exit code 0: sound; "
      "1: not; 2: a file cannot be read.");
  checks->add_option("files", options->files, "Traces")->required()->type_name("FILE");
  checks->callback([options, &chosen] { chosen = [options] { return guarded(&check, *options); }; });
}

}  // namespace ds::tool
