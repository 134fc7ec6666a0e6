// Buffers that stay float32 in a model that trains in 16 bits (data_types.keep_in_fp32_modules), as biases of a router
// whose differences bfloat16 would round away.
#pragma once

#include <string>
#include <unordered_set>
#include <vector>

#include "model/state/model_layout.h"
#include "model/state/ranks.h"

namespace ds::engine {

// Whether the pattern is found anywhere in the name; "*" in it stands for any text. DeepSpeed 0.19.8's rule
// (deepspeed/runtime/keep_in_fp32.py), in which other characters stand for themselves here.
bool is_found_in(const std::string& pattern, const std::string& name);

// Identities of the floating-point buffers with such a name. A pattern that is in none is told in the log of rank 0,
// which says whether it is in names of parameters: those follow the model's dtype. Collective.
std::unordered_set<const void*> buffers_kept_in_float32(const ModelParameters& parameters,
                                                        const std::vector<std::string>& patterns, const Ranks& ranks);

}  // namespace ds::engine
