// The table of optimizers: one row for each type, with everything that config sections, plan, factories and messages
// have to know about it. Torch-free.
//
// A new optimizer touches five source files. Two are new, its optim/NAME.h and optim/NAME.cc. Three change: this header
// (a value of OptimizerType), optimizer_table.cc (its row), and optimizer_factory.cc, which makes it. One that
// compresses what ranks exchange is made by compression/compressed_factory.cc instead. A key that no other optimizer
// has also needs a field of OptimizerParams (dsengine/config_training.h). CONTRIBUTING.md has tests and pages.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "dsengine/config_training.h"
#include "dsengine/lr_schedule.h"

namespace ds {

class JsonFields;

namespace optimizers {

using engine::config::OptimizerParams;

enum class OptimizerType : uint8_t {
  kAdam,
  kAdamW,
  kLamb,
  kAdagrad,
  kSparseAdam,
  kLion,
  kMuon,
  kSgd,
  kRmsprop,
  kAdamax,
  kNadam,
  kRadam,
  kAdadelta,
  kOneBitAdam,
  kOneBitLamb,
  kZeroOneAdam
};

// A row of the table.
struct OptimizerDescription {
  OptimizerType type;
  std::string name;  // the canonical spelling of optimizer.type
  // Reads, writes and checks the keys of optimizer.params that this type has beside lr and weight_decay.
  void (*describe_keys)(JsonFields& json, OptimizerParams& params);
  // Counts the state tensors that have one element for each trainable element.
  int64_t (*state_tensors)(const OptimizerParams& params);
  OptimizerParams defaults = {};
  // Muon alone: it updates matrices, AdamW updates all other parameters, which begin with these values. Each group of
  // the program becomes two, and state_tensors() counts for matrices.
  std::optional<GroupOptions> values_of_rest = {};
  bool elementwise = true;          // false: the update of an element needs norms or products of its whole parameter
  bool compresses = false;          // ranks exchange compressed momenta in place of gradients (docs/compression.md)
  int last_stage = 3;               // the highest zero_optimization.stage; 0: ranks step on whole parameters alone
  bool tested_with_zero = true;     // compared with the truth at stages 1 to 3, or to last_stage
  bool averages_squares = false;    // betas[1] averages squares of gradients in a state of state_dtype
  bool preserves_gradient = true;   // its kernels for the host read the gradient and leave it as it is
  bool dynamic_scale_only = false;  // fp16 needs a dynamic loss scale, as DeepSpeed demands it
  bool has_frozen_groups = false;   // ParameterGroup::non_freeze means something to it
  // Elements whose gradient is zero stay as they are where there is no momentum and no weight decay, or the optimizer
  // is lazy: it updates sparse tables row by row.
  bool updates_rows = false;
  bool is_cpu_adam = false;  // DeepSpeed has it as CPU Adam, whose masters and states may have 16 bits
};

// Returns all rows, in the order in which messages name them.
const std::vector<OptimizerDescription>& optimizer_table();

// Returns the row of this name, whatever its case; null for other names, the empty one among them.
const OptimizerDescription* find_optimizer(std::string_view name);

// Names the optimizers that `chosen` takes, for messages: "Adam, AdamW or Lion".
std::string optimizer_names(bool (*chosen)(const OptimizerDescription& row));

// Chooses optimizers that update each element by itself and exchange gradients as they are.
bool updates_alone(const OptimizerDescription& row);

// Counts the state tensors of optimizer `name`, as OptimizerDescription::state_tensors does; 0 for unknown names.
int64_t state_tensors_of(std::string_view name, const OptimizerParams& params);

// Returns the values of a parameter group that `params` gives.
GroupOptions group_options(const OptimizerParams& params);

}  // namespace optimizers
}  // namespace ds
