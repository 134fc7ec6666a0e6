// The tensor arguments of an operator, and what an operator makes of them: parts under one cut, or plain tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "core/split/split_tensor.h"
#include "parallel/axis/axis.h"

namespace ds::parallel {

using Sizes = c10::SmallVector<int64_t, 6>;

// A tensor argument: the part of a split tensor, or the whole that every rank has (plain, or summed: to be used through
// the conversions below alone).
struct Operand {
  at::Tensor tensor;
  Sizes sizes;             // of the whole
  std::optional<Cut> cut;  // none: whole
  bool summed = false;     // see Placement

  bool defined() const { return tensor.defined(); }
  bool is_split() const { return cut.has_value(); }
  int64_t dim() const { return static_cast<int64_t>(sizes.size()); }
};

// Returns the operand that a tensor is; an undefined one for an undefined tensor.
Operand operand_of(const at::Tensor& tensor);

// Makes this rank's part under a cut: of a plain tensor its slice, of one that is split otherwise an exchange.
at::Tensor part_as(const Operand& operand, const Cut& cut, const std::shared_ptr<Axis>& axis);
// Makes the whole, for a use that gives each rank a part of its gradient.
at::Tensor for_parts(const Operand& operand, const std::shared_ptr<Axis>& axis);
// Makes the whole of a program's tensor as for_parts() does; operators one after another that read the same tensor
// share it, and so one collective each way.
at::Tensor shared_for_parts(const at::Tensor& given, const std::shared_ptr<Axis>& axis);
// Drops what shared_for_parts() keeps of a tensor that is gone. Every operator calls it.
void drop_old_conversion();
// Makes the whole, for a use that gives each rank the whole gradient.
at::Tensor as_plain(const Operand& operand, const std::shared_ptr<Axis>& axis);

// Returns how a sum over the ranks of `sizes` is cut instead: along the second last dimension, with sequence
// parallelism and where all ranks get equally many.
std::optional<Cut> sequence_cut(const Sizes& sizes, const Axis& axis);

}  // namespace ds::parallel
