// `ds-tool explain`: why the ranks of a job wait or failed, from their flight records. Torch-free.
#pragma once

#include <cstddef>
#include <optional>
#include <ostream>
#include <string>

namespace ds::tool {

struct ExplainOptions {
  std::string folder;  // of records (rankN.flight), or of several stalls; empty: of the newest job on this host
  size_t entries = 5;  // of each rank
  std::optional<double> dead_after;  // seconds without a heartbeat; empty: as the job had it, else 5
  bool json = false;
};

// Prints to `out`, errors to `err`. Returns 0, or 2 when there are no records or one cannot be read.
int explain(const ExplainOptions& options, std::ostream& out, std::ostream& err);

}  // namespace ds::tool
