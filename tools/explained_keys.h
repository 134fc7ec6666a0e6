// What the keys of a ds_config do, one by one, in the words of its reference. Torch-free.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tools/key_reference.h"

namespace ds::tool {

struct ExplainedKey {
  std::string path;  // "zero_optimization.stage"
  std::string text;  // one or two sentences: what it does, and what holds without it
};

// One for each value that is no object, in the order of the file. `written`: a ds_config as it was read.
std::vector<ExplainedKey> explain_keys(const nlohmann::ordered_json& written, const KeyReference& reference);

}  // namespace ds::tool
