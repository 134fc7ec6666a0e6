#include "pipeline/schedule/stage_partition.h"

#include <algorithm>
#include <limits>
#include <set>

#include "core/check.h"
#include "core/name_pattern.h"

namespace ds::pipeline {
namespace {

void require_enough(size_t layers, int stages) {
  require<ConfigError>(stages > 0 && layers >= static_cast<size_t>(stages), "pipeline: expected at least as many ",
                       "layers as stages, found ", layers, " layers for ", stages,
                       " stages; use fewer pipeline.stages, ", "fewer pipeline.chunks, or finer layers");
}

// best[k][i]: of the first i layers in k stages, by `join` of the stages' costs. Quadratic in layers: models have
// hundreds, not millions.
template <class Cost, class Join>
StageBounds cheapest(size_t layers, int stages, const Cost& cost, const Join& join) {
  constexpr double kNone = std::numeric_limits<double>::infinity();
  const auto parts = static_cast<size_t>(stages);
  std::vector<std::vector<double>> best(parts + 1, std::vector<double>(layers + 1, kNone));
  std::vector<std::vector<size_t>> begins(parts + 1, std::vector<size_t>(layers + 1, 0));
  best[0][0] = 0;
  for (size_t k = 1; k <= parts; ++k) {
    for (size_t end = k; end <= layers; ++end) {
      for (size_t begin = k - 1; begin < end; ++begin) {
        const double total = join(best[k - 1][begin], cost(begin, end));
        if (total >= best[k][end]) continue;
        best[k][end] = total;
        begins[k][end] = begin;
      }
    }
  }
  StageBounds bounds(parts + 1);
  size_t end = layers;
  for (size_t k = parts; k > 0; --k) {
    bounds[k] = static_cast<int>(end);
    end = begins[k][end];
  }
  return bounds;
}

}  // namespace

StageBounds partition_uniform(int layers, int stages) {
  require_enough(static_cast<size_t>(std::max(layers, 0)), stages);
  StageBounds bounds = {0};
  for (int s = 0; s < stages; ++s) bounds.push_back(bounds.back() + layers / stages + (s < layers % stages ? 1 : 0));
  return bounds;
}

StageBounds partition_balanced(const std::vector<double>& weights, int stages) {
  require_enough(weights.size(), stages);
  std::vector<double> sums = {0};
  for (const double weight : weights) sums.push_back(sums.back() + weight);
  const auto weight = [&](size_t begin, size_t end) { return sums[end] - sums[begin]; };
  const auto larger = [](double a, double b) { return std::max(a, b); };
  const StageBounds lightest = cheapest(weights.size(), stages, weight, larger);
  double limit = 0;
  for (size_t s = 0; s + 1 < lightest.size(); ++s) {
    limit = std::max(limit, weight(static_cast<size_t>(lightest[s]), static_cast<size_t>(lightest[s + 1])));
  }
  const auto square = [&](size_t begin, size_t end) {
    const double w = weight(begin, end);
    return w > limit ? std::numeric_limits<double>::infinity() : w * w;
  };
  return cheapest(weights.size(), stages, square, [](double a, double b) { return a + b; });
}

std::vector<double> weights_of_type(const std::vector<std::string>& types, const std::string& regex) {
  const std::string reason = regex_problem(regex);
  require<ConfigError>(reason.empty(), "pipeline.partition: type:", regex, ": not a regular expression: ", reason);
  const NamePattern pattern = NamePattern::regex(regex, Letters::kAnyCase);
  std::vector<double> weights;
  for (const std::string& type : types) weights.push_back(pattern.matches(type, NamePart::kAnywhere) ? 1 : 0);
  if (std::find(weights.begin(), weights.end(), 1.0) == weights.end()) {
    std::string names;
    for (const std::string& type : std::set<std::string>(types.begin(), types.end())) {
      names += cat(names.empty() ? "" : ", ", type);
    }
    throw ConfigError(
        cat("pipeline.partition: type:", regex, " is found in the type of no layer; expected one of: ", names));
  }
  return weights;
}

}  // namespace ds::pipeline
