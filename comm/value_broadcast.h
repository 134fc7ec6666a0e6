// Values of parameters and buffers that become those of one rank.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "dsengine/comm.h"

namespace ds::comm {

// The elements of `tensors` become rank `root`'s, in place; graphs that have saved them go on (their versions stay).
// Small tensors of one device and dtype share messages of a few MiB, others are sent from where they lie. Undefined and
// empty ones are left out. `what`: for the labels, "buffers". Collective; tensors have the same sizes and dtypes on all
// ranks. Throws CommError.
void broadcast_values(const std::vector<at::Tensor>& tensors, int root, Communicator& ranks, const std::string& what);

}  // namespace ds::comm
