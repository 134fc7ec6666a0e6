// What a plan says of itself: a row for each choice, with its reason. Torch-free.
#pragma once

#include <string>

#include "config/plan/plan.h"
#include "dsengine/config.h"

namespace ds::engine {

// Appends the rows of a plan whose other fields are filled in, but for those of predicted bytes, which to_table adds.
void add_rows(const config::DsConfig& config, const PlanFacts& facts, Plan& plan);

// Its rows of a tensor axis: where it lies, what is split, and how split layers work. Warns of one that is slow.
void add_tensor_rows(const PlanFacts& facts, Plan& plan);

// Its rows of what the program's forward leaves out.
void add_efficiency_rows(const config::DsConfig& config, Plan& plan);

// Its row of the log of communication.
void add_comms_log_row(const config::DsConfig& config, Plan& plan);
void add_flops_row(const config::DsConfig& config, Plan& plan);

// Its rows of keys that change how DeepSpeed moves data and that this layout has no use for.
void add_rows_without_effect(const config::DsConfig& config, Plan& plan);

// The file has this key, "gradient_clipping" or "zero_optimization.stage".
bool is_given(const config::DsConfig& config, const std::string& key);

}  // namespace ds::engine
