// `ds-tool checkpoint diff`: what differs between two checkpoints, whatever their formats and numbers of ranks.
#pragma once

#include <ostream>

#include "dsengine/checkpoint.h"

namespace ds::checkpoint::tool {

struct DiffOptions {
  double tolerance = 0;       // the largest absolute difference of two values that count as equal
  bool weights_only = false;  // weights and buffers alone; no counters, no optimizer
};

// Prints names that one side lacks, other shapes and dtypes, and for each tensor whose values differ the largest
// absolute difference and the largest relative one (to the larger magnitude of the two); then counters, optimizer
// settings and client_state. World size, stage and config are printed, not counted. Returns whether both are equal
// within the tolerance; dtypes may differ when values do not. Reads both in parts. Throws IoError.
bool diff(Source& a, Source& b, const DiffOptions& options, std::ostream& out);

}  // namespace ds::checkpoint::tool
