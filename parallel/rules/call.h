// One call of an operator with split tensors among its arguments, as the rules see it.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/split/split_tensor.h"
#include "parallel/axis/axis.h"

namespace ds::parallel {

using Sizes = c10::SmallVector<int64_t, 6>;

// A tensor argument: the part of a split tensor, or the whole that every rank has (plain, or summed: to be used through
// the conversions of Call alone).
struct Operand {
  at::Tensor tensor;
  Sizes sizes;             // of the whole
  std::optional<Cut> cut;  // none: whole
  bool summed = false;     // see Placement

  bool defined() const { return tensor.defined(); }
  bool is_split() const { return cut.has_value(); }
  int64_t dim() const { return static_cast<int64_t>(sizes.size()); }
};

// The outcome of a rule.
enum class Outcome : uint8_t {
  kDone,  // the results are on the stack
  kNone,  // nothing: the operator is to be decomposed where it is a composite one, else its tensors are joined
  kJoin,  // nothing: its tensors are to be joined
};

class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack& stack, std::shared_ptr<Axis> axis)
      : op_(op), stack_(stack), axis_(std::move(axis)), first_(stack.size() - op.schema().arguments().size()) {}

  const std::string& name() const { return op_.operator_name().name; }
  const c10::OperatorHandle& op() const { return op_; }
  torch::jit::Stack& stack() const { return stack_; }
  const std::shared_ptr<Axis>& axis() const { return axis_; }
  int rank() const { return axis_->rank(); }
  int ranks() const { return axis_->size(); }

  size_t arguments() const { return op_.schema().arguments().size(); }
  const c10::IValue& argument(size_t i) const { return stack_[first_ + i]; }
  void set(size_t i, c10::IValue value) { stack_[first_ + i] = std::move(value); }
  // Tensors as the program gave them, for rules that are made of other operators. Undefined where there is none.
  at::Tensor given(size_t i) const;
  // Undefined where there is none.
  Operand operand(size_t i) const { return operand_of(given(i)); }
  std::vector<Operand> operands(size_t i) const;
  static Operand operand_of(const at::Tensor& tensor);
  bool changes(size_t i) const;  // whether the schema says that the operator writes to it

  // Calls the operator with the arguments as they are now; they make room for its results.
  void run() { op_.callBoxed(stack_); }
  size_t results() const { return op_.schema().returns().size(); }
  c10::IValue& result(size_t i = 0) const { return stack_[stack_.size() - results() + i]; }

  // The arguments make room for one result.
  Outcome finish(c10::IValue result);
  // The whole of a part, plain.
  Outcome finish_joined(const at::Tensor& part, const Cut& cut, c10::IntArrayRef sizes);
  Outcome finish_split(const at::Tensor& part, const Cut& cut, c10::IntArrayRef sizes) {
    return finish(split(part, cut, sizes));
  }
  at::Tensor split(const at::Tensor& part, const Cut& cut, c10::IntArrayRef sizes) const {
    return make_split(part, {.axis = axis_, .cut = cut}, sizes);
  }
  int64_t own_extent(const Cut& cut, int64_t extent) const { return part_extent(cut, extent, rank(), ranks()); }
  Placement placed(const Cut& cut) const { return {.axis = axis_, .cut = cut}; }

  // This rank's part under a cut: of a plain tensor its slice, of one that is split otherwise an exchange.
  at::Tensor part_as(const Operand& operand, const Cut& cut) const;
  // The whole, for a use that gives each rank a part of its gradient.
  at::Tensor for_parts(const Operand& operand) const;
  // As for_parts; operators one after another that read the same tensor share it, and so one collective each way.
  at::Tensor shared_for_parts(size_t i) const;
  // The whole, for a use that gives each rank the whole gradient.
  at::Tensor plain(const Operand& operand) const;
  // How a sum over the ranks of `sizes` is cut instead: along the second last dimension, with sequence parallelism and
  // where all ranks get equally many.
  std::optional<Cut> sequence_cut(const Sizes& sizes) const;

 private:
  const c10::OperatorHandle& op_;
  torch::jit::Stack& stack_;
  std::shared_ptr<Axis> axis_;
  size_t first_;
};

using Rule = std::function<Outcome(Call&)>;
// By the name with its overload, "aten::sum.dim_IntList"; "aten::sum" is the overload without a name alone.
using RuleTable = std::unordered_map<std::string, Rule>;

// Drops what shared_for_parts keeps of a tensor that is gone. Every operator calls it.
void drop_old_conversion();

// A cut along another dimension.
Cut along(Cut cut, int64_t dim);
int64_t wrapped_dim(int64_t dim, int64_t dims);
// Widens `result` by sizes that broadcast against it; to be called for each of them.
void broadcast(Sizes& result, const Sizes& sizes);
int64_t elements_of(c10::IntArrayRef sizes);
// Throws UsageError when an operator may not change this split tensor in place.
void require_changeable(const at::Tensor& split, const std::string& op);

}  // namespace ds::parallel
