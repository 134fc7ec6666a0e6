// How this program was built.
#pragma once

#include <string>

namespace ds::tool::report {

struct BuildFacts {
  std::string version;   // of dsengine
  std::string revision;  // of git, with "-dirty" where files differed; empty when the sources were no git tree
  std::string compiler;  // "GNU 12.2.0"
  std::string type;      // "Release"
  std::string cuda;      // "CUDA 13.0.88, NCCL 2.28.9" when libdsengine_cuda was built beside it, else empty
};

BuildFacts build_facts();

}  // namespace ds::tool::report
