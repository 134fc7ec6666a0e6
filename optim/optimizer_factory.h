// Makes an optimizer of slices from a name and its values, without a config. Those of the 1-bit family are made in
// compression/compressed_factory.h. engine/setup/optimizer_setup.h calls both with a config's optimizer section.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "optim/lamb_rule.h"
#include "optim/optimizer_table.h"
#include "optim/shard_optimizer.h"

namespace ds::optimizers {

// The type and the values that an optimizer is made from.
struct OptimizerOptions {
  std::string type = "AdamW";  // a name of optimizer_table(), in any case
  std::vector<GroupOptions> groups = {GroupOptions{}};
  // Each optimizer reads its own fields, except for those that groups have (lr, weight_decay, betas, momentum, eps).
  OptimizerParams values = {};
  // By parameter, for Muon: the number of rows that are made orthogonal by themselves; 0, or no entry: all rows
  // together.
  std::vector<int64_t> block_rows = {};
};

// Returns the values of a group when the config says nothing: the defaults of optimizer_table(). Throws ConfigError for
// an unknown type.
GroupOptions default_group_options(const std::string& type);
// Returns the defaults of Muon's groups for the parameters that it leaves to AdamW.
GroupOptions default_aux_adam_options();

// Returns Lamb's rule, which OneBitLamb shares.
LambRule lamb_rule(const OptimizerParams& values);

// Throws ConfigError for no group, or values that torch.optim refuses.
void require_groups(const std::vector<GroupOptions>& groups);

// Throws ConfigError for an unknown type (naming the known ones) or values out of range. Optimizers that compress are
// made by compression::make_compressed_optimizer().
std::unique_ptr<SliceOptimizer> make_optimizer(const OptimizerOptions& options);

}  // namespace ds::optimizers
