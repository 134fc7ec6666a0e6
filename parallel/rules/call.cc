#include "parallel/rules/call.h"

#include <ATen/core/grad_mode.h>

#include <utility>

#include "core/check.h"
#include "parallel/axis/conversions.h"

namespace ds::parallel {

at::Tensor Call::given(size_t i) const { return argument(i).isTensor() ? argument(i).toTensor() : at::Tensor(); }

std::vector<Operand> Call::operands(size_t i) const {
  std::vector<Operand> result;
  for (const at::Tensor& tensor : argument(i).toTensorVector()) result.push_back(operand_of(tensor));
  return result;
}

bool Call::changes(size_t i) const {
  const c10::AliasInfo* const alias = op_.schema().arguments()[i].alias_info();
  return alias != nullptr && alias->isWrite();
}

Outcome Call::finish(c10::IValue result) {
  torch::jit::drop(stack_, arguments());
  stack_.push_back(std::move(result));
  return Outcome::kDone;
}

Outcome Call::finish_joined(const at::Tensor& part, const Cut& cut, c10::IntArrayRef sizes) {
  return finish(joined(part, {.axis = axis_, .cut = normalized(cut, sizes[cut.dim], axis_->size())}, sizes));
}

Cut along(Cut cut, int64_t dim) {
  cut.dim = dim;
  return cut;
}

int64_t wrapped_dim(int64_t dim, int64_t dims) { return dim < 0 ? dim + dims : dim; }

void broadcast(Sizes& result, const Sizes& sizes) {
  if (sizes.size() > result.size()) result.insert(result.begin(), sizes.size() - result.size(), 1);
  const size_t offset = result.size() - sizes.size();
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] != 1) result[offset + i] = sizes[i];
  }
}

int64_t elements_of(c10::IntArrayRef sizes) { return c10::multiply_integers(sizes); }

void require_changeable(const at::Tensor& split, const std::string& op) {
  require(placement_of(split).cut.has_value() || placement_of(split).summed, op,
          " would change a view of a tensor that was joined from its parts, ",
          "and the parts would not change; change the tensor itself, or a clone() of the view");
  require(!(at::GradMode::is_enabled() && split.is_leaf() && split.requires_grad()), op,
          " would change in place a leaf that requires a gradient; do it under torch::NoGradGuard");
}

}  // namespace ds::parallel
