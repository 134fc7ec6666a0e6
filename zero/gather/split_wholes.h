// What a scope of gathered parameters needs of parameters that are split over a tensor axis: buckets have their leaves,
// a program wants the wholes.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <optional>
#include <string>

namespace ds::zero {

// Methods in the order of a scope: show(), then changed() or, with a modifier rank, the share_ methods; hide() always.
class SplitWholes {
 public:
  virtual ~SplitWholes() = default;
  // Leaves have their values: makes each parameter a plain tensor with the whole. Collective over the axis.
  virtual void show() = 0;
  // The name of one that has other values than it was shown with.
  virtual std::optional<std::string> changed() const = 0;
  // Leaves get their parts of the wholes that the axis' first rank has. Collective over the axis.
  virtual void share_wholes() = 0;
  // Likewise the values of a bucket that is whole, or of a parameter in none; parts are left alone.
  virtual void share_bucket(size_t bucket, const at::Tensor& flat) = 0;
  virtual void share_other(const at::Tensor& values) = 0;
  // Parameters are split again.
  virtual void hide() noexcept = 0;
};

}  // namespace ds::zero
