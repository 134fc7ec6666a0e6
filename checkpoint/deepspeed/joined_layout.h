// Full tensors of a checkpoint that DeepSpeed's model-parallel ranks wrote together: the stages of a pipeline, and the
// ranks of which each has a part of a stage's tensors.
//
// Which parts make up which tensor only the program knew that wrote them. It says so in the checkpoint, as
// Megatron-DeepSpeed does: "universal_checkpoint_info" has regular expressions for names of parameters, which
// DeepSpeed's ds_to_universal goes by, too (deepspeed/checkpoint/ds_to_universal.py).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/deepspeed/layout.h"
#include "checkpoint/deepspeed/saved_checkpoint.h"
#include "core/name_pattern.h"
#include "core/split/tensor_part.h"

namespace ds::checkpoint {

// How the model-parallel ranks have a tensor: whole, or a part each.
struct RankParts {
  std::optional<Cut> cut;       // none: each has all of it
  std::optional<int64_t> rows;  // of a table of words without its padding; none: all of its rows
};

// The patterns of a checkpoint.
class PartRules {
 public:
  // `model`: the contents of a model_states file. Throws IoError for patterns that are none, and for kinds of parts
  // that cannot be read.
  explicit PartRules(const PickleField& model);

  // Whether the checkpoint says how its tensors are cut.
  bool given() const { return !where_.empty(); }
  // Returns how tensor `name` is cut: where no pattern matches, along its first dimension.
  RankParts parts_of(const std::string& name) const;

 private:
  bool is_in(const char* kind, const std::string& name) const;

  std::string where_;
  std::map<std::string, std::vector<NamePattern>> patterns_;  // by key
  std::optional<int64_t> rows_;                               // "original_vocab_size"
};

// The tensors of a whole checkpoint.
class JoinedLayout {
 public:
  // `saved`: by model-parallel rank, in the order of the files. Throws IoError naming file, tensor and shapes, for
  // parts that do not fit together and for those that nothing tells how to join.
  JoinedLayout(const SavedFolder& folder, const std::vector<SavedCheckpoint>& saved);
  JoinedLayout(const JoinedLayout&) = delete;
  JoinedLayout& operator=(const JoinedLayout&) = delete;

  // Tensors and further names, as Source has them.
  const std::map<std::string, TensorInfo>& tensors() const { return infos_; }
  const std::map<std::string, std::string>& aliases() const { return aliases_; }
  // Reads as Source::read does. The path must be there, and the range lie inside its tensor.
  void read(const std::string& path, int64_t offset, const at::Tensor& destination) const;

 private:
  // Where a tensor is: under a path of some layouts, one of each rank that has it.
  struct Place {
    std::string path;
    std::vector<const SavedLayout*> ranks;  // one where it is whole
    std::vector<TensorPart> parts;          // of each rank; none where it is whole
  };

  // The name of the file that has tensor `path` of a rank, for messages.
  using FileOf = std::function<std::string(size_t rank, const std::string& path)>;

  static void require_same_paths(const std::vector<const SavedLayout*>& ranks, const FileOf& file_of);
  void join_stage(const std::vector<const SavedLayout*>& ranks, const FileOf& file_of);
  RankParts parts_of(const std::string& path, const std::vector<const SavedLayout*>& ranks,
                     const FileOf& file_of) const;
  bool are_equal(const std::string& path, const std::vector<const SavedLayout*>& ranks) const;
  void define(const std::string& path, TensorInfo info, Place place, const std::string& file);

  std::optional<PartRules> rules_;    // where ranks have parts
  std::vector<SavedLayout> layouts_;  // of the ranks, then of the layers' files by rank
  std::map<std::string, TensorInfo> infos_;
  std::map<std::string, std::string> aliases_;
  std::map<std::string, Place> places_;
};

}  // namespace ds::checkpoint
