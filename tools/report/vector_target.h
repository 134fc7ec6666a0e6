// The instruction set that the vector kernels choose on this machine.
#pragma once

#include <string>
#include <vector>

namespace ds::tool::report {

// Of those that the kernels are compiled for ("AVX3_SPR", "AVX2", "SSE2"), the best that runs here.
std::string vector_target();
// All of them that run here, the best first.
std::vector<std::string> vector_targets();

}  // namespace ds::tool::report
