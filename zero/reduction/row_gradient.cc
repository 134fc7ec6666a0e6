#include "zero/reduction/row_gradient.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <string>
#include <utility>

#include "core/log.h"
#include "core/text.h"

namespace ds::zero {
namespace {

TableRows joined(const TableRows& first, const TableRows& second) {
  return {.rows = at::cat({first.rows, second.rows}), .values = at::cat({first.values, second.values})};
}

}  // namespace

at::Tensor RowGradient::sparse(const TableRows& rows, bool coalesced) const {
  return sparse_of(rows, table_->parameters().front().tensor.sizes(), coalesced);
}

at::Tensor RowGradient::arriving() const {
  const at::Tensor& gradient = table_->parameters().front().tensor.grad();
  return gradient.is_sparse() ? gradient._values() : gradient;
}

void RowGradient::collect() {
  const Parameter& parameter = table_->parameters().front();
  at::Tensor gradient = std::exchange(parameter.tensor.mutable_grad(), at::Tensor());
  if (!gradient.is_sparse()) {
    if (!std::exchange(warned_, true)) {
      log::warning("parameter ", parameter.name,
                   ": expected a sparse gradient of a row-wise table, found a dense one: ",
                   "the step looks for its rows, which takes the time and the memory of ", parameter.tensor.size(0),
                   " rows. Read the table by its Embedding or EmbeddingBag alone, or set sparse(false) (said once)");
    }
    gradient = gradient.to_sparse(1);
  }
  TableRows rows = rows_of(gradient);
  rows.rows = rows.rows.to(at::kLong, /*non_blocking=*/false, /*copy=*/true);  // they may be the program's own indices
  local_ = local_ ? joined(*local_, rows) : rows;
}

void RowGradient::launch() {
  comm::Communicator& ranks = exchange_->groups_of(bucket_).shards;
  if (!local_) {
    const at::TensorOptions own = table_->options();
    local_ = {.rows = at::empty({0}, own.dtype(at::kLong)), .values = at::empty({0, table_->layout().row_width}, own)};
  }
  reduced_ = sparse(*std::exchange(local_, std::nullopt), /*coalesced=*/false).coalesce();
  if (ranks.size() == 1) return;
  const TableRows own = rows_of(*reduced_);
  own.values.div_(exchange_->divisors(bucket_).before);
  const std::string label = cat("rows of the gradients of bucket ", bucket_);
  if (table_->sharded()) {
    owners_.start(ranks, own.rows, rows_of_slice(), label);
  } else {
    gather_.start(ranks, own, label);
  }
  sends_ = true;
}

TableRows RowGradient::rows_of_owner() {
  const int64_t first = exchange_->groups_of(bucket_).shards.rank() * rows_of_slice();
  const at::Tensor rows = owners_.finish();
  return {.rows = rows.add(first), .values = owners_.to_owners(reduced_->_values())};
}

void RowGradient::complete() {
  if (!std::exchange(sends_, false)) return;
  reduced_ = sparse(table_->sharded() ? rows_of_owner() : gather_.finish(), /*coalesced=*/false).coalesce();
  reduced_->_values().div_(exchange_->divisors(bucket_).after);
}

void RowGradient::set_aside() {
  const at::Tensor rows = *std::exchange(reduced_, std::nullopt);
  sum_ = sum_ ? sparse(joined(rows_of(*sum_), rows_of(rows)), /*coalesced=*/false).coalesce() : rows;
}

void RowGradient::join_sum() {
  if (!sum_) return;
  reduced_ = sparse(joined(rows_of(*reduced_), rows_of(*sum_)), /*coalesced=*/false).coalesce();
  sum_.reset();
}

void RowGradient::drop() {
  local_.reset();
  reduced_.reset();
  sum_.reset();
}

}  // namespace ds::zero
