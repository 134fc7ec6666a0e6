#include "parallel/rules/rules.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/enum_tag.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "parallel/axis/collectives.h"
#include "parallel/axis/conversions.h"

namespace ds::parallel {
namespace {

bool& verifying() {
  thread_local bool value = false;
  return value;
}

class Verifying {
 public:
  Verifying() { verifying() = true; }
  ~Verifying() { verifying() = false; }
  Verifying(const Verifying&) = delete;
  Verifying& operator=(const Verifying&) = delete;
};

// One way of computing the call: its arguments, and the leaves that they were made of.
struct Attempt {
  torch::jit::Stack stack;
  std::vector<at::Tensor> leaves;
};

using MakeOperand = std::function<at::Tensor(const at::Tensor& given, std::vector<at::Tensor>& leaves)>;

at::Tensor new_leaf(const at::Tensor& values, bool with_grad, std::vector<at::Tensor>& leaves) {
  at::Tensor leaf = values.detach().clone();
  if (!with_grad) return leaf;
  leaf.set_requires_grad(true);
  leaves.push_back(leaf);
  // No leaf, so that operators may change it.
  return leaf.clone();
}

c10::IValue copied(const c10::IValue& value, const MakeOperand& make, std::vector<at::Tensor>& leaves) {
  if (value.isTensor()) return value.toTensor().defined() ? make(value.toTensor(), leaves) : value;
  if (!value.isTensorList()) return value;
  c10::List<at::Tensor> list = value.toTensorList().copy();
  for (size_t i = 0; i < list.size(); ++i) list.set(i, make(list.get(i), leaves));
  return list;
}

Attempt attempt_with(const Call& call, const MakeOperand& make) {
  Attempt result;
  for (size_t i = 0; i < call.arguments(); ++i) result.stack.push_back(copied(call.argument(i), make, result.leaves));
  return result;
}

std::vector<at::Tensor> tensors_of(const torch::jit::Stack& results) {
  std::vector<at::Tensor> tensors;
  for (const c10::IValue& value : results) {
    if (value.isTensor()) tensors.push_back(value.toTensor());
    if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) tensors.push_back(tensor);
    }
  }
  return tensors;
}

// Returns the gradients of a sum of the results, with weights that are the same for both ways; undefined where a leaf
// has no part in it.
std::vector<at::Tensor> gradients_of(const std::vector<at::Tensor>& results, const std::vector<at::Tensor>& leaves) {
  at::Tensor loss;
  for (const at::Tensor& result : results) {
    if (!result.requires_grad()) continue;
    const at::Tensor values = whole_of(result).to(at::kDouble);
    const at::Tensor weights = at::arange(values.numel(), values.options()).view(values.sizes()).cos();
    const at::Tensor term = (values * weights).sum();
    loss = loss.defined() ? loss + term : term;
  }
  if (!loss.defined() || leaves.empty()) return std::vector<at::Tensor>(leaves.size());
  return torch::autograd::grad({loss}, leaves, {}, /*retain_graph=*/false, /*create_graph=*/false,
                               /*allow_unused=*/true);
}

double tolerance_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return 1e-9;
    case at::kFloat:
      return 1e-4;
    case at::kHalf:
    case at::kBFloat16:
      return 0.1;
    default:
      return 0;
  }
}

// Both plain, the same on all ranks.
void require_equal(const at::Tensor& found, const at::Tensor& expected, const std::string& op, const char* what,
                   size_t number) {
  const std::string where =
      cat("the rule for ", op, " disagrees with the operator on joined tensors, in ", what, " ", number);
  const char* const advice = "; keep the parameters that it reads whole (Style::kWhole), and report it";
  require<InternalError>(found.defined() == expected.defined(), where, ": one is missing", advice);
  if (!found.defined() || !expected.defined()) return;
  require<InternalError>(found.sizes() == expected.sizes(), where, ": sizes ", found.sizes(), " and ", expected.sizes(),
                         advice);
  require<InternalError>(found.scalar_type() == expected.scalar_type(), where, ": dtypes ", found.scalar_type(),
                         " and ", expected.scalar_type(), advice);
  if (expected.numel() == 0) return;
  const at::Tensor wanted = expected.detach().to(at::kDouble);
  const at::Tensor values = found.detach().to(at::kDouble);
  require<InternalError>(
      at::equal(at::isfinite(values), at::isfinite(wanted)) && at::equal(values.isnan(), wanted.isnan()), where,
      ": one has NaN or infinite values where the other has none", advice);
  const at::Tensor difference = (values.nan_to_num(0, 0, 0) - wanted.nan_to_num(0, 0, 0)).abs();
  const double greatest = std::max(wanted.abs().nan_to_num(0, 0, 0).max().item<double>(), 1e-3);
  const double error = difference.max().item<double>() / greatest;
  require<InternalError>(error <= tolerance_of(expected.scalar_type()), where, ": by ", error, " of the greatest value",
                         advice);
}

// Random numbers, or what happens to be in memory.
bool has_arbitrary_values(const Call& call) {
  return call.op().hasTag(at::Tag::nondeterministic_seeded) || call.name().find("empty") != std::string::npos ||
         call.name().find("dropout") != std::string::npos ||
         (call.name() == "aten::scaled_dot_product_attention" && call.argument(4).toDouble() > 0);
}

}  // namespace

bool is_verifying() { return verifying(); }

void verify_rule(const Rule& rule, const Call& call) {
  if (has_arbitrary_values(call)) return;
  const Verifying scope;
  const std::shared_ptr<Axis>& axis = call.axis();
  const bool with_grad = at::GradMode::is_enabled();
  const auto wants_gradient = [&](const at::Tensor& given) { return with_grad && given.requires_grad(); };
  Attempt own = attempt_with(call, [&](const at::Tensor& given, std::vector<at::Tensor>& leaves) {
    if (!is_split(given)) return new_leaf(given, wants_gradient(given), leaves);
    const at::Tensor part = new_leaf(part_of(given), wants_gradient(given), leaves);
    return make_split(part, placement_of(given), given.sizes());
  });
  std::vector<Placement> placements;
  Attempt joined = attempt_with(call, [&](const at::Tensor& given, std::vector<at::Tensor>& leaves) {
    const at::NoGradGuard no_grad;
    const at::Tensor values = whole_of(given);
    if (wants_gradient(given)) placements.push_back(is_split(given) ? placement_of(given) : Placement{});
    const at::AutoGradMode mode(with_grad);
    return new_leaf(values, wants_gradient(given), leaves);
  });
  Call own_call(call.op(), own.stack, axis);
  if (rule(own_call) != Outcome::kDone) return;
  call.op().callBoxed(joined.stack);
  const std::vector<at::Tensor> found = tensors_of(own.stack);
  const std::vector<at::Tensor> expected = tensors_of(joined.stack);
  require<InternalError>(found.size() == expected.size(), "the rule for ", call.name(), " gives ", found.size(),
                         " tensors, the operator ", expected.size());
  // Sizes first, which cost nothing; then values, which all ranks have.
  for (size_t i = 0; i < found.size(); ++i) {
    require_equal(whole_of(found[i].detach()), expected[i], call.name(), "result", i);
  }
  const std::vector<at::Tensor> gradients = gradients_of(found, own.leaves);
  const std::vector<at::Tensor> expected_gradients = gradients_of(expected, joined.leaves);
  for (size_t i = 0; i < gradients.size(); ++i) {
    // A gradient that does not arrive is one of zeros, for a rule that loses it and for an operator that has none.
    at::Tensor gradient = gradients[i].defined() ? gradients[i] : at::zeros_like(own.leaves[i]);
    if (placements[i].summed) gradient = all_reduce_sum(gradient, *axis);
    if (placements[i].cut) gradient = whole_of(make_split(gradient, placements[i], joined.leaves[i].sizes()));
    const at::Tensor& wanted = expected_gradients[i];
    require_equal(gradient, wanted.defined() ? wanted : at::zeros_like(joined.leaves[i]), call.name(), "gradient", i);
  }
}

}  // namespace ds::parallel
