#include "checkpoint/deepspeed/parameter_match.h"

#include <map>

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

}  // namespace ds::checkpoint
