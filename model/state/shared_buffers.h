// A module's buffers over the ranks that train it: the same values, or whether they are the same.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "dsengine/comm.h"

namespace ds::engine {

// Returns each buffer that has elements once, with its first name, in the order of the module.
std::vector<std::pair<std::string, at::Tensor>> named_buffers_of(const torch::nn::Module& module);

// Overwrites the buffers of all ranks with rank 0's, in few messages (comm/agreement.h). Graphs that have read a buffer
// stay usable: autograd does not count it as a change. Collective.
void broadcast_buffers(const torch::nn::Module& module, comm::Communicator& ranks);

// Returns a digest of all values: equal on ranks with equal buffers. 0 for a module without buffers. Waits for the
// device.
uint64_t digest_of_buffers(const torch::nn::Module& module);

inline constexpr size_t kMostBuffersNamed = 6;  // in a message

// Returns the names of the buffers that have other values on some rank than on the first one, in the order of the
// module; none where ranks have different numbers of buffers. Collective.
std::vector<std::string> buffers_that_differ(const torch::nn::Module& module, comm::Communicator& ranks,
                                             c10::Device device);
// Returns a warning's text about buffers that differ between ranks: their names, and what becomes of each kind, running
// statistics of BatchNorm or state that the program keeps.
std::string advice_on_buffers(const std::vector<std::string>& names);

}  // namespace ds::engine
