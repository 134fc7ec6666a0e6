// The lists that SLURM puts into environment variables. Torch-free, pure.
#pragma once

#include <string>

namespace ds::comm {

// "node[01-04,07],gpu-[1-2]" -> "node01". Throws ConfigError that begins with `where` for an empty list or a bracket
// that is not closed.
std::string first_slurm_host(const std::string& list, const std::string& where);

// "2(x3),1": how many tasks node number `node` (from 0) has; here 2, 2, 2, 1. Throws ConfigError that begins with
// `where` for another form and for a node that is not in the list.
int slurm_tasks_on_node(const std::string& list, int node, const std::string& where);

}  // namespace ds::comm
