#include <map>
#include <optional>
#include <tuple>

#include "checkpoint/deepspeed/layout.h"
#include "checkpoint/deepspeed/saved_optimizer.h"
#include "core/check.h"

namespace ds::checkpoint {
namespace {

constexpr size_t kMostStates = 1'000'000;
constexpr int kLeftOver = -1;

using Groups = std::vector<std::vector<std::optional<Sizes>>>;
using Position = std::vector<size_t>;  // parameters taken: of the module, then of each group

// Walks through the module and counts the ways on from each position, up to two.
class ParameterMatch {
 public:
  ParameterMatch(const std::vector<NamedSizes>& module, const Groups& groups, const std::string& where)
      : module_(module), groups_(groups), where_(where) {}

  // The only way, as the group of each parameter of the module.
  std::vector<int> only_way() {
    size_t wanted = 0;
    for (const auto& group : groups_) wanted += group.size();
    const Position start(groups_.size() + 1, 0);
    count_all(start);
    require<IoError>(ways_.at(start) > 0, where_, ": its ", wanted,
                     " parameters do not have the sizes of parameters of the module, in order");
    require<IoError>(ways_.at(start) == 1, where_, ": its ", wanted, " parameters can be matched with the ",
                     module_.size(),
                     " of the module in more than one way, as frozen or other groups' parameters have "
                     "the same sizes; DeepSpeed writes names at ZeRO stages 1 to 3, save with one of them");
    std::vector<int> result;
    for (Position at = start; at[0] < module_.size();) {
      for (const auto& [choice, next] : choices(at)) {
        if (ways_.at(next) == 0) continue;
        result.push_back(choice);
        at = next;
        break;
      }
    }
    return result;
  }

 private:
  std::vector<std::pair<int, Position>> choices(const Position& at) const {
    std::vector<std::pair<int, Position>> result;
    if (at[0] == module_.size()) return result;
    size_t missing = 0;
    for (size_t g = 0; g < groups_.size(); ++g) {
      missing += groups_[g].size() - at[g + 1];
      if (at[g + 1] == groups_[g].size()) continue;
      const std::optional<Sizes>& sizes = groups_[g][at[g + 1]];
      if (!sizes || *sizes == module_[at[0]].sizes) result.emplace_back(static_cast<int>(g), advanced(at, g + 1));
    }
    if (missing < module_.size() - at[0]) result.emplace_back(kLeftOver, advanced(at, 0));
    return result;
  }

  static Position advanced(Position at, size_t group) {
    ++at[0];
    if (group > 0) ++at[group];
    return at;
  }

  bool complete(const Position& at) const {
    for (size_t g = 0; g < groups_.size(); ++g) {
      if (at[g + 1] != groups_[g].size()) return false;
    }
    return at[0] == module_.size();
  }

  // Depth first without recursion: a position is counted when all that follow it are.
  void count_all(const Position& start) {
    std::vector<Position> open{start};
    while (!open.empty()) {
      const Position at = open.back();
      int ways = complete(at) ? 1 : 0;
      bool waits = false;
      for (const auto& [choice, next] : choices(at)) {
        const auto found = ways_.find(next);
        if (found == ways_.end()) {
          open.push_back(next);
          waits = true;
        } else {
          ways = std::min(2, ways + found->second);
        }
      }
      if (waits) continue;
      open.pop_back();
      ways_[at] = ways;
      require<IoError>(
          ways_.size() <= kMostStates, where_,
          ": too many ways to match its parameters with those of the module; save with a ZeRO stage from 1 on");
    }
  }

  const std::vector<NamedSizes>& module_;
  const Groups& groups_;
  const std::string& where_;
  std::map<Position, int> ways_;
};

}  // namespace

std::vector<std::vector<size_t>> match_parameters(const std::vector<NamedSizes>& module, const Groups& groups,
                                                  const std::string& where) {
  const std::vector<int> group_of = ParameterMatch(module, groups, where).only_way();
  std::vector<std::vector<size_t>> result(groups.size());
  for (size_t i = 0; i < group_of.size(); ++i) {
    if (group_of[i] != kLeftOver) result[static_cast<size_t>(group_of[i])].push_back(i);
  }
  return result;
}

namespace {

// Stage 0: the module has the names, the optimizer only the order.
class WholeLayout {
 public:
  WholeLayout(const SavedCheckpoint& saved, SavedLayout& layout) : saved_(saved), layout_(layout) {}

  void lay_out() {
    read_module();
    if (saved_.has_optimizer()) {
      const PickleField optimizer = saved_.model().at("optimizer");
      const SavedOptimizer torch_optimizer(saved_.torch_optimizer());
      const auto flat = optimizer.find("fp32_groups_flat");
      if (flat) {
        lay_out_flat(*flat, torch_optimizer);
      } else {
        lay_out_optimizer(optimizer.find("fp32_groups"), torch_optimizer);
      }
    }
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (!defined_[i]) define_whole(weight_path(parameters_[i].name), module_[i], saved_.has_optimizer());
    }
  }

 private:
  // Names of one tensor have one place in the file.
  void read_module() {
    std::map<std::tuple<std::string, int64_t, std::vector<int64_t>>, std::string> first;
    for (const auto& [name, field] : saved_.model().at("module").entries()) {
      if (layout_.tensors.tensors().contains(buffer_path(name))) continue;
      const TensorReference& tensor = field.tensor();
      saved_.models[0]->check(tensor);
      const auto [place, added] = first.emplace(std::tuple(tensor.storage, tensor.offset, tensor.sizes), name);
      if (!added && tensor.numel() > 0) {
        layout_.aliases[name] = place->second;
        continue;
      }
      parameters_.push_back({.name = name, .sizes = tensor.sizes});
      module_.push_back(&tensor);
    }
    defined_.assign(parameters_.size(), false);
  }

  // torch's optimizer over the parameters, or over float32 masters of them, in groups.
  void lay_out_optimizer(const std::optional<PickleField>& masters, const SavedOptimizer& optimizer) {
    const std::vector<std::vector<int64_t>>& groups = optimizer.parameters();
    std::vector<std::vector<std::optional<Sizes>>> sizes(groups.size());
    for (size_t g = 0; g < groups.size(); ++g) {
      if (masters && masters->item(g).size() != groups[g].size()) {
        masters->item(g).fail(cat("expected ", groups[g].size(), " tensors"));
      }
      for (size_t i = 0; i < groups[g].size(); ++i) {
        if (masters) {
          sizes[g].emplace_back(masters->item(g).item(i).tensor().sizes);
        } else if (optimizer.has_state(groups[g][i])) {
          sizes[g].emplace_back(optimizer.state(groups[g][i], "exp_avg").sizes);
        } else {
          sizes[g].emplace_back(std::nullopt);
        }
      }
    }
    const auto matches = match_parameters(parameters_, sizes, saved_.torch_optimizer().where());
    for (size_t g = 0; g < groups.size(); ++g) {
      for (size_t i = 0; i < groups[g].size(); ++i) {
        const size_t parameter = matches[g][i];
        define_trained(parameter, masters ? &masters->item(g).item(i).tensor() : module_[parameter]);
        if (!optimizer.has_state(groups[g][i])) continue;
        for (const std::string& state : optimizer.state_names()) {
          const TensorReference& tensor = optimizer.state(groups[g][i], state);
          check_sizes(tensor, state, parameter);
          define_whole(state_path(state, parameters_[parameter].name), &tensor, false);
        }
      }
    }
  }

  // Masters and moments of a group one after the other.
  void lay_out_flat(const PickleField& flat, const SavedOptimizer& optimizer) {
    if (flat.size() != 1 || optimizer.all_parameters().size() != 1) {
      flat.fail(cat("masters of ", flat.size(),
                    " groups without sizes, of which only one can be told apart; save with a "
                    "ZeRO stage from 1 on"));
    }
    cut(weight_path(""), flat.item(0).tensor(), flat);
    defined_.assign(parameters_.size(), true);
    const int64_t index = optimizer.all_parameters()[0];
    if (!optimizer.has_state(index)) return;
    for (const std::string& state : optimizer.state_names()) {
      cut(state_path(state, ""), optimizer.state(index, state), flat);
    }
  }

  void cut(const std::string& path, const TensorReference& tensor, const PickleField& where) {
    const int64_t stored = layout_.tensors.add(saved_.models[0], tensor);
    int64_t offset = 0;
    for (const NamedSizes& parameter : parameters_) {
      TensorInfo info{.dtype = tensor.dtype, .sizes = parameter.sizes};
      const int64_t numel = info.numel();
      if (numel > tensor.numel() - offset) break;
      layout_.tensors.define(where.where(), path + parameter.name, std::move(info),
                             {{.stored = stored, .begin = offset, .numel = numel}});
      offset += numel;
    }
    int64_t expected = 0;
    for (const TensorReference* parameter : module_) expected += parameter->numel();
    if (offset != tensor.numel() || offset != expected) {
      where.fail(cat(path, " has ", tensor.numel(), " elements, the module's parameters ", expected,
                     "; with frozen parameters save with a ZeRO stage from 1 on"));
    }
  }

  void define_trained(size_t parameter, const TensorReference* tensor) {
    check_sizes(*tensor, "its master", parameter);
    define_whole(weight_path(parameters_[parameter].name), tensor, false);
    defined_[parameter] = true;
  }

  void check_sizes(const TensorReference& tensor, const std::string& what, size_t parameter) const {
    if (tensor.sizes != parameters_[parameter].sizes) {
      saved_.model().fail(cat("parameter \"", parameters_[parameter].name, "\": ", what, " has other sizes"));
    }
  }

  void define_whole(const std::string& path, const TensorReference* tensor, bool frozen) {
    layout_.tensors.define_whole(saved_.model().where(), path, layout_.tensors.add(saved_.models[0], *tensor), frozen);
  }

  const SavedCheckpoint& saved_;
  SavedLayout& layout_;
  std::vector<NamedSizes> parameters_;          // of the module, each once
  std::vector<const TensorReference*> module_;  // their values there
  std::vector<bool> defined_;
};

}  // namespace

void lay_out_whole(const SavedCheckpoint& saved, SavedLayout& layout) { WholeLayout(saved, layout).lay_out(); }

}  // namespace ds::checkpoint
