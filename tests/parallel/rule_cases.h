// Operators with shapes for them, as rows of a table: what every rule is tried on.
#pragma once

#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

namespace ds::parallel {

struct RuleInput {
  std::vector<int64_t> sizes;
  int64_t indices = 0;  // above 0: whole numbers below it, without a gradient
  bool positive = false;
};

struct RuleCase {
  std::string name;
  std::vector<RuleInput> inputs;
  std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)> run;
  bool ints_alone = false;     // of the results nothing has a gradient
  bool by_float = false;       // casts to float32 and back, also where a part of a gradient is no round number
  bool left_to_joins = false;  // no rule is for it: its values are tried, its joins are not counted
};

// Elementwise, shapes and pieces.
std::vector<RuleCase> shape_cases();
// Products, lookups, normalizations, reductions, attention, losses.
std::vector<RuleCase> compute_cases();

}  // namespace ds::parallel
