// ds-tool bench: bandwidth of collectives between the ranks of a job, as nccl-tests measures and prints it.
#pragma once

#include <ostream>

namespace ds::tool::bench {

// The command line, on every rank. Rank 0 prints to `out`; errors go to `err`. Returns the exit code: 0 fine, 1 a
// result was wrong, 2 wrong usage, or ranks could not talk.
int run(int argc, const char* const* argv, std::ostream& out, std::ostream& err);

}  // namespace ds::tool::bench
