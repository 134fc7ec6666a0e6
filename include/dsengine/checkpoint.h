// What Engine::save_checkpoint and Engine::load_checkpoint take and return. Torch-free.
//
// Plain values that belong to the caller; nothing throws. Checkpoints without an engine: dsengine/weights.h.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

namespace ds::engine {

// What save_checkpoint(save_dir, tag, options) does.
//
// Writes all state to <save_dir>/<tag> (default: "global_step<N>"), each rank its part, in one piece or not at all: a
// folder under that name is complete and on the disk. Returns its path. Collective; save_dir must be seen by all hosts
// or, with checkpoint.use_node_local_storage, is the same on the ranks of a host, each of which reads there again.
// When a rank cannot write, all throw (that rank the cause, the others IoError) and what was in save_dir before is
// untouched.
// Asynchronous: returns at once; the state is copied beside the next forward and backward (the next update waits for
// the copy, which takes as much host memory as the rank's part) and written by a thread. Until the next update,
// change trained parameters in scopes of gathered_parameters() only: these wait. One save is in
// flight at a time. A failure is logged by the next save and thrown by wait_for_checkpoint().
//
// Names and defaults of the options are DeepSpeed's, where it has them.
struct SaveOptions {
  nlohmann::json client_state = nlohmann::json::object();  // the program's own; rank 0's is kept
  bool save_latest = true;                                 // <save_dir>/latest names this tag afterwards
  bool exclude_frozen_parameters = false;                  // no weights of parameters that are not trained
  // Returns as soon as the state may be read beside training; by default checkpoint.writer.decoupled.
  std::optional<bool> asynchronous;
  // Whole checkpoints that stay in save_dir, the latest steps; 0: all. By default checkpoint.keep_last.
  std::optional<int64_t> keep_last;
};

// What load_checkpoint(load_dir, tag, options) does.
//
// Goes on from <load_dir>/<tag>, written by any number of ranks at any stage, precision and offload, or by DeepSpeed.
// Without a tag: the one that `latest` names or, if that cannot be read, the whole one with the latest step, with an
// error in the log. Without any, nothing is loaded and the result is empty. Collective, between optimizer steps.
// Throws UsageError where the checkpoint does not fit the model or the optimizer, before anything is changed. Throws
// IoError, naming file and tensor, where it is damaged; if that is found when part was loaded, the engine refuses to
// go on until a load succeeds.
struct LoadOptions {
  bool load_module_strict = true;        // an error names parameters and buffers that only one of the two has
  bool load_optimizer_states = true;     // false: they stay as they are
  bool load_lr_scheduler_states = true;  // false: the schedule stays where it is
  bool load_module_only = false;         // weights and buffers; counters, optimizer and all else stay
};

// What was loaded; false where there was nothing to load.
struct LoadedCheckpoint {
  std::string path;                                        // of the tag's folder; empty: there was none
  std::string tag;                                         // the folder's name
  nlohmann::json client_state = nlohmann::json::object();  // what the save was given
  explicit operator bool() const { return !path.empty(); }
};

}  // namespace ds::engine
