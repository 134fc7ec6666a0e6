// Folders as transformers and PEFT write and read them.
#pragma once

#include <ATen/core/Tensor.h>
#include <dsengine/engine.h>

#include <cstdint>
#include <string>

#include "llama_model.h"

namespace llama {

// Makes OUT, and copies config.json with the dtype of the weights, and files of the tokenizer, from another folder.
void copy_config(const std::string& from, const std::string& out, at::ScalarType dtype);

// Writes a folder with weights that start_value() draws, for the model of a config.json.
void write_new(const std::string& config_file, const std::string& out, uint64_t seed);

// Writes the weights that the engine has trained, as a folder for transformers: config.json and model.safetensors. No
// rank gathers the model. Collective.
void export_model(ds::engine::Engine& engine, const std::string& base, const std::string& out);
// Writes the adapters that it has trained, as a folder for PEFT. Collective.
void export_adapter(ds::engine::Engine& engine, const LoraConfig& lora, const std::string& base,
                    const std::string& out);

// The options of initialize() that fill the model from `base`, and adapters from the folder `adapter`, or where it is
// empty with start values, for a model on the meta device. What else the files lack is an error.
void set_weights(ds::engine::InitializeOptions& options, const Build& build, const std::string& base,
                 const std::string& adapter);

enum class Merge : uint8_t { kAdd, kTakeOut };

// Adds the products of an adapter's matrices to the weights of `base`, or takes them out again: W + scale B A in
// float32. OUT has the files that `base` has, and one of them is in memory at a time.
void merge_adapter(const std::string& base, const std::string& adapter, const std::string& out, Merge way);

}  // namespace llama
