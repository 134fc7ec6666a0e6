// Describing and checking tensors in messages.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace ds {

// "float32 [128, 512] on cpu", or "undefined".
std::string describe(const at::Tensor& tensor);

}  // namespace ds
