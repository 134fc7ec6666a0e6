#include "dsengine/profiling.h"

#include "core/check.h"
#include "engine/engine_impl.h"

namespace ds::engine {

std::optional<profiling::FlopsProfile> flops_profile(Engine& engine) {
  const Reporter& reporter = *EngineAccess::impl_of(engine).reporter;
  require(reporter.flops() != nullptr,
          "flops_profile: expected a ds_config with \"flops_profiler\": {\"enabled\": true}, found none; "
          "profiling::profile_flops counts without an engine");
  return reporter.flops()->profile();
}

}  // namespace ds::engine
