// The gradient of a row-wise table: the rows that were read, with their numbers. Nothing has the size of the table.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>

#include "zero/parameter_bucket.h"
#include "zero/reduction/gradient_exchange.h"
#include "zero/row_exchange.h"
#include "zero/row_gather.h"

namespace ds::zero {

// Collects, reduces and sums the gradient of a table, as GradientBuffer, a reduction and ReducedSum do for other
// buckets. Every rank gets the rows of all ranks or, where the table is sharded, those of its slice alone, and adds
// them in the order of the ranks, so that all that have a row have the same bits. Not thread safe. The caller turns
// autograd off.
class RowGradient {
 public:
  // All arguments outlive it. `bucket`: its number.
  RowGradient(size_t bucket, const ParameterBucket& table, const GradientExchange& exchange)
      : bucket_(bucket), table_(&table), exchange_(&exchange) {}

  // Takes over the gradient that autograd has made, and takes it away from the parameter. Warns once of one that is not
  // sparse, whose rows have to be looked for.
  void collect();
  // The values that collect() takes over, for those who look at them before.
  at::Tensor arriving() const;
  // Begins the reduction. Collective, as complete().
  void launch();
  // Ends the reduction.
  void complete();
  // Adds the reduced rows to those that were set aside before.
  void set_aside();
  // Adds what was set aside to the reduced rows.
  void join_sum();
  bool has_sum() const { return sum_.has_value(); }
  void drop();
  // Returns the reduced gradient, or without one the sum that was set aside: sparse, [rows, width], coalesced.
  // Undefined where there is neither.
  at::Tensor gradient() const { return reduced_ ? *reduced_ : sum_.value_or(at::Tensor()); }

 private:
  // Makes a sparse gradient of the table, in which a row may come more than once.
  at::Tensor sparse(const TableRows& rows, bool coalesced) const;
  // The number of rows of a slice of the table.
  int64_t rows_of_slice() const { return table_->layout().slice_numel / table_->layout().row_width; }
  // Sends the rows of a sharded table to their owners. Returns those of this rank's slice, rank by rank.
  TableRows rows_of_owner();

  size_t bucket_;
  const ParameterBucket* table_;
  const GradientExchange* exchange_;
  std::optional<TableRows> local_;  // of passes that are not reduced yet, in the order of micro-batches
  bool sends_ = false;              // a reduction is under way
  RowGather gather_;                // of the rows of all ranks
  RowExchange owners_;              // of the rows of a sharded table
  std::optional<at::Tensor> reduced_;
  std::optional<at::Tensor> sum_;
  bool warned_ = false;
};

}  // namespace ds::zero
