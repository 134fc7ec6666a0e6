// Where the tensors of a checkpoint of DeepSpeed lie. Follows what its zero_to_fp32 and its optimizers' load_state_dict
// expect (github.com/deepspeedai/DeepSpeed: deepspeed/utils/zero_to_fp32.py, runtime/zero).
//
// Stages 1 and 2: the trained parameters of a group lie one after the other in a flat tensor, which is padded and cut
// into one part per rank. Stage 3: every parameter is cut into one part of ceil(numel / ranks) elements per rank, the
// last ones padded; a rank's parts lie one after the other, over all its sub-groups. Moments lie as the masters do.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/deepspeed/saved_checkpoint.h"
#include "checkpoint/deepspeed/stored_tensors.h"

namespace ds::checkpoint {

// Where the tensors of a checkpoint are stored.
struct SavedLayout {
  StoredTensors tensors;                       // under the paths of dsengine/checkpoint.h
  std::map<std::string, std::string> aliases;  // further name -> name
};

// Finds the tensors of a model-parallel rank in its files; of a pipeline's rank what it trains with ZeRO, by the names
// that DeepSpeed has for it, and without ZeRO nothing. Throws IoError naming the file, for sizes that do not add up and
// for what cannot be told from the files.
SavedLayout lay_out(const SavedCheckpoint& saved);

// The two halves of lay_out(): checkpoints of ZeRO stages 1 to 3, and of stage 0.
void lay_out_partitioned(const SavedCheckpoint& saved, SavedLayout& layout);
void lay_out_whole(const SavedCheckpoint& saved, SavedLayout& layout);

using Sizes = std::vector<int64_t>;

struct NamedSizes {
  std::string name;
  Sizes sizes;
};

// Finds out which parameter is which, where a file has only the order of parameters and their shapes: torch's
// optimizers number parameters by group, and a state dict names all of them, frozen ones too.
//
// `module`: names and sizes in the order of the module. groups[g]: sizes of the parameters of group g, in the order of
// the module too; nothing where they are unknown. Returns for each of them its index in `module`. What is left over is
// frozen. Throws IoError beginning with `where` when there is no such assignment, or more than one.
std::vector<std::vector<size_t>> match_parameters(const std::vector<NamedSizes>& module,
                                                  const std::vector<std::vector<std::optional<Sizes>>>& groups,
                                                  const std::string& where);

}  // namespace ds::checkpoint
