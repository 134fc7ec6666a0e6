// The full tensors, in a scope of gathered parameters, of parameters that are split over a tensor axis: buckets hold
// this rank's parts of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <optional>
#include <string>

namespace ds::zero {

// The methods are called in the order of a scope: show(), then changed() or, with a modifier rank, the share_ methods;
// hide() always.
class SplitWholes {
 public:
  virtual ~SplitWholes() = default;
  // Makes each parameter a plain, full tensor from the values of the parts. Collective over the axis.
  virtual void show() = 0;
  // The name of a parameter that has other values than it was shown with.
  virtual std::optional<std::string> changed() const = 0;
  // Gives each rank its parts of the full tensors that the axis' first rank has. Collective over the axis.
  virtual void share_wholes() = 0;
  // Gives each rank of the axis the first rank's values of a full bucket, or of a parameter in no bucket; parts of
  // split parameters are left alone.
  virtual void share_bucket(size_t bucket, const at::Tensor& flat) = 0;
  virtual void share_other(const at::Tensor& values) = 0;
  // Splits the parameters again.
  virtual void hide() noexcept = 0;
};

}  // namespace ds::zero
