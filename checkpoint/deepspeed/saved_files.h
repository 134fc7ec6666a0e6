// The files of one tag that DeepSpeed's save_checkpoint wrote, told by their names.
#pragma once

#include <string>
#include <vector>

namespace ds::checkpoint {

struct SavedFiles {
  std::string folder;
  std::vector<std::string> model_states;  // paths, by rank: one at stages 0 to 2, one for each rank at stage 3
  std::vector<std::string> optim_states;  // paths, by rank; none without ZeRO
  bool partitioned_model = false;         // stage 3
};

// Whether the folder has a file that ends in model_states.pt or optim_states.pt.
bool holds_deepspeed_files(const std::string& folder);

// Throws IoError naming the file for what cannot be read (pipeline layers, experts, model-parallel ranks) and for a
// rank whose file is missing.
SavedFiles find_saved_files(const std::string& folder);

}  // namespace ds::checkpoint
