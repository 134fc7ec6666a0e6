// Model weights in safetensors files as a checkpoint: one file, or a folder in Hugging Face's layout.
#pragma once

#include <memory>
#include <string>

#include "dsengine/weights.h"

namespace ds::checkpoint {

// `path`: a .safetensors file, or a folder with model.safetensors, or with model.safetensors.index.json ({"weight_map":
// {tensor: file}}) and the files it names; a folder with both is read as the single file, as Hugging Face does. Every
// tensor is a weight (the files do not tell buffers apart); aliases() are those that safetensors' save_model() notes in
// the metadata, state() is empty. Files are mapped, so only what is read is loaded.
//
// Throws IoError naming folder, file and tensor: nothing to read, a file of the index that is missing, a tensor that is
// in the index and not in its file or the other way round, or in two files.
std::unique_ptr<Source> open_weights(const std::string& path);

// Names of that layout.
inline constexpr const char* kWeightFile = "model.safetensors";
inline constexpr const char* kWeightIndex = "model.safetensors.index.json";
// "model-00002-of-00007.safetensors"; `number` counts from 1.
std::string shard_name(int64_t number, int64_t count);
// Whether `file` is such a name.
bool is_shard_name(const std::string& file);

}  // namespace ds::checkpoint
