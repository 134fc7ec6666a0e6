// ds-tool checkpoint inspect|verify|diff|convert: the command line, apart from main().
#pragma once

#include <ostream>

namespace ds::checkpoint::tool {

// Prints to `out`, errors to `err`. Returns the exit code: 0 fine (verify: whole, diff: equal), 1 verify: damaged,
// diff: different, 2 wrong usage, or something cannot be read or written.
int run(int argc, const char* const* argv, std::ostream& out, std::ostream& err);

}  // namespace ds::checkpoint::tool
