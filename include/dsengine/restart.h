// A new start that ds-launch would like, to take in hosts that have come back (docs/launching.md).
#pragma once

#include "core/restart_request.h"
#include "dsengine/engine.h"

namespace ds::engine {

// To be asked after a save, by all ranks: collective, one number. When it says true, wait_for_checkpoint() and end all
// ranks with kRestartExitCode; the ranks that are started next go on from the checkpoint. False without ds-launch.
bool restart_wanted(Engine& engine);

}  // namespace ds::engine
