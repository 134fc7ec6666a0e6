#include "loops/value_broadcast.h"

#include <ATen/core/grad_mode.h>

#include <cstddef>

#include "core/text.h"

namespace ds::loops {

void broadcast_values(const std::vector<zero::Parameter>& tensors, int root, comm::Communicator& group) {
  if (group.size() == 1) return;
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> values;
  std::vector<comm::Work> works;
  for (const zero::Parameter& one : tensors) {
    const at::Tensor own = one.tensor.variable_data();
    values.push_back(own.contiguous());
    works.push_back(own.numel() == 0 ? comm::Work()
                                     : group.broadcast(values.back(), root, cat("values of ", one.name)));
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    works[i].wait();
    const at::Tensor own = tensors[i].tensor.variable_data();
    if (own.data_ptr() != values[i].data_ptr()) own.copy_(values[i]);
  }
}

}  // namespace ds::loops
