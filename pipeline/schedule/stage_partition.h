// Which layers make up which stage. Pure arithmetic, torch-free.
#pragma once

#include <string>
#include <vector>

namespace ds::pipeline {

// Stage s has layers [bounds[s], bounds[s + 1]); stages + 1 numbers, each stage has at least one layer.
using StageBounds = std::vector<int>;

// Gives all stages equally many layers, the first ones one more where they do not divide. Throws ConfigError for fewer
// layers than stages.
StageBounds partition_uniform(int layers, int stages);

// Consecutive layers such that the heaviest stage is as light as can be and, among these, the squares of all stages'
// weights add up to the least: what is left is spread. Weights are not negative.
StageBounds partition_balanced(const std::vector<double>& weights, int stages);

// 1 for each type in which `regex` (ECMAScript, case-insensitive) is found, else 0. Throws ConfigError for a regex that
// is none, or that finds nothing, naming the types.
std::vector<double> weights_of_type(const std::vector<std::string>& types, const std::string& regex);

}  // namespace ds::pipeline
