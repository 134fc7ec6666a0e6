#include <algorithm>

#include "parallel/rules/rules.h"

namespace ds::parallel {
namespace {

struct PointwiseOperand {
  size_t argument;
  Operand operand;
};
using PointwiseOperands = c10::SmallVector<PointwiseOperand, 4>;

// None where tensors come in lists.
std::optional<PointwiseOperands> pointwise_operands(const Call& call) {
  PointwiseOperands result;
  for (size_t i = 0; i < call.arguments(); ++i) {
    const c10::IValue& value = call.argument(i);
    if (value.isTensor()) {
      if (value.toTensor().defined()) result.push_back({.argument = i, .operand = call.operand(i)});
    } else if (value.isTensorList() || (value.isList() && !value.isIntList() && !value.isDoubleList())) {
      return std::nullopt;
    }
  }
  return result;
}

// How an operand takes part in a result that is cut: its part, or the whole where it is broadcast along the cut.
at::Tensor pointwise_part(const Call& call, const Operand& operand, const Cut& cut, const Sizes& result) {
  const int64_t dim = cut.dim - (static_cast<int64_t>(result.size()) - operand.dim());
  if (dim < 0 || operand.sizes[dim] != result[cut.dim]) return for_parts(operand, call.axis());
  return part_as(operand, along(cut, dim), call.axis());
}

// Which operand says how the result is cut: the one that is changed, else the largest split one.
const Operand* leading_operand(const Call& call, const PointwiseOperands& operands) {
  if (call.changes(0)) return operands[0].operand.is_split() ? &operands[0].operand : nullptr;
  const Operand* result = nullptr;
  for (const auto& [argument, operand] : operands) {
    if (call.changes(argument)) return nullptr;  // an output of the program's
    if (!operand.is_split()) continue;
    if (result == nullptr || elements_of(operand.sizes) > elements_of(result->sizes)) result = &operand;
  }
  return result;
}

// Results like the first tensor, whatever the others are: copies and casts.
Outcome like_first(Call& call) {
  const Operand first = call.operand(0);
  const bool joins = joins_output(call.given(0));
  for (size_t i = 1; i < call.arguments(); ++i) {
    if (is_split(call.given(i))) call.set(i, part_of(call.given(i)));
  }
  call.set(0, first.is_split() ? first.tensor : as_plain(first, call.axis()));
  call.run();
  if (first.is_split()) call.result() = call.split(call.result().toTensor(), *first.cut, first.sizes);
  if (joins) mark_joins_output(call.result().toTensor());
  return Outcome::kDone;
}

// A new tensor of given sizes, dtype and device from that of the first.
Outcome unlike_first(Call& call) {
  call.set(0, call.operand(0).tensor);
  call.run();
  return Outcome::kDone;
}

}  // namespace

Outcome compute_pointwise(Call& call) {
  const std::optional<PointwiseOperands> operands = pointwise_operands(call);
  if (!operands || operands->empty()) return Outcome::kNone;
  const Operand* const lead = leading_operand(call, *operands);
  if (lead == nullptr) return Outcome::kJoin;
  Sizes sizes;
  for (const auto& [argument, operand] : *operands) broadcast(sizes, operand.sizes);
  const auto dims = static_cast<int64_t>(sizes.size());
  const Cut cut = along(*lead->cut, lead->cut->dim + dims - lead->dim());
  const bool in_place = call.changes(0);
  if (elements_of(sizes) == 0 || sizes[cut.dim] != lead->sizes[lead->cut->dim]) return Outcome::kJoin;
  if (in_place && sizes != lead->sizes) return Outcome::kJoin;  // which throws as it does for plain tensors
  const at::Tensor changed = in_place ? call.given(0) : at::Tensor();
  if (in_place) require_changeable(changed, call.name());
  const at::Tensor part = lead->tensor;
  for (const auto& [argument, operand] : *operands) {
    call.set(argument, pointwise_part(call, operand, cut, sizes));
  }
  call.run();
  for (size_t i = 0; i < call.results(); ++i) {
    if (in_place) {
      note_changed_part(changed, part);
      call.result(i) = changed;
    } else if (call.result(i).isTensor()) {
      call.result(i) = call.split(call.result(i).toTensor(), cut, sizes);
    }
  }
  return Outcome::kDone;
}

void add_pointwise_rules(RuleTable& table) {
  for (const char* name : {"contiguous", "clone", "detach", "alias", "to.dtype_layout", "to.device", "to.dtype",
                           "to.other", "_to_copy", "empty_like", "zeros_like", "ones_like", "full_like"}) {
    table[std::string("aten::") + name] = like_first;
  }
  for (const char* name : {"new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"}) {
    table[std::string("aten::") + name] = unlike_first;
  }
  for (const char* name : {"copy_", "fill_.Scalar", "fill_.Tensor", "zero_"}) {
    table[std::string("aten::") + name] = compute_pointwise;
  }
}

}  // namespace ds::parallel
