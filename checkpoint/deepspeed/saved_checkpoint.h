// The opened files of one tag of DeepSpeed, checked against one another.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/deepspeed/saved_files.h"
#include "checkpoint/pickle/pickle_field.h"
#include "checkpoint/pickle/torch_archive.h"

namespace ds::checkpoint {

// The opened files of one model-parallel rank.
struct SavedCheckpoint {
  SavedFiles files;
  std::vector<std::shared_ptr<TorchArchive>> models;  // the opened files.model_states, by rank
  std::vector<std::shared_ptr<TorchArchive>> optims;  // the opened files.optim_states, by rank
  int64_t stage = 0;
  int64_t ranks = 1;  // data-parallel ranks that wrote it

  // Returns the contents of a rank's model_states file.
  PickleField model(size_t rank = 0) const;
  // Returns the optimizer_state_dict of a rank's optim_states file.
  PickleField optim(size_t rank = 0) const;
  // Returns the state dict of torch's optimizer, a dict: it describes one rank's partition, or with stage 0 all
  // parameters.
  PickleField torch_optimizer(size_t rank = 0) const;
  bool has_optimizer() const;
  // Returns the module's state dict; nothing where the files of a pipeline's layers have it.
  std::optional<PickleField> module() const { return model().find("module"); }
};

// Opens the files of one model-parallel rank of `model_ranks`. Throws IoError naming a file that is missing, damaged,
// left from another save, or of a kind that cannot be read.
SavedCheckpoint open_saved_checkpoint(const SavedFiles& files, int64_t model_ranks);

}  // namespace ds::checkpoint
