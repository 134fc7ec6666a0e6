// Dtypes of a plan: of what the model brings and what the ds_config asks for. Torch-free.
#pragma once

#include "config/plan/plan.h"
#include "dsengine/config.h"

namespace ds::engine {

// Parameters, gradients, buffers, masters and loss scaling. Throws ConfigError where the config asks for what a float64
// model cannot have, naming the key.
void choose_precision(const config::DsConfig& config, const PlanFacts& facts, Plan& plan);

// Of 16 bits.
bool is_half(DType dtype);
// Whether floating-point buffers are cast to 16 bits.
bool narrows_buffers(const Plan& plan);

// torch_autocast to float16, whose losses are scaled.
bool scales_autocast(const config::DsConfig& config);

// What happens to parameters that come in 16 bits: a row, and a warning where the config does not ask for it.
void note_casts(const PlanFacts& facts, Plan& plan);

// How products are computed, where the config says so: rows.
void note_products(const config::DsConfig& config, Plan& plan);

}  // namespace ds::engine
