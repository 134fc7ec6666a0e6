// per_head_muon: which weights have heads in their rows.
#pragma once

#include <cstdint>
#include <vector>

#include "model/state/ranks.h"
#include "zero/parameter_bucket.h"

namespace ds::engine {

// Of each parameter the rows that are one head's, `head_dim` in weights of queries, keys and values, told by their
// names (makes_heads()); 0: the matrix is one. Collective over all ranks. Throws ConfigError, on all of them, for such
// a weight whose rows `head_dim` does not divide, and where no rank has one.
std::vector<int64_t> head_rows(const std::vector<zero::Parameter>& parameters, int64_t head_dim, const Ranks& ranks);

}  // namespace ds::engine
