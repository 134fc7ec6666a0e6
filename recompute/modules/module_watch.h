// Sees the operators of a thread, finds which chosen module they are of, and records them.
//
// A boxed fallback under a key above all others (kWatchKey), which a thread with chosen modules has in its set.
// LibTorch's autograd engine is asked for hooks of saved tensors; ours answers for it and leaves all else to it.
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

#include "dsengine/module_checkpointing.h"

namespace ds::recompute {

struct ChosenModule {
  std::string name;
  std::shared_ptr<torch::nn::Module> module;
};

// On this thread. The parameters of each one's tree are known from now on, until `owner` ends (null: until they do).
void watch_modules(const std::vector<ChosenModule>& modules, const ModuleCheckpointOptions& options,
                   const std::shared_ptr<const void>& owner);
void forget_parameters(const torch::nn::Module& module);
ModuleCheckpointStatistics take_watch_statistics();

// Throws UsageError where the process or the thread cannot be watched.
void require_watchable();

}  // namespace ds::recompute
