// A text that all ranks are to know.
#pragma once

#include <c10/core/Device.h>

#include <string>

#include "dsengine/comm.h"

namespace ds::engine {

// The text of rank `root`, on every rank. Collective.
std::string text_of_rank(const std::string& text, int root, c10::Device device, comm::Communicator& world);
// Rank 0's. Collective.
std::string text_of_first_rank(const std::string& text, c10::Device device, comm::Communicator& world);
// Whether all ranks have the same text. Collective.
bool same_text_on_all_ranks(const std::string& text, c10::Device device, comm::Communicator& world);

}  // namespace ds::engine
