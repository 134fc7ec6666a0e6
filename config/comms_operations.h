// Operations between ranks by the names of comms_logger.prof_ops. Torch-free.
#pragma once

#include <optional>
#include <string>

#include "dsengine/comm.h"

namespace ds::engine::config {

// This library's names (all_reduce, reduce_scatter, send, ...) and DeepSpeed's (all_gather_into_tensor,
// reduce_scatter_tensor, isend, ...), of which several may be one operation here.
std::optional<comm::CollectiveKind> find_operation(const std::string& name);
// "all_reduce, all_reduce_coalesced, ... or barrier".
std::string known_operations();

}  // namespace ds::engine::config
