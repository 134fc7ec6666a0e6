// Random expressions of tensors with random placements, against the same expressions of plain tensors.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "parallel/axis/collectives.h"
#include "tests/parallel/split_ranks.h"
#include "tests/support/grid.h"

namespace ds::parallel {
namespace {

using Tensors = std::vector<at::Tensor>;
using Step = std::function<at::Tensor(const Tensors&)>;

// An expression: leaves, then steps that each make one more tensor of those before.
struct Expression {
  Tensors leaves;
  std::vector<std::optional<Cut>> placements;  // of the leaves
  std::vector<bool> summed;                    // whole leaves of which each rank has a part of the gradient
  std::vector<Step> steps;
  std::string text;
};

class ExpressionMaker {
 public:
  explicit ExpressionMaker(uint32_t seed) : random_(seed) {}

  Expression make() {
    torch::manual_seed(random_());
    for (int i = 0; i < 3; ++i) add_leaf(random_sizes());
    const int64_t steps = number(4, 12);
    for (int64_t i = 0; i < steps; ++i) add_step();
    return std::move(made_);
  }

 private:
  int64_t number(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(random_); }
  std::vector<int64_t> random_sizes() {
    static const std::vector<int64_t> some = {1, 2, 3, 4, 6, 8};
    std::vector<int64_t> result;
    const int64_t dims = number(1, 4);
    for (int64_t i = 0; i < dims; ++i) result.push_back(some[number(0, 5)]);
    return result;
  }
  void add_leaf(const std::vector<int64_t>& sizes) {
    std::optional<Cut> cut;
    if (!sizes.empty() && number(0, 3) > 0) {
      cut = Cut{.dim = number(0, static_cast<int64_t>(sizes.size()) - 1), .blocks = {}};
      if (sizes[cut->dim] % 2 == 0 && number(0, 2) == 0) cut->repeats = 2;
      if (number(0, 5) == 0) cut->order = PartOrder::kZigzag;
    }
    values_.push_back(at::randn(sizes, at::kDouble));
    made_.leaves.push_back(values_.back());
    made_.placements.push_back(cut);
    made_.summed.push_back(!cut && number(0, 1) == 0);
  }
  void add(const std::string& name, const std::function<at::Tensor(const Tensors&)>& run) {
    const at::Tensor value = run(values_);
    if (!value.defined() || value.numel() == 0 || value.numel() > 4096) return;
    made_.steps.push_back(run);
    made_.text += name + "; ";
    values_.push_back(value);
  }
  void add_step() {
    const size_t a = number(0, static_cast<int64_t>(values_.size()) - 1);
    const at::Tensor& x = values_[a];
    const int64_t dims = x.dim();
    const int64_t dim = dims == 0 ? 0 : number(0, dims - 1);
    switch (number(0, 20)) {
      case 0:
        return add("tanh", [=](const Tensors& t) { return t[a].tanh(); });
      case 1:
        return add("gelu", [=](const Tensors& t) { return at::gelu(t[a]) - 0.1; });
      case 2:
        return add_pair(a);
      case 3:
        return add_product(a);
      case 4:
        return add_reshape(a);
      case 5: {
        std::vector<int64_t> order(dims);
        for (int64_t i = 0; i < dims; ++i) order[i] = i;
        std::shuffle(order.begin(), order.end(), random_);
        return add("permute", [=](const Tensors& t) { return t[a].permute(order); });
      }
      case 6:
        if (dims == 0) return;
        return add("softmax", [=](const Tensors& t) { return t[a].softmax(dim); });
      case 7: {
        const bool keep = number(0, 1) == 0;
        if (dims == 0) return;
        return add("sum", [=](const Tensors& t) { return t[a].sum(at::IntArrayRef{dim}, keep) * 0.3; });
      }
      case 8:
        return add("mean", [=](const Tensors& t) { return t[a] - t[a].mean(); });
      case 9:
        if (dims == 0 || x.size(-1) < 2) return;
        return add("layer_norm", [=](const Tensors& t) { return at::layer_norm(t[a], {t[a].size(-1)}); });
      case 10: {
        if (dims == 0) return;
        const int64_t length = number(1, x.size(dim));
        const int64_t begin = number(0, x.size(dim) - length);
        return add("narrow", [=](const Tensors& t) { return t[a].narrow(dim, begin, length); });
      }
      case 11:
        if (dims == 0) return;
        return add("cat", [=](const Tensors& t) { return at::cat({t[a], t[a].sin()}, dim); });
      case 12:
        if (dims == 0) return;
        return add("chunk", [=](const Tensors& t) { return t[a].chunk(2, dim).back(); });
      case 13: {
        const int64_t place = number(0, dims);
        return add("unsqueeze, expand", [=](const Tensors& t) {
          std::vector<int64_t> sizes(t[a].dim() + 1, -1);
          sizes[place] = 2;
          return t[a].unsqueeze(place).expand(sizes);
        });
      }
      case 14:
        return add("in place", [=](const Tensors& t) { return t[a].clone().mul_(0.5).add_(t[a]).tanh_(); });
      case 15:
        if (dims == 0) return;
        return add("flip", [=](const Tensors& t) { return t[a].flip({dim}); });
      case 16: {
        if (dims == 0) return;
        const int64_t index = number(0, x.size(dim) - 1);
        return add("select", [=](const Tensors& t) { return t[a].select(dim, index) * 2; });
      }
      case 17:
        if (dims == 0) return;
        return add("log_softmax", [=](const Tensors& t) { return t[a].log_softmax(dim) * 0.2; });
      case 18:
        if (dims < 2) return;
        return add("entropy", [=](const Tensors& t) { return entropy(t[a]); });
      case 19: {
        if (dims < 2) return;
        const at::Tensor rows = at::arange(x.numel() / x.size(-1));
        const at::Tensor targets = (rows * 5 % x.size(-1)).view(x.sizes().slice(0, dims - 1));
        return add("log_probabilities", [=](const Tensors& t) { return log_probabilities(t[a], targets); });
      }
      default:
        if (dims == 0) return;
        return add("view in place", [=](const Tensors& t) {
          const at::Tensor base = t[a] * 1;
          base.unsqueeze(dim).mul_(3);
          base.transpose(0, -1).sub_(0.25);
          return base;
        });
    }
  }
  // Two tensors that broadcast against each other.
  void add_pair(size_t a) {
    const size_t b = number(0, static_cast<int64_t>(values_.size()) - 1);
    const at::Tensor& x = values_[a];
    const at::Tensor& y = values_[b];
    const int64_t dims = std::min(x.dim(), y.dim());
    for (int64_t i = 1; i <= dims; ++i) {
      if (x.size(-i) != y.size(-i) && x.size(-i) != 1 && y.size(-i) != 1) return;
    }
    if (number(0, 1) == 0) return add("add", [=](const Tensors& t) { return t[a] + t[b] * 0.5; });
    add("mul", [=](const Tensors& t) { return t[a].tanh() * t[b]; });
  }
  void add_product(size_t a) {
    for (size_t b = 0; b < values_.size(); ++b) {
      const at::Tensor& x = values_[a];
      const at::Tensor& w = values_[b];
      if (x.dim() >= 1 && w.dim() == 2 && x.size(-1) == w.size(1) && number(0, 1) == 0) {
        return add("linear", [=](const Tensors& t) { return at::linear(t[a], t[b]) * 0.3; });
      }
      if (x.dim() >= 2 && w.dim() >= 2 && x.size(-1) == w.size(-2) && number(0, 1) == 0) {
        bool fits = true;
        for (int64_t i = 3; i <= std::min(x.dim(), w.dim()); ++i) {
          fits = fits && (x.size(-i) == w.size(-i) || x.size(-i) == 1 || w.size(-i) == 1);
        }
        if (fits) return add("matmul", [=](const Tensors& t) { return at::matmul(t[a], t[b]) * 0.3; });
      }
    }
    if (values_[a].dim() >= 2) {
      add("matmul of its transpose", [=](const Tensors& t) { return at::matmul(t[a], t[a].transpose(-1, -2)) * 0.2; });
    }
  }
  void add_reshape(size_t a) {
    int64_t left = values_[a].numel();
    std::vector<int64_t> sizes;
    while (left > 1 && sizes.size() < 3) {
      std::vector<int64_t> divisors;
      for (int64_t d = 1; d <= left; ++d) {
        if (left % d == 0) divisors.push_back(d);
      }
      sizes.push_back(divisors[number(0, static_cast<int64_t>(divisors.size()) - 1)]);
      left /= sizes.back();
    }
    sizes.push_back(left);
    add("reshape", [=](const Tensors& t) { return t[a].reshape(sizes); });
  }

  std::mt19937 random_;
  Expression made_;
  Tensors values_;
};

// The loss, then gradients of the leaves.
Tensors evaluate(const Expression& expression, const std::shared_ptr<Axis>& axis) {
  Tensors leaves;
  Tensors values;
  for (size_t i = 0; i < expression.leaves.size(); ++i) {
    leaves.push_back(expression.leaves[i].clone().requires_grad_());
    const auto& cut = expression.placements[i];
    if (axis && expression.summed[i]) {
      values.push_back(make_split(leaves[i], {.axis = axis, .cut = std::nullopt, .summed = true}, leaves[i].sizes()));
    } else {
      values.push_back(axis && cut ? split_as(leaves[i], axis, *cut) : leaves[i]);
    }
  }
  for (const Step& step : expression.steps) values.push_back(step(values));
  at::Tensor loss = at::zeros({}, at::kDouble);
  for (const at::Tensor& value : values) loss = loss + whole(value.sin().mean());
  loss.backward();
  Tensors result = {loss.detach()};
  for (size_t i = 0; i < leaves.size(); ++i) {
    const bool is_part = axis && expression.summed[i];
    result.push_back(is_part ? all_reduce_sum(leaves[i].grad(), *axis) : leaves[i].grad());
  }
  return result;
}

void try_expressions(int ranks, uint32_t first, uint32_t count) {
  std::vector<Expression> expressions;
  std::vector<Tensors> expected;
  for (uint32_t i = 0; i < count; ++i) {
    expressions.push_back(ExpressionMaker(first + i).make());
    expected.push_back(evaluate(expressions.back(), nullptr));
  }
  test::run_ranks(ranks, [&](comm::Communicator& communicator) {
    const std::shared_ptr<Axis> axis = make_axis(shared(communicator));
    for (uint32_t i = 0; i < count; ++i) {
      axis->cut_sequences(i % 2 == 1);
      axis->overlap(i % 3 == 2);
      const Tensors found = evaluate(expressions[i], axis);
      for (size_t k = 0; k < found.size(); ++k) {
        ASSERT_LE(relative_error(found[k], expected[i][k]), 1e-10)
            << "expression " << first + i << " over " << ranks << " ranks, value " << k << ": " << expressions[i].text;
      }
    }
  });
}

TEST(RandomGraphs, AreThoseOfPlainTensors) {
  const uint32_t count = test::whole_grid_wanted() ? 5000 : 150;
  for (const int ranks : {2, 4}) {
    for (uint32_t done = 0; done < count; done += 50) try_expressions(ranks, 10000 * ranks + done, 50);
  }
}

}  // namespace
}  // namespace ds::parallel
