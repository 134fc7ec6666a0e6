// The files that one rank contributes to a checkpoint: weights, optimizer states, averaged weights, and what is the
// rank's own, each in a safetensors file.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/index.h"
#include "core/files/safetensors.h"
#include "core/split/tensor_part.h"

namespace ds::checkpoint {

// One piece of a tensor that a rank will write.
struct PlannedPiece {
  std::string path;
  TensorInfo tensor;   // the logical one
  int64_t offset = 0;  // the piece's first element in the flattened tensor or part
  int64_t length = 0;  // elements
  // The part of the logical tensor that the writer has; null: all of it.
  std::shared_ptr<const TensorPart> part = nullptr;

  // The sizes of the tensor or part in which offset and length count.
  std::vector<int64_t> sizes() const { return part ? part->sizes() : tensor.sizes; }
  int64_t bytes() const { return length * static_cast<int64_t>(c10::elementSize(tensor.dtype)); }
};

// Whether `file` is the name of one of a rank's files, below.
bool is_rank_file_name(const std::string& file);

// Files are named KIND-RANK-of-RANKS.safetensors, KIND being the first folder of the paths: weights (with buffers),
// optimizer, ema, ranks. Not thread safe.
class RankFiles {
 public:
  // Creates the files in `folder`. Throws IoError, and UsageError for a part of another tensor.
  RankFiles(const std::string& folder, int rank, int ranks, const std::vector<PlannedPiece>& pieces);

  // The elements of piece number `index`: contiguous, on the CPU, of its dtype. Throws IoError.
  void write(size_t index, const at::Tensor& values);
  // Completes the files, `durable` as core/files/atomic_file.h says. Throws IoError, and UsageError when a piece was
  // not written. Returns tensors and files.
  Index finish(bool durable = true);

 private:
  struct File {
    File(const std::string& folder, std::string name, const std::vector<SafetensorsWriter::Header>& headers);
    std::string name;
    SafetensorsWriter writer;
    FileRecord record;
  };
  struct Place {
    File* file = nullptr;
    size_t piece = 0;  // index in the file's record
    size_t bytes = 0;
  };
  Index index_;
  std::deque<File> files_;
  std::vector<Place> places_;
};

}  // namespace ds::checkpoint
