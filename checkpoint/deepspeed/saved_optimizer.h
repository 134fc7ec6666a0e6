// The state dict of a torch optimizer: {state: {index: {name: value}}, param_groups: [{params: [index], lr, ...}]}.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/pickle/pickle_field.h"

namespace ds::checkpoint {

// The state of an Adam or AdamW. Refers to values of a TorchArchive, which outlives it.
class SavedOptimizer {
 public:
  // Throws IoError for states that Adam does not have, and for indexes without group or twice.
  explicit SavedOptimizer(const PickleField& state_dict);

  const std::vector<PickleField>& groups() const { return groups_; }
  // Indexes of the parameters of each group.
  const std::vector<std::vector<int64_t>>& parameters() const { return parameters_; }
  // All of them, group by group.
  std::vector<int64_t> all_parameters() const;
  // {"exp_avg", "exp_avg_sq"}, and "max_exp_avg_sq" of amsgrad.
  const std::vector<std::string>& state_names() const { return state_names_; }
  // Whether parameter `index` was ever updated.
  bool has_state(int64_t index) const { return states_.contains(index); }
  // The state `name` of a parameter that has_state().
  const TensorReference& state(int64_t index, const std::string& name) const;
  // The parameter's own number of updates; null where the optimizer counts in its groups.
  const PickleField* step(int64_t index) const;

 private:
  void read_states(const PickleField& states);

  std::string where_;
  std::vector<PickleField> groups_;
  std::vector<std::vector<int64_t>> parameters_;
  std::vector<std::string> state_names_;
  std::map<int64_t, std::map<std::string, PickleField>> states_;
};

}  // namespace ds::checkpoint
