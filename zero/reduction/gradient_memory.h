// The memory of one bucket of gradients: the buffer in which a rank's gradients come together, and the sum of what was
// reduced before.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <vector>

#include "zero/buffer_pool.h"
#include "zero/parameter_bucket.h"
#include "zero/reduction/reducer_options.h"

namespace ds::zero {

// The buffer of one bucket and its relation to the parameters' .grad: these are views of it, or tensors of their own,
// as the options ask. Knows which parameters it holds a gradient of. Not thread safe. The caller turns autograd
// off.
class GradientBuffer {
 public:
  // All arguments outlive it.
  GradientBuffer(const ParameterBucket& parameters, const ReducerOptions& options, BufferPool& pool);

  // The gradients in the order of the layout, [numel] in the gradient dtype. Undefined while there is no memory.
  const at::Tensor& flat() const { return flat_; }
  // Takes over `gradient`, the strided values of the .grad of the parameter at `position`: adds them to what the buffer
  // holds of earlier passes. Plain gradients, which autograd has added to, replace it.
  void collect(size_t position, const at::Tensor& gradient);
  // Gives the parameters whose gradients were not collected zeros; with plain gradients, what .grad holds. `seen`: for
  // each parameter, whether this rank has used it since the last reduction.
  void fill_missing(const std::vector<char>& seen);
  // Counts all parameters as without a gradient. The memory and the parameters' .grad stay.
  void forget_filled();
  // Writes zeros where no parameter lies.
  void zero_padding();
  // Multiplies plain gradients by `factor` and makes them the .grad of the parameters that are `used` (by number;
  // empty: all are).
  void show(const std::vector<char>& used, double factor);
  // Drops those gradients of the parameters that are views of the buffer.
  void drop_parameter_gradients();
  // Drops all gradients. A transient buffer goes back to the pool; others stay for the next pass.
  void clear();
  // Drops all gradients but the buffer itself, which is the caller's from now on.
  at::Tensor hand_over();
  // Gives up the memory that clear() keeps.
  void release() { flat_.reset(); }

 private:
  void open();
  at::Tensor view(size_t position) const;
  void fill_from_parameter(size_t position, bool seen);

  const ParameterBucket* parameters_;
  const ReducerOptions* options_;
  BufferPool* pool_;
  at::Tensor flat_;
  std::vector<char> filled_;  // per parameter: flat_ holds a gradient
};

// The sum, on the device, of the reduced gradients of one bucket that had to make room for later ones: the full bucket
// at stage 0, else this rank's slice. Not thread safe.
class ReducedSum {
 public:
  // `pool` outlives it, and counts its memory.
  explicit ReducedSum(BufferPool& pool) : pool_(&pool) {}

  // Undefined when nothing was added.
  const at::Tensor& tensor() const { return sum_; }
  // Adds `gradient`, whose memory may be used for other things afterwards.
  void add(const at::Tensor& gradient);
  // Makes `buffer`, which came from the pool, the sum. There is none before.
  void begin_with(at::Tensor buffer);
  // Adds the sum, which is there, to `gradient` and drops it.
  void move_to(const at::Tensor& gradient);
  void drop();
  // Gives up the memory that drop() keeps.
  void release() { slice_.reset(); }

 private:
  BufferPool* pool_;
  at::Tensor sum_;
  at::Tensor slice_;  // memory of sum_ as a slice, kept from step to step
};

}  // namespace ds::zero
