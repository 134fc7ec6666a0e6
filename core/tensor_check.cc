#include "core/tensor_check.h"

#include "core/text.h"

namespace ds {

std::string describe(const at::Tensor& tensor) {
  if (!tensor.defined()) return "undefined";
  return cat(tensor.scalar_type(), " ", tensor.sizes(), " on ", tensor.device());
}

}  // namespace ds
