// The device of a rank, and how many ranks a host has. Namespace: see joined_job.h.
#pragma once

#include <c10/core/Device.h>

#include <string>

#include "comm/meeting/rendezvous.h"

namespace ds::engine {

// Reads "cpu", "cuda", "cuda:N" or "auto" (also when empty): cuda where a GPU is visible, else cpu. Throws ConfigError
// naming the option for anything else, and where a GPU is visible and cannot be used. Loads LibTorch's CUDA half for
// CUDA.
c10::Device parse_device(const std::string& name);
int ranks_per_host(const comm::Rendezvous& meeting);  // the number that Distributed has
// Returns the device that `name` means for a rank: what parse_device() says, where "cuda" is cuda:`local_rank`, and
// cuda:0 where this process sees one GPU only: its launcher has chosen. Throws ConfigError where it sees too few.
c10::Device device_of_rank(const std::string& name, int local_rank);

}  // namespace ds::engine
