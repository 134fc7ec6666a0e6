#include <ATen/TensorOperators.h>
#include <ATen/ops/_assert_async.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/gather.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/logical_and.h>
#include <ATen/ops/logical_or.h>

#include <string>
#include <utility>

#include "parallel/axis/conversions.h"
#include "parallel/rules/lookup.h"
#include "parallel/rules/rules.h"

namespace ds::parallel {

std::optional<DimRange> own_range(const Call& call, const Operand& x) {
  const Cut& cut = *x.cut;
  if (cut.repeats != 1 || cut.blocks.size() > 1 || cut.order != PartOrder::kInOrder) return std::nullopt;
  return chunk_of(x.sizes[cut.dim], cut.grain, call.axis()->rank(), call.axis()->size());
}

bool every_rank_has_some(const Call& call, const Operand& x) {
  return part_extent(*x.cut, x.sizes[x.cut->dim], call.axis()->size() - 1, call.axis()->size()) > 0;
}

void require_in_range(const at::Tensor& indices, int64_t extent, const at::Tensor& ignored) {
  at::Tensor valid = at::logical_and(indices.ge(0), indices.lt(extent));
  if (ignored.defined()) valid = at::logical_or(valid, ignored);
  at::_assert_async(valid.all(), "an index is out of range: it is below 0, or not below " + std::to_string(extent));
}

OwnIndices own_indices(const at::Tensor& indices, const DimRange& range) {
  OwnIndices result;
  result.indices = indices - range.begin;
  result.elsewhere = at::logical_or(result.indices.lt(0), result.indices.ge(range.length));
  result.indices = result.indices.masked_fill(result.elsewhere, 0);
  return result;
}

namespace {

// embedding(weight, indices, padding_idx, scale_grad_by_freq, sparse), rows of the weight split: each rank looks up the
// rows that it has, and the ranks add (Megatron-LM's vocabulary-parallel embedding), or add and keep their tokens.
Outcome look_up_rows(Call& call, const Operand& weight, const Operand& indices) {
  const std::optional<DimRange> range = own_range(call, weight);
  if (!range || !every_rank_has_some(call, weight) || indices.is_split()) return Outcome::kJoin;
  const int64_t padding = call.argument(2).toInt();
  require_in_range(indices.tensor, weight.sizes[0], {});
  const bool has_padding = padding >= range->begin && padding < range->begin + range->length;
  const auto [own, elsewhere] = own_indices(indices.tensor, *range);
  // An index of another rank reads row 0, whose gradient must not see it: so it is masked after the look-up.
  const at::Tensor rows = at::embedding(weight.tensor, own, has_padding ? padding - range->begin : -1);
  const at::Tensor addend = rows.masked_fill(elsewhere.unsqueeze(-1), 0);
  const Sizes sizes(addend.sizes().begin(), addend.sizes().end());
  const std::optional<Cut> sequence = joins_output(call.given(0)) ? std::nullopt : sequence_cut(sizes, *call.axis());
  if (sequence) {
    return call.finish_split(summed_to_part(addend, {.axis = call.axis(), .cut = sequence}), *sequence, sizes);
  }
  return call.finish(summed(addend, call.axis()));
}

Outcome embedding(Call& call) {
  const Operand weight = call.operand(0);
  const Operand indices = call.operand(1);
  const bool by_frequency = call.argument(3).toBool();
  const bool sparse = call.argument(4).toBool();
  if (weight.dim() != 2 || by_frequency || sparse || elements_of(indices.sizes) == 0) return Outcome::kJoin;
  Sizes sizes = indices.sizes;
  sizes.push_back(weight.sizes[1]);
  if (weight.is_split() && weight.cut->dim == 0) return look_up_rows(call, weight, indices);
  const int64_t padding = call.argument(2).toInt();
  if (!weight.is_split()) {
    return call.finish_split(at::embedding(for_parts(weight, call.axis()), indices.tensor, padding), *indices.cut,
                             sizes);
  }
  if (indices.is_split()) return Outcome::kJoin;
  const Cut cut = along(*weight.cut, indices.dim());
  const at::Tensor part = at::embedding(weight.tensor, indices.tensor, padding);
  return joins_output(call.given(0)) ? call.finish_joined(part, cut, sizes) : call.finish_split(part, cut, sizes);
}

// index_select(self, dim, index), along a dimension that is not cut
Outcome index_select(Call& call) {
  const Operand x = call.operand(0);
  const Operand index = call.operand(2);
  const int64_t dim = wrapped_dim(call.argument(1).toInt(), x.dim());
  if (!x.is_split() || index.is_split() || index.dim() != 1 || dim < 0 || dim >= x.dim() || dim == x.cut->dim) {
    return Outcome::kJoin;
  }
  Sizes sizes = x.sizes;
  sizes[dim] = index.sizes[0];
  return call.finish_split(at::index_select(x.tensor, dim, index.tensor), *x.cut, sizes);
}

// gather(self, dim, index, sparse_grad)
Outcome gather(Call& call) {
  const Operand x = call.operand(0);
  const Operand index = call.operand(2);
  const int64_t dim = wrapped_dim(call.argument(1).toInt(), x.dim());
  if (!x.is_split() || index.dim() != x.dim() || x.dim() == 0 || dim < 0 || dim >= x.dim()) return Outcome::kJoin;
  if (call.argument(3).toBool() || elements_of(index.sizes) == 0) return Outcome::kJoin;
  if (dim != x.cut->dim) {
    if (index.sizes[x.cut->dim] != x.sizes[x.cut->dim]) return Outcome::kJoin;
    return call.finish_split(at::gather(x.tensor, dim, part_as(index, *x.cut, call.axis())), *x.cut, index.sizes);
  }
  const std::optional<DimRange> range = own_range(call, x);
  if (!range || index.is_split() || !every_rank_has_some(call, x)) return Outcome::kJoin;
  require_in_range(index.tensor, x.sizes[dim], {});
  const auto [own, elsewhere] = own_indices(index.tensor, *range);
  return call.finish(summed(at::gather(x.tensor, dim, own).masked_fill(elsewhere, 0), call.axis()));
}

}  // namespace

void add_lookup_rules(RuleTable& table) {
  table["aten::embedding"] = embedding;
  table["aten::index_select"] = index_select;
  table["aten::gather"] = gather;
}

}  // namespace ds::parallel
