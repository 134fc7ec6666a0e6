// The files of one tag that DeepSpeed's save_checkpoint wrote, told by their names.
#pragma once

#include <map>
#include <string>
#include <vector>

namespace ds::checkpoint {

// The files of one model-parallel rank: of its data-parallel ranks.
struct SavedFiles {
  std::string folder;
  std::vector<std::string> model_states;  // paths, by rank: one at stages 0 to 2, one for each rank at stage 3
  std::vector<std::string> optim_states;  // paths, by rank; none without ZeRO
  bool partitioned_model = false;         // stage 3
};

// All files of a tag.
struct SavedFolder {
  // By the number in "mp_rank_03": the number of the pipeline stage times the model-parallel ranks of a layer, plus
  // that of the model-parallel rank.
  std::vector<SavedFiles> model_ranks;
  std::map<int, std::vector<std::string>> layers;  // by layer: paths by model-parallel rank; empty: no pipeline

  int layer_ranks() const { return layers.empty() ? 1 : static_cast<int>(layers.begin()->second.size()); }
};

// Whether the folder has a file that ends in model_states.pt or optim_states.pt.
bool holds_deepspeed_files(const std::string& folder);

// Throws IoError naming the file for what cannot be read (experts) and for a rank or layer whose file is missing.
SavedFolder find_saved_files(const std::string& folder);

}  // namespace ds::checkpoint
