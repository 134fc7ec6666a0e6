// What only the files of a pipeline's layers have, in a checkpoint of DeepSpeed's PipelineModule: buffers, and weights
// that are not in the optimizer's files.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/deepspeed/layout.h"
#include "checkpoint/deepspeed/saved_checkpoint.h"
#include "checkpoint/pickle/torch_archive.h"

namespace ds::checkpoint {

// DeepSpeed's PipelineModule registers tied layers under this and their key.
inline constexpr std::string_view kTiedModules = "tied_modules.";

// A file names a tensor as its layer does ("weight"), the module by the layer's number ("3.weight") or, in a tied
// layer, by its key ("tied_modules.embed.weight"), which the file does not say. A tied layer is told by its values.
class PipelineLayers {
 public:
  // Opens the files. `trained`: what the optimizer's files have, by the number in mp_rank_MM. Throws IoError for a
  // layer that has no file although something of it is trained, and for shapes that differ. All outlive it.
  PipelineLayers(const SavedFolder& folder, const std::vector<SavedCheckpoint>& saved,
                 const std::vector<SavedLayout>& trained);

  // Returns what the files of a model-parallel rank have beyond the others.
  SavedLayout of_rank(size_t model_rank) const;

 private:
  struct LayerFile {
    int layer = 0;
    std::shared_ptr<TorchArchive> archive;
  };

  void add_layer(const LayerFile& file, size_t model_rank, SavedLayout& layout) const;
  std::string key_of(const LayerFile& file, size_t model_rank) const;
  bool is_of_key(const LayerFile& file, size_t model_rank, const std::string& key) const;
  // The layout that has a trained weight, by its name in DeepSpeed's module; null: it is not trained.
  const SavedLayout* trained_at(const std::string& name, size_t model_rank) const;
  void require_files() const;

  const SavedFolder& folder_;
  const std::vector<SavedLayout>& trained_;
  std::vector<std::vector<LayerFile>> files_;  // by model-parallel rank
  std::set<std::string> buffers_;              // of all stages
  std::set<std::string> keys_;                 // of ties
  bool zero_;                                  // the optimizer's files have names
};

}  // namespace ds::checkpoint
