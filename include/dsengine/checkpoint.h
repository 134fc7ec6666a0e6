// What Engine::save_checkpoint and Engine::load_checkpoint take and return.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

namespace ds::engine {

// Names and defaults are DeepSpeed's, where it has them.
struct SaveOptions {
  nlohmann::json client_state = nlohmann::json::object();  // the program's own; rank 0's is kept
  bool save_latest = true;                                 // <save_dir>/latest names this tag afterwards
  bool exclude_frozen_parameters = false;
  // Returns as soon as the state may be read beside training; by default checkpoint.writer.decoupled.
  std::optional<bool> asynchronous;
  // Whole checkpoints that stay in save_dir, the latest steps; 0: all. By default checkpoint.keep_last.
  std::optional<int64_t> keep_last;
};

struct LoadOptions {
  bool load_module_strict = true;  // an error names parameters and buffers that only one of the two has
  bool load_optimizer_states = true;
  bool load_lr_scheduler_states = true;
  bool load_module_only = false;  // weights and buffers; counters, optimizer and all else stay
};

struct LoadedCheckpoint {
  std::string path;  // of the tag's folder; empty: there was none
  std::string tag;
  nlohmann::json client_state = nlohmann::json::object();
  explicit operator bool() const { return !path.empty(); }
};

}  // namespace ds::engine
