// Reading what one rank has of a tensor (core/split/tensor_part.h) from a checkpoint, whatever parts its writers had.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "core/split/tensor_part.h"
#include "dsengine/checkpoint.h"

namespace ds::checkpoint {

// A source that knows which parts lie together in its files.
class PartReader {
 public:
  virtual ~PartReader() = default;
  // Does what read_part() below says, with arguments that have been checked.
  virtual void read_own_part(const std::string& path, const TensorPart& part, int64_t offset,
                             const at::Tensor& destination) = 0;
};

// Reads elements [offset, offset + destination.numel()) of the part of a tensor, row-major, into `destination`, as
// Source::read does. A source that is no PartReader is read in windows of at most kPartBytes. Throws UsageError for a
// part of a tensor of other sizes, and IoError.
void read_part(Source& source, const std::string& path, const TensorPart& part, int64_t offset,
               const at::Tensor& destination);

}  // namespace ds::checkpoint
