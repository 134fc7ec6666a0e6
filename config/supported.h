// The keys that a ds_config may have, and the features that this build lacks. Torch-free.
#pragma once

#include <string>
#include <vector>

#include "dsengine/config.h"

namespace ds::engine::config {

struct UnsupportedFeature {
  std::string path;     // json path of the key that asks for it
  std::string message;  // what is missing and what to use instead
};

// Lists what the config enables and this build does not do. Empty: it runs.
std::vector<UnsupportedFeature> unsupported_features(const DsConfig& config);
// Throws ConfigError naming all of them.
void require_supported(const DsConfig& config);

// Dotted paths of all keys ("zero_optimization.stage", "optimizer.params.lr"), sorted.
std::vector<std::string> known_keys();

}  // namespace ds::engine::config
