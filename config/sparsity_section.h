// The section sparse_attention as the pattern that operators take.
#pragma once

#include "dsengine/config_efficiency.h"
#include "dsengine/sparsity_pattern.h"

namespace ds::engine::config {

// For a section that was read: its mode is a known word.
ops::SparsityPattern pattern_of(const SparseAttentionSection& section);

}  // namespace ds::engine::config
