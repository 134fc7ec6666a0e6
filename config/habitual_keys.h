// Keys that people write from habit: of other trainers, of torch's arguments, of their own programs. A ds_config has
// none of them, so that training would go on without what they say. Torch-free.
#pragma once

#include <string>
#include <vector>

namespace ds::engine::config {

// What to write in place of the key at a JSON pointer ("/learning_rate", "/zero_optimization/offload"): "write ...", or
// where it belongs. Empty: not known.
std::string meaning_of_key(const std::string& pointer);

// All of them, as paths ("zero_optimization.offload") without '_' and '-' in the key, for tests.
std::vector<std::string> habitual_keys();

}  // namespace ds::engine::config
