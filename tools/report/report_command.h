// `ds-tool report`: what a bug report needs to say of the machine. Torch-free; LibTorch and the driver are asked by
// child processes, whose failures are part of the report.
#pragma once

#include <ostream>

namespace ds::tool::report {

struct ReportOptions {
  bool json = false;          // one JSON object instead of text
  bool devices_only = false;  // the child that asks the driver: see libraries.h
};

// Prints to `out`, errors to `err`. Returns the exit code: 0, or 2 when it cannot be written.
int run(const ReportOptions& options, std::ostream& out, std::ostream& err);

}  // namespace ds::tool::report
