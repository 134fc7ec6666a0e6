// The rows of a plan: each choice in words, with its reason. Torch-free.
#pragma once

#include <string>

#include "config/plan/plan.h"
#include "dsengine/config.h"

namespace ds::engine {

// Appends the rows of a plan whose other fields are filled in. to_table() adds those of predicted bytes.
void add_rows(const config::DsConfig& config, const PlanFacts& facts, Plan& plan);

// Appends rows on the order of the axes and on the tensor axis: where it lies, what is split, how split layers work,
// and what stages of a pipeline send each other. Warns of a slow axis.
void add_tensor_rows(const config::DsConfig& config, const PlanFacts& facts, Plan& plan);

// Appends rows on curricula, chosen samples, dropped layers and tokens, and sparse attention.
void add_efficiency_rows(const config::DsConfig& config, Plan& plan);

// Appends the row on the log of communication.
void add_comms_log_row(const config::DsConfig& config, Plan& plan);
// Appends the row on flops_profiler.
void add_flops_row(const config::DsConfig& config, Plan& plan);

// Appends rows on what data ranks are made to have alike, and on check_replicas, which compares it. The default of that
// key says nothing about a run, and has no row.
void add_alike_rows(const config::DsConfig& config, Plan& plan);

// Appends rows on keys that change how DeepSpeed moves data and have no effect on this layout.
void add_rows_without_effect(const config::DsConfig& config, Plan& plan);

// Whether the file has this key, "gradient_clipping" or "zero_optimization.stage".
bool is_given(const config::DsConfig& config, const std::string& key);

}  // namespace ds::engine
