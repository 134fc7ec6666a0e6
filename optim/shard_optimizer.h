// What an optimizer updates: flat slices of buckets, and how the slices of one bucket meet across ranks. The optimizer
// itself is in dsengine/optimizer.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "core/slices/segment.h"
#include "dsengine/optimizer.h"

namespace ds::optimizers {

// How the slices of one bucket meet across ranks. Implemented by zero on top of a communicator; size 1 needs no peers.
class SliceExchange {
 public:
  virtual ~SliceExchange() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // In place sum over the ranks that hold the bucket's slices or, of parts of parameters, the other parts. Blocking.
  virtual void sum(const at::Tensor& values) = 0;
  // Joins the slices [n] of all ranks to [size * n]. Blocking.
  virtual at::Tensor all_gather(const at::Tensor& slice) = 0;
};

// How the parts of a parameter meet, of which each rank of a tensor axis has one. `parameter`: its index.
class PartExchange {
 public:
  virtual ~PartExchange() = default;
  // The whole in new memory, from each rank's part, which has its shape. Blocking.
  virtual at::Tensor whole(int64_t parameter, const at::Tensor& part) = 0;
  virtual at::Tensor part(int64_t parameter, const at::Tensor& whole) const = 0;
};

// A slice as the optimizer keeps it. `segments` index `parameters`.
struct Slice {
  at::Tensor master;                     // [n] float32 (or the parameters' dtype), updated in place
  int group = 0;                         // index into groups()
  int64_t bucket_offset = 0;             // first element of the slice inside its bucket
  std::vector<Segment> segments;         // the pieces of parameters in this slice
  std::vector<Segment> bucket_segments;  // those in the whole bucket (slice_offset: inside the bucket)
  const std::vector<ParameterInfo>* parameters = nullptr;  // outlives the optimizer
  std::shared_ptr<SliceExchange> exchange;                 // never null
  std::shared_ptr<PartExchange> parts = nullptr;           // null: the bucket's parameters are whole
};

// An optimizer whose update writes the new weights into the copy by itself, where one is wanted.
class CopyingOptimizer : public ShardOptimizer {
 public:
  void update(int64_t index, const at::Tensor& gradient, double gradient_scale) final {
    update_into(index, gradient, gradient_scale, /*copy=*/{});
  }
  void update_into(int64_t index, const at::Tensor& gradient, double gradient_scale,
                   const at::Tensor& copy) override = 0;

 protected:
  using ShardOptimizer::ShardOptimizer;
};

}  // namespace ds::optimizers
