// The device of a rank, and how ranks lie on hosts.
#pragma once

#include <c10/core/Device.h>

#include <string>

#include "comm/meeting/rendezvous.h"

namespace ds::engine {

// "cpu", "cuda", "cuda:N" or "auto" (also when empty): cuda where a GPU is visible, else cpu. ConfigError naming the
// option for anything else, and where a GPU is visible and cannot be used. Loads LibTorch's CUDA half for CUDA.
c10::Device parse_device(const std::string& name);
int ranks_per_host(const comm::Rendezvous& meeting);  // as in Distributed
// As parse_device; "cuda" is cuda:`local_rank`, and cuda:0 where this process sees one GPU only: its launcher has
// chosen. ConfigError where it sees too few.
c10::Device device_of_rank(const std::string& name, int local_rank);

}  // namespace ds::engine
