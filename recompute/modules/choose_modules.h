// apply_activation_checkpointing() for whoever chooses on somebody's behalf.
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

#include "dsengine/module_checkpointing.h"

namespace ds::recompute {

// Chooses modules as apply_activation_checkpointing() does, but the choice ends when `owner` does, on whatever thread
// that is; null: with the modules.
std::vector<std::string> choose_modules(torch::nn::Module& module, const ModulePredicate& predicate,
                                        const ModuleCheckpointOptions& options,
                                        const std::shared_ptr<const void>& owner);

}  // namespace ds::recompute
