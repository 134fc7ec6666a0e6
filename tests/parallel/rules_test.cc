// Every rule with every placement of its tensors and every dtype, against the whole: results and gradients.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <iostream>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "parallel/axis/collectives.h"
#include "tests/parallel/rule_cases.h"
#include "tests/parallel/split_ranks.h"
#include "tests/support/grid.h"

namespace ds::parallel {
namespace {

using Tensors = std::vector<at::Tensor>;
// Of an input: without a cut plain, or summed.
struct InputPlacement {
  std::optional<Cut> cut;
  bool summed = false;
};
using Placements = std::vector<InputPlacement>;

// Whole, and cut along each dimension; the last dimension also in two blocks, the first one also zigzag; and summed.
std::vector<InputPlacement> placements_of(const RuleInput& input) {
  std::vector<InputPlacement> result = {{}};
  const auto dims = static_cast<int64_t>(input.sizes.size());
  for (int64_t dim = 0; dim < dims; ++dim) result.push_back({.cut = Cut{.dim = dim, .blocks = {}}});
  if (input.sizes.back() % 2 == 0) result.push_back({.cut = Cut{.dim = dims - 1, .blocks = {}, .repeats = 2}});
  result.push_back({.cut = Cut{.dim = 0, .blocks = {}, .order = PartOrder::kZigzag}});
  if (input.indices == 0) result.push_back({.cut = std::nullopt, .summed = true});
  return result;
}

at::Tensor placed_as(const at::Tensor& leaf, const InputPlacement& placement, const std::shared_ptr<Axis>& axis) {
  if (placement.summed) return make_split(leaf, {.axis = axis, .cut = std::nullopt, .summed = true}, leaf.sizes());
  return placement.cut ? split_as(leaf, axis, *placement.cut) : leaf;
}

std::vector<Placements> all_placements(const RuleCase& rule) {
  std::vector<Placements> result = {{}};
  for (const RuleInput& input : rule.inputs) {
    std::vector<Placements> longer;
    for (const Placements& begun : result) {
      for (const auto& placement : placements_of(input)) {
        longer.push_back(begun);
        longer.back().push_back(placement);
      }
    }
    result = std::move(longer);
  }
  return result;
}

Tensors inputs_of(const RuleCase& rule, at::ScalarType dtype) {
  // Ranks are threads, which share the generator.
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  torch::manual_seed(11);
  Tensors result;
  for (const RuleInput& input : rule.inputs) {
    if (input.indices > 0) {
      result.push_back(at::randint(input.indices, input.sizes, at::kLong));
    } else {
      const at::Tensor values = at::randn(input.sizes, at::kDouble);
      result.push_back((input.positive ? values.abs() + 0.1 : values).to(dtype));
    }
  }
  return result;
}

// Results, then the gradients of a weighted sum of them.
Tensors results_and_gradients(const RuleCase& rule, const Tensors& leaves, const Tensors& operands) {
  Tensors results;
  at::Tensor loss;
  for (const at::Tensor& result : rule.run(operands)) {
    results.push_back(whole(result));
    if (!result.requires_grad()) continue;
    const at::Tensor weights = at::arange(results.back().numel(), at::kDouble).view(results.back().sizes()).cos();
    const at::Tensor term = (results.back().to(at::kDouble) * weights).sum();
    loss = loss.defined() ? loss + term : term;
  }
  if (loss.defined()) loss.backward();
  for (const at::Tensor& leaf : leaves) results.push_back(leaf.grad());
  return results;
}

Tensors leaves_of(const Tensors& inputs) {
  Tensors result;
  for (const at::Tensor& input : inputs) {
    result.push_back(input.detach().clone().set_requires_grad(input.is_floating_point()));
  }
  return result;
}

double tolerance_of(at::ScalarType dtype) { return dtype == at::kDouble ? 1e-12 : dtype == at::kFloat ? 5e-6 : 4e-2; }

std::string describe_placements(const Placements& placements) {
  std::string result;
  for (const auto& [cut, summed] : placements) {
    result += summed ? " summed"
              : cut  ? " " + std::to_string(cut->dim) + "x" + std::to_string(cut->repeats) +
                          (cut->order == PartOrder::kZigzag ? "z" : "")
                    : " whole";
  }
  return result;
}

struct Tally {
  int64_t tried = 0;
  int64_t joined = 0;
};

void try_case(const RuleCase& rule, at::ScalarType dtype, const std::shared_ptr<Axis>& axis,
              const std::vector<Placements>& placements, Tally& tally) {
  const Tensors inputs = inputs_of(rule, dtype);
  const Tensors plain = leaves_of(inputs);
  const Tensors expected = results_and_gradients(rule, plain, plain);
  for (const Placements& placed : placements) {
    const Tensors leaves = leaves_of(inputs);
    Tensors operands;
    for (size_t i = 0; i < leaves.size(); ++i) {
      operands.push_back(placed_as(leaves[i], placed[i], axis));
    }
    axis->reset_joined_operators();
    Tensors found = results_and_gradients(rule, leaves, operands);
    for (size_t i = 0; i < leaves.size(); ++i) {
      at::Tensor& gradient = found[found.size() - leaves.size() + i];
      if (placed[i].summed && gradient.defined()) gradient = all_reduce_sum(gradient, *axis);
    }
    ++tally.tried;
    if (!axis->joined_operators().empty()) ++tally.joined;
    ASSERT_EQ(found.size(), expected.size());
    for (size_t i = 0; i < found.size(); ++i) {
      if (!expected[i].defined() && !found[i].defined()) continue;
      ASSERT_TRUE(found[i].defined()) << rule.name << ":" << describe_placements(placed) << ", gradient " << i;
      if (!expected[i].defined()) {
        ASSERT_EQ(found[i].abs().max().item<double>(), 0) << rule.name << ":" << describe_placements(placed);
        continue;
      }
      ASSERT_EQ(found[i].scalar_type(), expected[i].scalar_type()) << rule.name << ":" << describe_placements(placed);
      const double tolerance = std::max(tolerance_of(dtype), rule.by_float ? 1e-6 : 0.0);
      ASSERT_LE(relative_error(found[i], expected[i]), tolerance)
          << rule.name << ":" << describe_placements(placed) << ", " << c10::toString(dtype) << ", result " << i
          << " of " << axis->size() << " ranks";
    }
  }
}

// Few enough: with more than two operands those in which each placement of each operand occurs with each of the next.
// Rules ask for no type, and float64 tells most: the other types take a seventh of its placements, each type another
// one.
std::vector<Placements> placements_to_try(const RuleCase& rule, at::ScalarType dtype) {
  const std::vector<Placements> all = all_placements(rule);
  if (test::whole_grid_wanted()) return all;
  size_t step = all.size() <= 80 ? 1 : all.size() / 60 | 1;
  size_t first = 0;
  if (dtype != at::kDouble) {
    first = (dtype == at::kFloat ? 1 : dtype == at::kHalf ? 3 : 5) * step % all.size();
    step *= 7;
  }
  std::vector<Placements> result;
  for (size_t i = first; i < all.size(); i += step) result.push_back(all[i]);
  return result;
}

void try_all(const std::vector<RuleCase>& rules, int ranks, at::ScalarType dtype) {
  test::run_ranks(ranks, [&](comm::Communicator& communicator) {
    const std::shared_ptr<Axis> axis = make_axis(shared(communicator));
    Tally tally;
    double joined_share = 0;  // each case counts once: those of many operands have most of the placements
    double counted = 0;
    std::string always_joined;
    for (const RuleCase& rule : rules) {
      Tally own;
      ASSERT_NO_FATAL_FAILURE(try_case(rule, dtype, axis, placements_to_try(rule, dtype), own)) << rule.name;
      if (own.joined == own.tried) always_joined += rule.name + "; ";
      if (rule.left_to_joins) continue;
      tally.tried += own.tried;
      tally.joined += own.joined;
      joined_share += static_cast<double>(own.joined) / static_cast<double>(own.tried);
      ++counted;
    }
    if (communicator.rank() != 0) return;
    EXPECT_LT(joined_share * 2, counted) << "most placements are computed on parts";
    std::cout << tally.tried << " placements, " << tally.joined << " of them joined; always: " << always_joined << "\n";
  });
}

class RulesOfDtype : public ::testing::TestWithParam<at::ScalarType> {};

TEST_P(RulesOfDtype, ShapesOverTwoRanks) { try_all(shape_cases(), 2, GetParam()); }
TEST_P(RulesOfDtype, ShapesOverThreeRanksUnevenly) { try_all(shape_cases(), 3, GetParam()); }
TEST_P(RulesOfDtype, ComputationsOverTwoRanks) { try_all(compute_cases(), 2, GetParam()); }
TEST_P(RulesOfDtype, ComputationsOverThreeRanksUnevenly) { try_all(compute_cases(), 3, GetParam()); }
INSTANTIATE_TEST_SUITE_P(Dtypes, RulesOfDtype, ::testing::Values(at::kFloat, at::kDouble, at::kBFloat16, at::kHalf),
                         [](const auto& dtype) { return std::string(c10::toString(dtype.param)); });

}  // namespace
}  // namespace ds::parallel
