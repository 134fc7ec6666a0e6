#include "config/split/rules_from_names.h"

#include "core/ascii.h"
#include "core/name_pattern.h"

namespace ds::engine {
namespace {

// `name`, with `number` in place of each number by itself (w1 and w2 are two layers) and `letter` of each other letter.
template <class Letter>
std::string with_numbers_as(const std::string& number, const std::string& name, const Letter& letter) {
  std::string result;
  bool by_itself = false;
  for (size_t i = 0; i < name.size(); ++i) {
    const bool begins = i == 0 || !is_ascii_digit(name[i - 1]);
    if (begins) by_itself = i == 0 || name[i - 1] == '.' || name[i - 1] == '_';
    if (!is_ascii_digit(name[i]) || !by_itself) {
      result += letter(name[i]);
    } else if (begins) {
      result += number;
    }
  }
  return result;
}

std::string pattern_of(const std::string& name, bool any_number) {
  if (!any_number) return regex_of_text(name);
  return with_numbers_as("\\d+", name, [](const char& letter) { return regex_of_text({&letter, 1}); });
}

bool same(const SplitDecision* a, const SplitDecision* b) {
  if (a == nullptr || b == nullptr) return a == b;
  return a->style == b->style && a->dim == b->dim && a->blocks == b->blocks && a->grain == b->grain &&
         a->origin == b->origin && a->join_output == b->join_output;
}

parallel::SplitRule rule_of(std::string pattern, const SplitDecision& decision) {
  return {.pattern = std::move(pattern),
          .style = decision.style,
          .blocks = decision.blocks,
          .grain = decision.grain,
          .dim = decision.dim,
          .join_output = decision.join_output,
          .origin = decision.origin};
}

// Names that are one but for their numbers.
struct Alike {
  const SplitDecision* first = nullptr;
  bool all_same = true;
  bool told = false;
};

}  // namespace

std::string without_numbers(const std::string& name) {
  return with_numbers_as("*", name, [](char letter) { return letter; });
}

std::vector<parallel::SplitRule> rules_by_name(const std::vector<parallel::NamedShape>& parameters,
                                               const std::unordered_map<std::string, SplitDecision>& decisions) {
  const auto decision_of = [&](const std::string& name) -> const SplitDecision* {
    const auto found = decisions.find(name);
    return found == decisions.end() ? nullptr : &found->second;
  };
  std::unordered_map<std::string, Alike> groups;
  for (const parallel::NamedShape& parameter : parameters) {
    const SplitDecision* const decision = decision_of(parameter.name);
    const auto [entry, is_new] = groups.try_emplace(pattern_of(parameter.name, true), Alike{.first = decision});
    entry->second.all_same = entry->second.all_same && (is_new || same(entry->second.first, decision));
  }
  std::vector<parallel::SplitRule> rules;
  for (const parallel::NamedShape& parameter : parameters) {
    const SplitDecision* const decision = decision_of(parameter.name);
    if (decision == nullptr) continue;
    std::string pattern = pattern_of(parameter.name, true);
    Alike& group = groups.at(pattern);
    if (!group.all_same) {
      rules.push_back(rule_of(pattern_of(parameter.name, false), *decision));
    } else if (!group.told) {
      rules.push_back(rule_of(std::move(pattern), *decision));
      group.told = true;
    }
  }
  return rules;
}

}  // namespace ds::engine
