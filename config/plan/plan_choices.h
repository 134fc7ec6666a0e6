// The choices of a plan that have files of their own: dtypes (precision.cc) and offloading (offload.cc). Torch-free.
#pragma once

#include <optional>

#include "config/plan/plan.h"
#include "dsengine/config.h"

namespace ds::engine {

// Chooses the dtypes of parameters, gradients, buffers, masters and states, and the loss scaling, from the config
// alone. Throws ConfigError where the program's optimizer excludes a key.
void choose_precision(const config::DsConfig& config, const PlanFacts& facts, Plan& plan);

// Makes the plan that of a float64 model: every dtype of choose_precision() becomes float64. Throws ConfigError, naming
// the key, where the config asks for what such a model cannot have.
void change_to_float64(const config::DsConfig& config, const PlanFacts& facts, Plan& plan);

// Chooses what lives in host memory or in files, with how many buffers. Throws ConfigError for an optimizer that cannot
// be updated there.
void choose_offload(const config::DsConfig& config, const PlanFacts& facts, Plan& plan);
// Chooses offload_optimizer.super_offload, once all else that it excludes is chosen. The boundary of an accumulation
// has to find the gradient that the host has used: some plans keep a copy.
void choose_speculation(const config::DsConfig& config, const PlanFacts& facts, Plan& plan);

// Whether what is the same on all ranks of a tensor axis travels between stages in pieces, one from each rank, which
// the receivers gather over their own axis; else every rank sends all of it.
struct MessageCuts {
  bool activations = false;
  bool gradients = false;
};
// Cuts messages where pipeline.pipe_partitioned and grad_partitioned ask for it; by default where stages lie on several
// hosts, for inside a host a gather costs more than it saves. `pipe_inside_host`: PlanFacts::pipe_inside_host.
MessageCuts choose_message_cuts(const config::DsConfig& config, const Plan& plan, std::optional<bool> pipe_inside_host);

// True for dtypes of 16 bits.
bool is_half(DType dtype);
// Whether floating-point buffers are cast to 16 bits.
bool narrows_buffers(const Plan& plan);

// Whether torch_autocast casts to float16, whose losses are scaled.
bool scales_autocast(const config::DsConfig& config);

// Adds a row for parameters that the model brings in 16 bits, and a warning where the config does not ask for them.
void note_casts(const PlanFacts& facts, Plan& plan);

// Adds rows on how products are computed, where the config says so.
void note_products(const config::DsConfig& config, Plan& plan);

}  // namespace ds::engine
