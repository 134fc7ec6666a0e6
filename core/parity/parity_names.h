// The environment variables and files by which `ds-launch parity` and the engines of the programs that it starts work
// together. Torch-free.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "core/text.h"

namespace ds {

// The folder that the run writes to. Set: an engine records its steps, and ends the process after the last of them.
inline constexpr const char* kParityFolderVariable = "DS_PARITY_FOLDER";
// The ds_config that initialize() reads in place of the one that the program names.
inline constexpr const char* kParityConfigVariable = "DS_PARITY_CONFIG";
// The number of steps to record.
inline constexpr const char* kParityStepsVariable = "DS_PARITY_STEPS";
// The folder of a run that is over: this one rank takes the batches of all its data-parallel ranks, in turn, by
// accumulation. Unset: the config runs as it is.
inline constexpr const char* kParityLikeVariable = "DS_PARITY_LIKE";

// Returns the path of one of the files below in the folder of a run.
inline std::string parity_path(const std::string& folder, const std::string& file) {
  return (std::filesystem::path(folder) / file).string();
}

// JSON: "data_ranks", "micro_batch", "accumulation", "tensor_ranks", "stage", "dtype".
inline constexpr const char* kParityLayoutFile = "layout.json";
// A JSON line for each step of a data-parallel rank: "step", "losses" of its micro-batches and, the same on all ranks,
// "loss" (null: not known), "norm" (null: none) and "applied".
inline std::string parity_losses_file(int64_t data_rank) { return cat("losses_", data_rank, ".jsonl"); }
// The tensors "gradient/NAME" and "weight/NAME" of a step, counted from 1. Step 0 has the weights at the start alone.
inline std::string parity_step_file(int64_t step) { return cat("step_", step, ".safetensors"); }
// The frozen parameters and buffers at the start, by name. The run on one rank takes over these, and the weights of
// step 0.
inline constexpr const char* kParityStartFile = "start.safetensors";
inline constexpr const char* kParityGradient = "gradient/";
inline constexpr const char* kParityWeight = "weight/";

}  // namespace ds
