// Writing a checkpoint in another form: its weights in Hugging Face's layout or as a file of LibTorch, all of it in
// DeepSpeed's universal layout, or all of it again in dsengine's own.
//
// DeepSpeed's universal layout lets a program in Python go on with any number of ranks and ZeRO stage 1, 2 or 3
// ("checkpoint": {"load_universal": true} in its ds_config):
//
//   <save_dir>/<tag>/zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt    whole tensors, float32
//   <save_dir>/<tag>/zero/optimizer_state.pt                               settings of the groups, step
//   <save_dir>/<tag>/mp_rank_00_model_states.pt, zero_pp_rank_0_mp_rank_00_model_states.pt   counters, client_state
//   <save_dir>/latest_universal
//
// After DeepSpeed 0.19.8: checkpoint/universal_checkpoint.py, runtime/base_optimizer.py, runtime/zero/stage3.py.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "dsengine/checkpoint.h"

namespace ds::checkpoint {

struct ExportOptions {
  // The type in which floating-point tensors are written; none: as they are stored. Float16 refuses finite values that
  // become infinite in it.
  std::optional<at::ScalarType> dtype;
  bool widen = false;                       // without dtype: writes 16-bit floating-point tensors as float32
  int64_t max_shard_bytes = 5'000'000'000;  // data in one file; a larger tensor gets a file of its own
  // Name in the module -> name in the file; an empty one leaves the tensor out. None: unchanged.
  std::function<std::string(const std::string&)> rename;
  // Write the moving average of each trained weight in its place. UsageError for a source without one.
  bool ema = false;
  bool exclude_frozen = false;  // leave out weights that were not trained
  bool buffers = true;          // write buffers too
  // Write a tied parameter under each of its names, for loaders that want all of them. Otherwise once, under its first
  // name; the others are noted in the file's metadata, as by safetensors' save_model().
  bool keep_aliases = false;
};

struct ExportedFiles {
  std::vector<std::string> files;  // names in the folder, the index among them
  int64_t tensors = 0;
  int64_t bytes = 0;  // data in all files, without their headers
};

// Writes weights and buffers to `folder` (made when missing): model.safetensors if all fits max_shard_bytes, else
// model-00001-of-0000N.safetensors and model.safetensors.index.json, tensors in the order of their names. Memory: parts
// of 16 MiB of one tensor at a time.
//
// All data is written to temporary files first; a failure until then (a damaged source, a full disk) leaves the folder
// as it was. Then an older index is removed, the files take their names, the new index follows, and what an older
// export left (model.safetensors, shards) is removed. A crash in between leaves the old single file, the new
// one, or shards without index, which no loader takes.
//
// Throws IoError (source, disk, a value beyond float16), UsageError (two tensors of one name after renaming, nothing to
// write, no average of a trained weight).
ExportedFiles export_weights(Source& source, const std::string& folder, const ExportOptions& options = {});

// Writes weights and buffers to `path` as torch::save(model, path) does, for torch::load(model, path) of plain
// LibTorch, whose model has to have the dtypes of the file. Tied parameters are written under each of their names, and
// max_shard_bytes has no meaning. `empty_modules`: the modules without tensors in them, which LibTorch looks for;
// `rename` applies to them too. All tensors are in memory at once. Throws IoError and UsageError as export_weights().
ExportedFiles export_module(Source& source, const std::string& path, const ExportOptions& options,
                            const std::vector<std::string>& empty_modules);

// Writes any checkpoint again in dsengine's format, as `ranks` ranks would have written it. `folder`: <save_dir>/<tag>;
// <save_dir>/latest then names it. Goes tensor by tensor: at most one piece is in memory. Throws IoError.
void rewrite(Source& source, const std::string& folder, int ranks = 1);

// Writes a checkpoint in DeepSpeed's universal layout. `folder`: <save_dir>/<tag>. It appears complete or not at all;
// one tensor at a time is in memory. Adam and AdamW only: throws UsageError for a source without optimizer or with one
// that keeps other states. Throws IoError.
//
// What DeepSpeed does not take from this layout, the program has to provide: frozen weights and buffers (written to the
// model states all the same, under "module"), the loss scale of float16, and, at stage 3, settings of groups other than
// the first.
void export_universal(Source& source, const std::string& folder);

}  // namespace ds::checkpoint
