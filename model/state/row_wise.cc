#include "model/state/row_wise.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <vector>

namespace ds::engine {
namespace {

// The rows of a bucket that this rank updates.
struct RowRange {
  int64_t begin = 0;
  int64_t end = 0;
};

RowRange range_of(const ModelState& state, size_t bucket) {
  const zero::BucketLayout& layout = state.buckets[bucket].layout();
  if (!state.plan.partition_optimizer) return {.begin = 0, .end = layout.numel / layout.row_width};
  const int64_t rows = layout.slice_numel / layout.row_width;
  const int64_t rank = state.groups_of(bucket).shards.rank();
  return {.begin = rank * rows, .end = (rank + 1) * rows};
}

// Returns the rows [begin, end) of ascending rows, by number; they share memory with `rows`. Numbers count from
// `begin`.
TableRows rows_between(const TableRows& rows, int64_t begin, int64_t end) {
  const at::Tensor numbers = rows.rows.to(at::kCPU);
  const auto* const first = numbers.const_data_ptr<int64_t>();
  const auto* const last = first + numbers.numel();
  const auto from = std::lower_bound(first, last, begin) - first;
  const auto count = std::lower_bound(first, last, end) - first - from;
  return {.rows = rows.rows.narrow(0, from, count).sub(begin), .values = rows.values.narrow(0, from, count)};
}

}  // namespace

void lay_out_rows(const std::vector<int64_t>& widths, BucketOptions& options) {
  if (std::all_of(widths.begin(), widths.end(), [](int64_t width) { return width == 0; })) return;
  options.row_widths = widths;
  options.parts.resize(widths.size(), 0);
  int next = *std::max_element(options.parts.begin(), options.parts.end());
  for (size_t i = 0; i < widths.size(); ++i) {
    if (widths[i] > 0) options.parts[i] = ++next;
  }
}

RowTables::RowTables(const ModelState& model) : reads_(model.gatherer->buckets(), *model.ranks.groups.parameters) {
  for (size_t b = 0; b < model.buckets.size(); ++b) {
    if (!model.is_row_wise(b) || !model.buckets[b].sharded()) continue;
    tables_.push_back(
        std::make_shared<const layers::ReadRows>([this, b](const at::Tensor& rows) { return reads_.read(b, rows); }));
    layers::read_by_rows(model.buckets[b].parameters().front().tensor, tables_.back());
  }
}

TableRows own_rows(const ModelState& state, size_t bucket) {
  const at::Tensor gradient = state.gradients.reducer->gradient(bucket);
  const RowRange range = range_of(state, bucket);
  return rows_between(rows_of(gradient), range.begin, range.end);
}

at::Tensor flat_gradient(const ModelState& state, size_t bucket) {
  if (!state.is_row_wise(bucket)) return state.gradients.reducer->gradient(bucket);
  const at::NoGradGuard no_grad;
  const TableRows own = own_rows(state, bucket);
  const RowRange range = range_of(state, bucket);
  const at::Tensor table = at::zeros({range.end - range.begin, own.values.size(1)}, own.values.options());
  return table.index_copy_(0, own.rows, own.values).reshape({-1});
}

void keep_flat_gradient(const ModelState& state, size_t bucket, const at::Tensor& flat) {
  if (!state.is_row_wise(bucket)) return;
  const at::NoGradGuard no_grad;
  const at::Tensor gradient = state.gradients.reducer->gradient(bucket);
  const RowRange range = range_of(state, bucket);
  const at::Tensor table = flat.view({range.end - range.begin, gradient.size(1)});
  const at::Tensor rows = table.ne(0).any(1).nonzero().reshape({-1});
  const TableRows kept = {.rows = rows.add(range.begin), .values = table.index_select(0, rows)};
  at::Tensor(gradient).copy_(sparse_of(kept, gradient.sizes(), /*coalesced=*/true));
}

}  // namespace ds::engine
