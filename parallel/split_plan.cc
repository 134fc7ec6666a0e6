#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "core/check.h"
#include "core/name_pattern.h"
#include "core/split/tensor_part.h"
#include "dsengine/split_plan.h"

namespace ds::parallel {
namespace {

struct CompiledRule {
  const SplitRule* rule;
  NamePattern pattern;
  bool matched = false;
};

std::vector<CompiledRule> compiled(const std::vector<SplitRule>& rules) {
  std::vector<CompiledRule> result;
  for (const SplitRule& rule : rules) {
    const std::string reason = regex_problem(rule.pattern);
    require(reason.empty(), "the pattern '", rule.pattern, "' of a split rule is no regular expression: ", reason);
    result.push_back({.rule = &rule, .pattern = NamePattern::regex(rule.pattern)});
  }
  return result;
}

std::string module_of(const std::string& parameter) {
  const size_t dot = parameter.rfind('.');
  return dot == std::string::npos ? std::string() : parameter.substr(0, dot);
}

CompiledRule* rule_for(const std::string& name, std::vector<CompiledRule>& rules) {
  const std::string module = module_of(name);
  CompiledRule* result = nullptr;
  for (CompiledRule& rule : rules) {
    if (!rule.pattern.matches(name) && !rule.pattern.matches(module)) continue;
    rule.matched = true;
    if (result == nullptr) result = &rule;
  }
  return result;
}

const char* name_of_style(Style style) {
  switch (style) {
    case Style::kColumn:
      return "column";
    case Style::kRow:
      return "row";
    case Style::kVocabulary:
      return "vocabulary";
    case Style::kWhole:
      return "whole";
  }
  return "";
}

// The dimension that a style cuts; nothing where the parameter stays whole.
std::optional<int64_t> cut_dim(const SplitRule& rule, size_t dims) {
  if (rule.style == Style::kWhole || dims == 0) return std::nullopt;
  if (dims == 1) return rule.style == Style::kRow ? std::nullopt : std::optional<int64_t>(0);
  if (rule.dim) return rule.dim;
  return rule.style == Style::kRow ? 1 : 0;
}

ParameterSplit split_by(const SplitRule& rule, const NamedShape& parameter, int ranks) {
  ParameterSplit result{.name = parameter.name, .sizes = parameter.sizes, .reason = {}, .by_rule = true};
  const std::string by = rule.origin.empty() ? cat(name_of_style(rule.style), ", by '", rule.pattern, "'")
                                             : cat(name_of_style(rule.style), ", by ", rule.origin);
  const std::optional<int64_t> dim = cut_dim(rule, parameter.sizes.size());
  if (rule.join_output && dim && parameter.sizes.size() == 1) {
    result.reason = cat("whole: ", by, "; a bias is added once, to the joined output");
    return result;
  }
  if (!dim) {
    result.reason = cat("whole: ", by,
                        rule.style == Style::kRow ? "; a bias is added once, after the ranks' sums"
                        : parameter.sizes.empty() ? "; a single number is not cut"
                                                  : "");
    return result;
  }
  require(*dim >= 0 && *dim < static_cast<int64_t>(parameter.sizes.size()), "the rule '", rule.pattern,
          "' cuts dimension ", *dim, ", parameter ", parameter.name, " has ", parameter.sizes.size(), " dimensions");
  const int64_t extent = parameter.sizes[*dim];
  const Cut cut{.dim = *dim, .blocks = rule.blocks, .grain = rule.grain};
  const std::string problem = cut_problem(cut, extent);
  require(problem.empty(), "the rule '", rule.pattern, "' does not fit dimension ", *dim, " of parameter ",
          parameter.name, ": ", problem);
  for (const int64_t block : blocks_of(cut, extent)) {
    if (block / cut.grain >= ranks) continue;
    result.reason = cat("whole: ", by, ", but ", block, " elements in multiples of ", cut.grain,
                        " leave nothing for some of ", ranks, " ranks");
    return result;
  }
  result.style = rule.style;
  result.dim = *dim;
  result.blocks = rule.blocks;
  result.grain = rule.grain;
  result.join_output = rule.join_output;
  result.reason = cat("dimension ", *dim, " over ", ranks, " ranks: ", by,
                      is_even(cut, extent, ranks) ? "" : ", uneven", rule.join_output ? ", its output is joined" : "");
  return result;
}

}  // namespace

SplitPlan plan_splits(const std::vector<NamedShape>& parameters, const std::vector<SplitRule>& rules, int ranks) {
  require(ranks >= 1, "a plan is for at least one rank, found ", ranks);
  std::vector<CompiledRule> tried = compiled(rules);
  SplitPlan result;
  for (const NamedShape& parameter : parameters) {
    const CompiledRule* const found = rule_for(parameter.name, tried);
    if (found != nullptr && ranks > 1) {
      result.push_back(split_by(*found->rule, parameter, ranks));
    } else {
      result.push_back({.name = parameter.name,
                        .sizes = parameter.sizes,
                        .reason = ranks == 1 ? "whole: one rank" : "whole: no rule matches its name"});
    }
  }
  for (const CompiledRule& rule : tried) {
    require(rule.matched, "the split rule '", rule.rule->pattern,
            "' matches no parameter and no module that has some; ", "a pattern is for the whole name, as '",
            parameters.empty() ? std::string("...") : parameters.back().name, "' or '",
            parameters.empty() ? std::string("...") : module_of(parameters.back().name), "'");
  }
  return result;
}

std::string describe(const SplitPlan& plan) {
  std::string result;
  for (const ParameterSplit& split : plan) {
    std::string sizes;
    for (const int64_t size : split.sizes) sizes += (sizes.empty() ? "" : ", ") + std::to_string(size);
    result += cat(split.name, " [", sizes, "]: ", split.reason, "\n");
  }
  return result;
}

}  // namespace ds::parallel
