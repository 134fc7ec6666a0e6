// The opened files of one tag of DeepSpeed, checked against one another.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/deepspeed/saved_files.h"
#include "checkpoint/pickle/pickle_field.h"
#include "checkpoint/pickle/torch_archive.h"

namespace ds::checkpoint {

struct SavedCheckpoint {
  SavedFiles files;
  std::vector<std::shared_ptr<TorchArchive>> models;  // of files.model_states
  std::vector<std::shared_ptr<TorchArchive>> optims;  // of files.optim_states
  int64_t stage = 0;
  int64_t ranks = 1;  // data-parallel ranks that wrote it

  // What a rank's model_states file holds.
  PickleField model(size_t rank = 0) const;
  // The optimizer_state_dict of a rank's optim_states file.
  PickleField optim(size_t rank = 0) const;
  // The state dict of torch's optimizer: of one rank's partition, or with stage 0 of all parameters. A dict.
  PickleField torch_optimizer(size_t rank = 0) const;
  bool has_optimizer() const;
};

// Throws IoError naming the file: missing, damaged, left from another save, or of what cannot be read.
SavedCheckpoint open_saved_checkpoint(const std::string& folder);

}  // namespace ds::checkpoint
