// Whole tensors put together from parts of tensors in many files.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/pickle/torch_archive.h"
#include "dsengine/checkpoint.h"

namespace ds::checkpoint {

// Elements of a stored tensor: `stored` is an index from StoredTensors::add.
struct StoredRange {
  int64_t stored = 0;
  int64_t begin = 0;
  int64_t numel = 0;
};

// Stored tensors one after the other, as if they were one flat tensor.
class StoredRun {
 public:
  void add(int64_t stored, int64_t numel);
  int64_t numel() const { return ends_.empty() ? 0 : ends_.back(); }
  // Appends the ranges of elements [begin, begin + numel) to `ranges`. They lie inside.
  void append_ranges(int64_t begin, int64_t numel, std::vector<StoredRange>& ranges) const;
  // Elements before the end of part i.
  const std::vector<int64_t>& ends() const { return ends_; }

 private:
  std::vector<int64_t> stored_;
  std::vector<int64_t> ends_;
};

// Not thread safe.
class StoredTensors {
 public:
  // Checks that the file has the tensor (IoError).
  int64_t add(std::shared_ptr<const TorchArchive> archive, const TensorReference& tensor);
  at::ScalarType dtype(int64_t stored) const { return stored_.at(static_cast<size_t>(stored)).tensor.dtype; }

  // A tensor at `path`, from ranges in order; `location` is for the IoError of a path that is there already.
  void define(const std::string& location, const std::string& path, TensorInfo info, std::vector<StoredRange> ranges);
  // A tensor at `path` that is one whole stored tensor.
  void define_whole(const std::string& location, const std::string& path, int64_t stored, bool frozen = false);

  const std::map<std::string, TensorInfo>& tensors() const { return infos_; }
  // Reads as Source::read does. The path must be defined, and the range lie inside its tensor.
  void read(const std::string& path, int64_t offset, const at::Tensor& destination) const;

 private:
  struct Stored {
    std::shared_ptr<const TorchArchive> archive;
    TensorReference tensor;
  };
  std::vector<Stored> stored_;
  std::map<std::string, TensorInfo> infos_;
  std::map<std::string, std::vector<StoredRange>> ranges_;
};

}  // namespace ds::checkpoint
