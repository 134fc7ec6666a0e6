// Updates of row-wise tables (model/state/row_wise.h): the rows of a slice that have a gradient, and no others.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/slices/table_rows.h"
#include "optim/shard_optimizer.h"

namespace ds::optimizers {

// The interface of optimizers that leave rows without a gradient as they are (OptimizerDescription::updates_rows).
class RowOptimizer {
 public:
  virtual ~RowOptimizer() = default;
  // Updates the rows of a slice that has a row_width, in place of SliceOptimizer::update(): weights and states of all
  // other rows stay as they are, and the cost is that of `gradients`: the rows that have one, each once, by their
  // numbers in the slice, of the master's dtype. Their contents may be overwritten.
  virtual void update_rows(int64_t index, const TableRows& gradients, double gradient_scale) = 0;
};

// Throws UsageError where the options of a group with row-wise tables move rows without a gradient. `optimizer`: its
// name.
void require_row_wise(const std::string& optimizer, const GroupOptions& options);

// Calls `update` with the flat gradient of some rows while `slice.master` and `states`, tensors of its length, hold
// copies of these rows alone, which are written back: the bits are those of an update of the whole slice.
void update_in_rows(Slice& slice, const std::vector<at::Tensor*>& states, const TableRows& gradients,
                    const std::function<void(const at::Tensor& gradient)>& update);

}  // namespace ds::optimizers
