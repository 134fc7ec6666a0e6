// What a plan says of itself: a row for each choice, with its reason. Torch-free.
#pragma once

#include "dsengine/config.h"
#include "engine/plan/plan.h"

namespace ds::engine {

// Appends the rows of a plan whose other fields are filled in, but for those of predicted bytes, which to_table adds.
void add_rows(const config::DsConfig& config, Plan& plan);

}  // namespace ds::engine
