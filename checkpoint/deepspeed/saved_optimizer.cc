#include "checkpoint/deepspeed/saved_optimizer.h"

#include <set>

#include "core/check.h"

namespace ds::checkpoint {
namespace {

constexpr const char* kMaximum = "max_exp_avg_sq";

bool is_known(const std::string& name) {
  return name == "exp_avg" || name == "exp_avg_sq" || name == kMaximum || name == "step";
}

}  // namespace

SavedOptimizer::SavedOptimizer(const PickleField& state_dict)
    : where_(state_dict.where()), state_names_({"exp_avg", "exp_avg_sq"}) {
  const PickleField groups = state_dict.at("param_groups");
  std::set<int64_t> seen;
  for (size_t g = 0; g < groups.size(); ++g) {
    groups_.push_back(groups.item(g));
    const PickleField parameters = groups_.back().at("params");
    parameters_.emplace_back();
    for (size_t i = 0; i < parameters.size(); ++i) {
      parameters_.back().push_back(parameters.item(i).integer());
      if (!seen.insert(parameters_.back().back()).second) parameters.fail("a parameter in two groups");
    }
  }
  read_states(state_dict.at("state"));
  for (const auto& [index, states] : states_) {
    if (!seen.contains(index)) state_dict.fail(cat("a state of parameter ", index, ", which is in no group"));
  }
}

void SavedOptimizer::read_states(const PickleField& states) {
  if (!states.is(PickleKind::kDict)) states.fail("expected a dict of states by parameter");
  bool has_maximum = false;
  for (const auto& [key, value] : states.value().entries) {
    if (!key->is(PickleKind::kInt)) states.fail("expected keys that are ints");
    const PickleField parameter(*value, cat(states.where(), "[", key->integer, "]"));
    std::map<std::string, PickleField> fields;
    for (const auto& [name, field] : parameter.entries()) {
      if (!is_known(name)) field.fail("a state that Adam does not have; only states of Adam and AdamW can be read");
      has_maximum |= name == kMaximum;
      fields.insert_or_assign(name, field);
    }
    if (fields.empty()) continue;
    for (const std::string& name : state_names_) {
      if (!fields.contains(name)) parameter.fail(cat("no ", name, "; only states of Adam and AdamW can be read"));
    }
    states_.insert_or_assign(key->integer, std::move(fields));
  }
  if (has_maximum) state_names_.emplace_back(kMaximum);
}

std::vector<int64_t> SavedOptimizer::all_parameters() const {
  std::vector<int64_t> all;
  for (const std::vector<int64_t>& group : parameters_) all.insert(all.end(), group.begin(), group.end());
  return all;
}

const TensorReference& SavedOptimizer::state(int64_t index, const std::string& name) const {
  const auto& fields = states_.at(index);
  const auto found = fields.find(name);
  require<IoError>(found != fields.end(), where_, ": no ", name, " of parameter ", index, ", which others have");
  return found->second.tensor();
}

const PickleField* SavedOptimizer::step(int64_t index) const {
  const auto& fields = states_.at(index);
  const auto found = fields.find("step");
  return found == fields.end() ? nullptr : &found->second;
}

}  // namespace ds::checkpoint
