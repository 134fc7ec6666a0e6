#include <ds_revision.h>  // written by the build: cmake/WriteRevision.cmake

#include "tools/report/versions.h"

namespace ds::tool::report {

BuildFacts build_facts() {
  return {.version = DS_VERSION,
          .revision = DS_REVISION,
          .compiler = DS_COMPILER,
          .type = DS_BUILD_TYPE,
          .cuda = DS_CUDA_PARTS};
}

}  // namespace ds::tool::report
