// Describing tensors in messages.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/DimVector.h>

#include <iosfwd>

namespace ds {

// The result of describe(): a view, made into text when it is written. The tensor must outlive it.
class TensorText {
 public:
  explicit TensorText(const at::Tensor& tensor) : tensor_(tensor) {}
  friend std::ostream& operator<<(std::ostream& out, const TensorText& text);

 private:
  const at::Tensor& tensor_;
};

// Describes a tensor as a part of a message: "Float [128, 512] on cpu", or "undefined".
inline TensorText describe(const at::Tensor& tensor) { return TensorText(tensor); }

// The description of a defined tensor that does not keep its memory: for messages that may come after the tensor has
// gone.
class TensorFacts {
 public:
  explicit TensorFacts(const at::Tensor& tensor)
      : dtype_(tensor.scalar_type()), sizes_(tensor.sizes()), device_(tensor.device()) {}
  friend std::ostream& operator<<(std::ostream& out, const TensorFacts& facts);

 private:
  at::ScalarType dtype_;
  at::DimVector sizes_;
  at::Device device_;
};

}  // namespace ds
