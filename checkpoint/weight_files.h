// Names of the files of weights in Hugging Face's layout; dsengine/checkpoint.h reads and writes them.
#pragma once

#include <cstdint>
#include <string>

namespace ds::checkpoint {

inline constexpr const char* kWeightIndex = "model.safetensors.index.json";
// "model-00002-of-00007.safetensors"; `number` counts from 1.
std::string shard_name(int64_t number, int64_t count);
// Whether `file` is such a name.
bool is_shard_name(const std::string& file);

}  // namespace ds::checkpoint
