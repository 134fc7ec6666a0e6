// The place where reduced gradient slices wait for the update when they do not stay beside their buckets: on the host,
// say.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>

namespace ds {

// The interface is called under the lock of whoever reduces, from autograd's threads and the engine's.
class ReducedGradients {
 public:
  virtual ~ReducedGradients() = default;
  // Whether the slice of this bucket is kept here at all.
  virtual bool takes(size_t bucket) const = 0;
  // Takes a reduced slice. `own`: flat, on the device. It becomes the bucket's gradient, or is added to it. Its memory
  // may be used for other things by the work that the current stream is given next.
  virtual void add(size_t bucket, const at::Tensor& own) = 0;
  // The bucket's gradient, complete when this returns; undefined when nothing was added since clear().
  virtual at::Tensor gradient(size_t bucket) = 0;
  virtual void clear() = 0;
};

}  // namespace ds
