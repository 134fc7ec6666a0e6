#include "ops/sparse_attention_blocks.h"

#include <ATen/TensorIndexing.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/_safe_softmax.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <limits>
#include <vector>

#include "ops/block_rows.h"
#include "ops/vector_types.h"

namespace ds::ops {
namespace {

// Blocks of all heads, [batch, heads * blocks, block, channels], and the sizes that they come of.
struct Blocked {
  at::Tensor query, key, value;
  int64_t batch, heads, length, channels, blocks, block;
};

at::Tensor in_blocks(const at::Tensor& x, const BlockLayout& layout) {
  const int64_t missing = layout.blocks * layout.block - x.size(2);
  const at::Tensor padded = missing == 0 ? x : at::constant_pad_nd(x, {0, 0, 0, missing}, 0);
  return padded.reshape({x.size(0), x.size(1) * layout.blocks, layout.block, x.size(3)});
}

// What is added to the scores of a group, [batch or 1, rows, block, columns * block]: masks, and -inf where there is no
// key.
at::Tensor group_mask(const Blocked& of, const RowGroup& group, const AddedMasks& masks, bool causal,
                      at::ScalarType type) {
  const at::Tensor& columns = group.columns;
  const at::Tensor& rows = group.rows;
  const int64_t count = rows.size(0);
  const int64_t keys = columns.size(1) * of.block;
  const at::Tensor inside = at::arange(of.block, columns.options());
  const at::Tensor key = (columns.unsqueeze(2) * of.block + inside).view({count, 1, keys});
  const at::Tensor query = (rows.remainder(of.blocks) * of.block).view({count, 1, 1}) + inside.view({1, of.block, 1});
  at::Tensor left_out = key.lt(0).logical_or(key.ge(of.length));
  if (causal) left_out = left_out.logical_or(key.gt(query));
  left_out = left_out.expand({count, of.block, keys});
  at::Tensor result = at::zeros({1, count, of.block, keys}, of.query.options().dtype(type).requires_grad(false));
  const at::Tensor known_key = key.clamp(0, of.length - 1);
  if (masks.keys.defined())
    result = result + masks.keys.index({at::indexing::Slice(), known_key}).view({of.batch, count, 1, keys});
  if (masks.scores.defined()) {
    const at::Tensor head = rows.div(of.blocks, "floor").view({count, 1, 1});
    const at::Tensor own = masks.scores.size(1) == 1 ? at::zeros_like(head) : head;
    // Advanced indices side by side: [batch or 1, rows, block, keys].
    result = result + masks.scores.index({at::indexing::Slice(), own, query.clamp_max(of.length - 1), known_key});
  }
  return result.masked_fill(left_out, -std::numeric_limits<double>::infinity());
}

at::Tensor group_output(const Blocked& of, const RowGroup& group, const at::Tensor& mask, double scale) {
  const int64_t count = group.rows.size(0);
  const int64_t width = group.columns.size(1);
  // A block that is not there is the first of its head: the mask leaves it out.
  const auto gathered = [&](const at::Tensor& x) {
    return x.index_select(1, group.gathered).view({of.batch, count, width * of.block, of.channels});
  };
  const at::ScalarType wide = wide_type(of.query.scalar_type());
  const at::Tensor query = of.query.index_select(1, group.rows).to(wide) * scale;
  const at::Tensor scores = at::matmul(query, gathered(of.key).to(wide).transpose(-1, -2)) + mask;
  return at::matmul(at::_safe_softmax(scores, -1).to(of.value.scalar_type()), gathered(of.value));
}

}  // namespace

at::Tensor attention_of_blocks(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                               const LayoutRows& rows, const AddedMasks& masks, const BlocksOptions& options) {
  const BlockLayout& layout = *rows.layout();
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const Blocked of{in_blocks(query, layout),
                   in_blocks(key, layout),
                   in_blocks(value, layout),
                   query.size(0),
                   query.size(1),
                   query.size(2),
                   query.size(3),
                   layout.blocks,
                   layout.block};
  const at::ScalarType wide = wide_type(query.scalar_type());
  const RowGroups& groups = rows.groups(of.heads, options.causal, query.device());
  std::vector<at::Tensor> outputs;
  for (const RowGroup& group : groups.groups) {
    outputs.push_back(group_output(of, group, group_mask(of, group, masks, options.causal, wide), options.scale));
  }
  // Of rows without keys.
  outputs.push_back(at::zeros({of.batch, 1, of.block, of.channels}, query.options().requires_grad(false)));
  const at::Tensor in_order = at::cat(outputs, 1).index_select(1, groups.places);
  const at::Tensor whole = in_order.view({of.batch, of.heads, of.blocks * of.block, of.channels});
  // In the kernels' order of memory, so that a program's next view works on every device.
  return whole.narrow(2, 0, of.length).transpose(1, 2).contiguous().transpose(1, 2);
}

}  // namespace ds::ops
