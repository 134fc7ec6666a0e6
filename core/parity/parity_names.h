// What `ds-launch parity` and the engines of the programs that it starts have agreed on: variables of the environment
// and files. Torch-free.
#pragma once

#include <cstdint>
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

// JSON: "data_ranks", "micro_batch", "accumulation", "tensor_ranks", "stage", "dtype".
inline constexpr const char* kParityLayoutFile = "layout.json";
// A JSON line for each step of a data-parallel rank: "step", "losses" of its micro-batches and, the same on all ranks,
// "loss" (null: not known), "norm" (null: none) and "applied".
inline std::string parity_losses_file(int64_t data_rank) { return cat("losses_", data_rank, ".jsonl"); }
// Tensors "gradient/NAME" and "weight/NAME" of a step, from 1; of step 0 the weights at the start.
inline std::string parity_step_file(int64_t step) { return cat("step_", step, ".safetensors"); }
// Frozen parameters and buffers at the start, by name: one rank takes over these, and the weights of step 0.
inline constexpr const char* kParityStartFile = "start.safetensors";
inline constexpr const char* kParityGradient = "gradient/";
inline constexpr const char* kParityWeight = "weight/";

}  // namespace ds
