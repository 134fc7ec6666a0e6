// Where the tensors of a checkpoint of DeepSpeed lie. Follows what its zero_to_fp32 and its optimizers' load_state_dict
// expect (github.com/deepspeedai/DeepSpeed: deepspeed/utils/zero_to_fp32.py, runtime/zero).
//
// Stages 1 and 2: the trained parameters of a group lie one after the other in a flat tensor, which is padded and cut
// into one part per rank. Stage 3: every parameter is cut into one part of ceil(numel / ranks) elements per rank, the
// last ones padded; a rank's parts lie one after the other, over all its sub-groups. Moments lie as the masters do.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "checkpoint/deepspeed/saved_checkpoint.h"
#include "checkpoint/deepspeed/stored_tensors.h"

namespace ds::checkpoint {

struct SavedLayout {
  StoredTensors tensors;                       // under the paths of dsengine/checkpoint.h
  std::map<std::string, std::string> aliases;  // further name -> name
};

// Throws IoError naming the file, for sizes that do not add up and for what cannot be told from the files.
SavedLayout lay_out(const SavedCheckpoint& saved);

// Its parts: stages 1 to 3, and stage 0.
void lay_out_partitioned(const SavedCheckpoint& saved, SavedLayout& layout);
void lay_out_whole(const SavedCheckpoint& saved, SavedLayout& layout);

}  // namespace ds::checkpoint
