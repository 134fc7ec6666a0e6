#include "comm/flight/contract.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "comm/flight/rank_list.h"
#include "core/text.h"
#include "core/text_hash.h"

namespace ds::comm {
namespace {

// A group, whatever its place in each rank's table.
using GroupKey = std::pair<std::string, std::string>;

GroupKey key_of(const FlightGroup& group) { return {group.name.text(), group.ranks.text()}; }

// One rank's view of a group.
struct View {
  const FlightLog* log;
  const FlightGroup* group;
  std::map<uint64_t, const FlightEntry*> collectives;  // by position
};

View view_of(const FlightLog& log, const FlightGroup& group) {
  View view{&log, &group, {}};
  const auto index = static_cast<size_t>(&group - log.groups.data());
  for (const FlightEntry& entry : log.entries) {
    if (entry.group == index && !entry.message) view.collectives[entry.position] = &entry;
  }
  return view;
}

std::map<GroupKey, std::vector<View>> views_of(const std::vector<FlightLog>& logs) {
  std::map<GroupKey, std::vector<View>> views;
  for (const FlightLog& log : logs) {
    for (const FlightGroup& group : log.groups) {
      if (group.own >= 0) views[key_of(group)].push_back(view_of(log, group));
    }
  }
  return views;
}

// The ranks for each thing that a rank may have.
template <class Value>
using Sides = std::map<Value, std::vector<int>>;

template <class Value>
const std::pair<const Value, std::vector<int>>& largest(const Sides<Value>& sides) {
  return *std::max_element(sides.begin(), sides.end(),
                           [](const auto& a, const auto& b) { return a.second.size() < b.second.size(); });
}

// position -> contract -> ranks
std::map<uint64_t, Sides<uint64_t>> marks_of(const std::vector<View>& views) {
  std::map<uint64_t, Sides<uint64_t>> marks;
  for (const View& view : views) {
    std::map<uint64_t, uint64_t> own;
    for (const auto& pair : view.group->marks) {
      for (const ContractMark& mark : pair) {
        if (mark.position > 0) own[mark.position] = mark.contract;
      }
    }
    for (const auto& [position, contract] : own) marks[position][contract].push_back(view.log->header.rank);
  }
  return marks;
}

// "ranks 0-2 issued X, rank 3 Y".
std::string sides_text(const std::vector<View>& views, uint64_t position) {
  Sides<uint64_t> sides;
  std::map<uint64_t, std::string> texts;
  std::map<std::string, std::vector<int>> phases;
  for (const View& view : views) {
    const auto found = view.collectives.find(position);
    if (found == view.collectives.end()) continue;
    const FlightEntry& entry = *found->second;
    sides[entry.signature].push_back(view.log->header.rank);
    texts[entry.signature] = operation_text(entry, *view.group);
    phases[entry.phase.text()].push_back(view.log->header.rank);
  }
  if (sides.size() < 2) return "";
  const auto& most = largest(sides);
  std::string text = cat(phases_in_words(phases), ranks_in_words(most.second), " issued ", texts[most.first]);
  for (const auto& [signature, ranks] : sides) {
    if (signature != most.first) text += cat(", ", ranks_in_words(ranks), " ", texts[signature]);
  }
  return text;
}

uint64_t finalized(uint64_t value) {  // of SplitMix64
  value ^= value >> 30;
  value *= 0xbf58476d1ce4e5b9ULL;
  value ^= value >> 27;
  value *= 0x94d049bb133111ebULL;
  return value ^ (value >> 31);
}

}  // namespace

uint64_t mix(uint64_t hash, uint64_t value) { return finalized(hash * 0x9e3779b97f4a7c15ULL + value + 1); }

uint64_t mix(uint64_t hash, const std::string& text) { return mix(hash, fnv1a(text)); }

void extend_contract(FlightGroup& group, uint64_t signature) {
  ++group.position;
  group.contract = mix(group.contract, signature);
  for (size_t i = 0; i < kMarkShifts.size(); ++i) {
    if ((group.position & ((uint64_t{1} << kMarkShifts[i]) - 1)) != 0) break;  // nor do the larger powers divide it
    group.marks[i][1] = group.marks[i][0];
    group.marks[i][0] = {group.position, group.contract};
  }
}

std::optional<ContractBreach> find_breach(const std::vector<FlightLog>& logs) {
  for (const auto& [key, views] : views_of(logs)) {
    for (const auto& [position, sides] : marks_of(views)) {
      if (sides.size() < 2) continue;
      const auto& most = largest(sides);
      const auto other =
          std::find_if(sides.begin(), sides.end(), [&](const auto& side) { return side.first != most.first; });
      return ContractBreach{
          .rank = other->second.front(), .other = most.second.front(), .group = key.first, .before = position};
    }
  }
  return std::nullopt;
}

std::string first_difference(const std::vector<FlightLog>& logs) {
  for (const auto& [key, views] : views_of(logs)) {
    uint64_t first = 1;  // from where on every rank's ring holds what was issued
    std::set<uint64_t> positions;
    for (const View& view : views) {
      uint64_t position = view.group->position;
      while (view.collectives.contains(position)) --position;
      first = std::max(first, position + 1);
      for (const auto& [held, entry] : view.collectives) positions.insert(held);
    }
    // Walks the positions that a ring holds, since a damaged record may say any number.
    for (auto position = positions.lower_bound(first); position != positions.end(); ++position) {
      if (std::string text = sides_text(views, *position); !text.empty()) return text;
    }
  }
  const auto breach = find_breach(logs);
  if (!breach) return "";
  return cat("rank ", breach->rank, " and rank ", breach->other, " issued different collectives at or before number ",
             breach->before, " of group ", breach->group, ", which their records do not reach back to");
}

}  // namespace ds::comm
