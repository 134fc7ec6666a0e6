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
// The folder of the first run, which is over, and whose start values this run takes over. Without the variable below,
// this one rank takes the batches of all its data-parallel ranks, in turn, by accumulation. Unset: this is the first.
inline constexpr const char* kParityLikeVariable = "DS_PARITY_LIKE";
// The same layout runs once more with its batches in another order, kParityOrderBatches or kParityOrderSamples.
inline constexpr const char* kParityOrderVariable = "DS_PARITY_ORDER";
// The micro-batches of a step, with their random numbers, come to other ranks and in another order.
inline constexpr const char* kParityOrderBatches = "batches";
// Beside that, the samples of a batch of the engine's loader come the other way round.
inline constexpr const char* kParityOrderSamples = "samples";
// Set: the first run writes down the batches that the engine sees, and the others read them.
inline constexpr const char* kParityBatchesVariable = "DS_PARITY_BATCHES";
// Set: the run on one rank takes the micro-batches that the data-parallel ranks take side by side as one.
inline constexpr const char* kParityGlobalBatchesVariable = "DS_PARITY_GLOBAL_BATCHES";

// Returns the path of one of the files below in the folder of a run.
inline std::string parity_path(const std::string& folder, const std::string& file) {
  return (std::filesystem::path(folder) / file).string();
}

// JSON: "data_ranks", "micro_batch", "accumulation", "tensor_ranks", "pipe_ranks", "stage", "dtype".
inline constexpr const char* kParityLayoutFile = "layout.json";
// A JSON line for each step of a data-parallel rank: "step", "losses" of its micro-batches, "draws" (whether it has
// drawn random numbers so far), "batches" (the tensors that it has written down or read) and, the same on all ranks,
// "loss" (null: not known), "norm" (null: none) and "applied".
inline std::string parity_losses_file(int64_t data_rank) { return cat("losses_", data_rank, ".jsonl"); }
// The tensors "gradient/NAME" and "weight/NAME" of a step, counted from 1, that a rank of the pipeline has; without a
// pipeline rank 0 has all. Step 0 has the weights at the start alone.
inline std::string parity_step_file(int64_t step, int64_t pipe_rank) {
  return cat("step_", step, "_of_", pipe_rank, ".safetensors");
}
// The frozen parameters and buffers at the start, by name. The other runs take over these, and the weights of step 0.
inline std::string parity_start_file(int64_t pipe_rank) { return cat("start_of_", pipe_rank, ".safetensors"); }
// One tensor of a micro-batch, counted from 0 over all steps, of a data-parallel rank. `what`: "input_0", "label_1".
inline std::string parity_batch_file(int64_t data_rank, int64_t micro_batch, const std::string& what) {
  return cat("batch_", data_rank, '_', micro_batch, '_', what, ".safetensors");
}
inline constexpr const char* kParityBatchTensor = "values";
// The states of LibTorch's default generators before a micro-batch.
inline std::string parity_generator_file(int64_t data_rank, int64_t pipe_rank, int64_t micro_batch) {
  return cat("generators_", data_rank, '_', pipe_rank, '_', micro_batch, ".safetensors");
}
inline constexpr const char* kParityGradient = "gradient/";
inline constexpr const char* kParityWeight = "weight/";

}  // namespace ds
