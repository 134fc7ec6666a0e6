// One call of an operator with split tensors among its arguments, as the rules see it.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/split/split_tensor.h"
#include "parallel/axis/axis.h"
#include "parallel/rules/operand.h"

namespace ds::parallel {

// The outcome of a rule.
enum class Outcome : uint8_t {
  kDone,  // the results are on the stack
  kNone,  // nothing: the operator is to be decomposed where it is a composite one, else its tensors are joined
  kJoin,  // nothing: its tensors are to be joined
};

// The stack of the operator's arguments, and then of its results.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack& stack, std::shared_ptr<Axis> axis)
      : op_(op), stack_(stack), axis_(std::move(axis)), first_(stack.size() - op.schema().arguments().size()) {}

  const std::string& name() const { return op_.operator_name().name; }
  const c10::OperatorHandle& op() const { return op_; }
  torch::jit::Stack& stack() const { return stack_; }
  const std::shared_ptr<Axis>& axis() const { return axis_; }

  size_t arguments() const { return op_.schema().arguments().size(); }
  const c10::IValue& argument(size_t i) const { return stack_[first_ + i]; }
  void set(size_t i, c10::IValue value) { stack_[first_ + i] = std::move(value); }
  // Returns a tensor as the program gave it, for rules that are made of other operators; undefined where there is none.
  at::Tensor given(size_t i) const;
  // Returns a tensor argument as a rule reads it; undefined where there is none.
  Operand operand(size_t i) const { return operand_of(given(i)); }
  std::vector<Operand> operands(size_t i) const;
  // Tells whether the schema says that the operator writes to the argument.
  bool changes(size_t i) const;

  // Calls the operator with the arguments as they are now; they make room for its results.
  void run() { op_.callBoxed(stack_); }
  size_t results() const { return op_.schema().returns().size(); }
  c10::IValue& result(size_t i = 0) const { return stack_[stack_.size() - results() + i]; }

  // Puts one result in the place of the arguments.
  Outcome finish(c10::IValue result);
  // Finishes with the plain whole of a part.
  Outcome finish_joined(const at::Tensor& part, const Cut& cut, c10::IntArrayRef sizes);
  // Finishes with a split tensor.
  Outcome finish_split(const at::Tensor& part, const Cut& cut, c10::IntArrayRef sizes) {
    return finish(split(part, cut, sizes));
  }
  // Makes a split tensor along the axis of the call.
  at::Tensor split(const at::Tensor& part, const Cut& cut, c10::IntArrayRef sizes) const {
    return make_split(part, {.axis = axis_, .cut = cut}, sizes);
  }

 private:
  const c10::OperatorHandle& op_;
  torch::jit::Stack& stack_;
  std::shared_ptr<Axis> axis_;
  size_t first_;
};

using Rule = std::function<Outcome(Call&)>;
// Rules by the operator's name with its overload, "aten::sum.dim_IntList"; "aten::sum" is the overload without a name
// alone.
using RuleTable = std::unordered_map<std::string, Rule>;

// A cut along another dimension.
Cut along(Cut cut, int64_t dim);
int64_t wrapped_dim(int64_t dim, int64_t dims);
// Widens `result` by sizes that broadcast against it; to be called for each of them.
void broadcast(Sizes& result, const Sizes& sizes);
int64_t elements_of(c10::IntArrayRef sizes);
// Throws UsageError when an operator may not change this split tensor in place.
void require_changeable(const at::Tensor& split, const std::string& op);

}  // namespace ds::parallel
