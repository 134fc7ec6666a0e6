// A new start that ds-launch would like, to take in hosts that have come back (docs/launching.md). Torch-free.
//
//   engine->save_checkpoint(dir);
//   if (ds::engine::restart_wanted(*engine)) {
//     engine->wait_for_checkpoint();
//     return ds::kRestartExitCode;
//   }
//
// A program that ends so with the exit code below on all ranks has not failed: ds-launch starts it again.
#pragma once

namespace ds {

inline constexpr int kRestartExitCode = 75;  // EX_TEMPFAIL: try again

}  // namespace ds

namespace ds::engine {

class Engine;

// To be asked after a save, by all ranks: collective, one number. When it says true, wait_for_checkpoint() and end all
// ranks with kRestartExitCode; the ranks that are started next go on from the checkpoint. False without ds-launch.
// Throws CommError.
bool restart_wanted(Engine& engine);

}  // namespace ds::engine
