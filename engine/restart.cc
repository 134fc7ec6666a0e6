#include "dsengine/launch.h"

#include <unistd.h>

#include <cstdlib>

#include "core/restart_request.h"
#include "dsengine/engine.h"
#include "model/agreement/shared_failure.h"

namespace ds::engine {

bool restart_wanted(Engine& engine) {
  const char* file = std::getenv(kRestartFileVariable);
  const bool seen = file != nullptr && access(file, F_OK) == 0;
  // The hosts hear of it one after the other.
  return largest_of_ranks(seen ? 1 : 0, engine.device(), engine.world(), "is a restart wanted") > 0;
}

}  // namespace ds::engine
