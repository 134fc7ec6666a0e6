#include "dsengine/sparse_attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/host_threads.h"
#include "core/split/split_tensor.h"
#include "core/tensor_check.h"
#include "ops/attention_mask.h"
#include "ops/block_rows.h"
#include "ops/kernels/sparse_attention_kernel.h"
#include "ops/layout_attention.h"
#include "ops/recorded_operator.h"
#include "ops/sparse_attention_blocks.h"
#include "ops/vector_types.h"

namespace ds::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kSparseAttention = "dsengine::sparse_attention";

// `sizes`: of a query, [batch, heads, time, channels].
void check_layout(const BlockLayout& layout, at::IntArrayRef sizes) {
  require(layout.block > 0 && layout.blocks == (sizes[2] + layout.block - 1) / layout.block, kSparseAttention,
          ": expected a layout of ", sizes[2], " tokens, found one of ", layout.blocks, " blocks of ", layout.block);
  require(layout.heads == 1 || layout.heads == sizes[1], kSparseAttention, ": expected a layout of 1 or ", sizes[1],
          " heads, found ", layout.heads);
  require(static_cast<int64_t>(layout.kept.size()) == layout.heads * layout.blocks * layout.blocks, kSparseAttention,
          ": expected a layout of [", layout.heads, ", ", layout.blocks, ", ", layout.blocks, "] numbers, found ",
          layout.kept.size());
}

void check_shapes(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const BlockLayout& layout) {
  require(query.defined() && query.dim() == 4 && is_floating(query.scalar_type()), kSparseAttention,
          ": expected a query of [batch, heads, time, channels] in float32, float64, bfloat16 or ", "float16, found ",
          describe(query));
  for (const auto& [what, x] : {std::pair{"key", &key}, std::pair{"value", &value}}) {
    require(x->defined() && x->sizes() == query.sizes() && x->scalar_type() == query.scalar_type() &&
                x->device() == query.device(),
            kSparseAttention, ": expected a ", what, " of the query's shape, dtype and device, ", describe(query),
            ", since it is self-attention, found ", describe(*x));
  }
  check_layout(layout, query.sizes());
}

// What the kernels take; keeps what their pointers point to.
struct KernelCall {
  BlockRows rows;
  AddedMasks masks;
  SparseAttentionShape shape;
};

struct CallOptions {
  int64_t block, layout_heads;
  double scale;
  bool causal;
};

KernelCall kernel_call(const at::Tensor& query, const BlockRows& rows, const AddedMasks& masks,
                       const CallOptions& options) {
  KernelCall call{.rows = rows, .masks = masks, .shape = {}};
  call.shape = {.type = *float_type(query.scalar_type()),
                .heads = query.size(1),
                .length = query.size(2),
                .channels = query.size(3),
                .block = options.block,
                .blocks = (query.size(2) + options.block - 1) / options.block,
                .scale = options.scale,
                .causal = options.causal,
                .layout_heads = options.layout_heads,
                .offsets = rows.offsets.const_data_ptr<int64_t>(),
                .columns = rows.columns.const_data_ptr<int64_t>()};
  if (masks.keys.defined()) call.shape.key_mask = masks.keys.const_data_ptr();
  if (masks.scores.defined()) {
    call.shape.attention_mask = masks.scores.const_data_ptr();
    for (int64_t dim = 0; dim < 3; ++dim) {
      call.shape.mask_strides[dim] = dim < 2 && masks.scores.size(dim) == 1 ? 0 : masks.scores.stride(dim);
    }
  }
  return call;
}

AttentionTensor tensor_of(const at::Tensor& x) {
  return {const_cast<void*>(x.const_data_ptr()), {x.stride(0), x.stride(1), x.stride(2)}};
}

// Channels side by side.
at::Tensor with_rows(const at::Tensor& x) { return x.stride(3) == 1 ? x : x.contiguous(); }

// [batch, heads, time, channels] in the order of memory that a program's next view takes. No view itself: autograd
// refuses operators in place on views that a function of its own makes.
at::Tensor empty_output(const at::Tensor& like) {
  const int64_t channels = like.size(3);
  const int64_t token = like.size(1) * channels;
  return at::empty_strided(like.sizes(), {like.size(2) * token, channels, token, 1},
                           like.options().requires_grad(false));
}

// Output, and [2, batch * heads, time]: of each query the largest score, and the logarithm of the sum.
variable_list run_forward(const KernelCall& call, const at::Tensor& query, const at::Tensor& key,
                          const at::Tensor& value) {
  const SparseAttentionShape& shape = call.shape;
  const int64_t heads = query.size(0) * shape.heads;
  const at::TensorOptions wide = at::TensorOptions(wide_type(query.scalar_type()));
  const at::Tensor scratch = at::empty({2, heads * shape.packed_size()}, wide);
  const PackedKeys packed{scratch[0].mutable_data_ptr(), scratch[1].mutable_data_ptr()};
  const at::Tensor output = empty_output(query);
  const at::Tensor softmax = at::empty({2, heads, shape.length}, wide);
  for_each_range(heads, 1, 1, [&](int64_t begin, int64_t end) {
    pack_keys(shape, tensor_of(key), tensor_of(value), packed, begin, end);
  });
  const SparseAttentionForward arrays{tensor_of(query), tensor_of(output), packed, softmax[0].mutable_data_ptr(),
                                      softmax[1].mutable_data_ptr()};
  for_each_range(heads * shape.blocks, 1, 1,
                 [&](int64_t begin, int64_t end) { sparse_attention_forward(shape, arrays, begin, end); });
  return {output, softmax};
}

// What is computed, beside tensors and masks.
struct PlannedCall {
  BlockRows rows;
  CallOptions options;
};

struct BlockAttention : torch::autograd::Function<BlockAttention> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& query, const at::Tensor& key,
                            const at::Tensor& value, const PlannedCall& planned, const SparseAttentionOptions& given) {
    const auto& [rows, options] = planned;
    const RecordedOperator recorded(kSparseAttention, {query, key, value});
    const AddedMasks masks = added_masks(kSparseAttention, given, wide_type(query.scalar_type()));
    const variable_list made =
        run_forward(kernel_call(query, rows, masks, options), with_rows(query), with_rows(key), with_rows(value));
    context->set_materialize_grads(false);
    // The program's own masks, which its layers share, not their wide copies.
    context->save_for_backward({query, key, value, made[0], made[1], rows.offsets, rows.columns, given.key_padding_mask,
                                given.attention_mask});
    context->saved_data["key_padding_mask_adds"] = given.key_padding_mask_mode == MaskMode::kAdd;
    context->saved_data["attention_mask_adds"] = given.attention_mask_mode == MaskMode::kAdd;
    context->saved_data["block"] = options.block;
    context->saved_data["layout_heads"] = options.layout_heads;
    context->saved_data["scale"] = options.scale;
    context->saved_data["causal"] = options.causal;
    return made[0];
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    require(!at::GradMode::is_enabled(), kSparseAttention, ": expected a backward pass without create_graph, its ",
            "kernels have no second derivative. Use at::scaled_dot_product_attention with a mask for it");
    if (!gradients[0].defined()) return variable_list(5);
    const variable_list saved = context->get_saved_variables();
    const RecordedOperator recorded("dsengine::sparse_attention_backward", {saved[0], saved[1], saved[2]});
    const auto mode = [&](const char* adds) {
      return context->saved_data[adds].toBool() ? MaskMode::kAdd : MaskMode::kMultiply;
    };
    const SparseAttentionOptions given{.key_padding_mask = saved[7],
                                       .key_padding_mask_mode = mode("key_padding_mask_adds"),
                                       .attention_mask = saved[8],
                                       .attention_mask_mode = mode("attention_mask_adds")};
    const AddedMasks masks = added_masks(kSparseAttention, given, wide_type(saved[0].scalar_type()));
    const KernelCall call = kernel_call(saved[0], {saved[5], saved[6]}, masks,
                                        {.block = context->saved_data["block"].toInt(),
                                         .layout_heads = context->saved_data["layout_heads"].toInt(),
                                         .scale = context->saved_data["scale"].toDouble(),
                                         .causal = context->saved_data["causal"].toBool()});
    const at::Tensor query = with_rows(saved[0]);
    const at::Tensor key = with_rows(saved[1]);
    const at::Tensor value = with_rows(saved[2]);
    const at::Tensor upstream = with_rows(gradients[0]);
    const variable_list made = {empty_output(query), empty_output(query), empty_output(query)};
    const SparseAttentionBackward arrays{.query = tensor_of(query),
                                         .key = tensor_of(key),
                                         .value = tensor_of(value),
                                         .output = tensor_of(saved[3]),
                                         .output_gradient = tensor_of(upstream),
                                         .largest = saved[4][0].const_data_ptr(),
                                         .log_of_sum = saved[4][1].const_data_ptr(),
                                         .query_gradient = tensor_of(made[0]),
                                         .key_gradient = tensor_of(made[1]),
                                         .value_gradient = tensor_of(made[2])};
    for_each_range(query.size(0) * query.size(1), 1, 1,
                   [&](int64_t begin, int64_t end) { sparse_attention_backward(call.shape, arrays, begin, end); });
    return {made[0], made[1], made[2], {}, {}};
  }
};

at::Tensor attend(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const LayoutRows& rows,
                  const SparseAttentionOptions& options) {
  const BlockLayout& layout = *rows.layout();
  check_shapes(query, key, value, layout);
  const bool causal = options.causal || layout.causal;
  check_masks(kSparseAttention, query.sizes(), query.device(), options);
  if (query.numel() == 0) return query * 0 + key * 0 + value * 0;  // such as the part of a rank that has no head
  const double scale = options.scale.value_or(1.0 / std::sqrt(static_cast<double>(query.size(3))));
  const bool kernel = query.is_cpu() && has_kernel(query);
  if (!kernel) {
    const AddedMasks masks = added_masks(kSparseAttention, options, wide_type(query.scalar_type()));
    return attention_of_blocks(query, key, value, rows, masks, {causal, scale});
  }
  return BlockAttention::apply(query, key, value,
                               PlannedCall{rows.rows(causal), {layout.block, layout.heads, scale, causal}}, options);
}

// Under autocast inputs are cast as those of scaled_dot_product_attention.
at::Tensor attend_as_cast(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                          const LayoutRows& rows, const SparseAttentionOptions& options) {
  bool casts = query.defined() && at::autocast::is_autocast_available(query.device().type()) &&
               at::autocast::is_autocast_enabled(query.device().type());
  for (const at::Tensor* x : {&query, &key, &value}) {
    casts = casts && x->defined() && is_floating(x->scalar_type()) && x->scalar_type() != at::kDouble;
  }
  if (!casts) return attend(query, key, value, rows, options);
  const at::ScalarType type = at::autocast::get_autocast_dtype(query.device().type());
  return attend(query.to(type), key.to(type), value.to(type), rows, options);
}

// The rows of `x` that a part of dimension `dim` has, or all where x has one for all.
at::Tensor part_of_mask(const at::Tensor& x, int64_t dim, const std::vector<DimRange>& ranges, int64_t whole) {
  if (!x.defined() || x.dim() <= dim || x.size(dim) != whole) return x;
  std::vector<at::Tensor> pieces;
  for (const DimRange& range : ranges) pieces.push_back(x.narrow(dim, range.begin, range.length));
  return pieces.size() == 1 ? pieces[0] : at::cat(pieces, dim);
}

BlockLayout part_of_layout(const BlockLayout& layout, const std::vector<DimRange>& ranges) {
  BlockLayout own{.heads = 0, .blocks = layout.blocks, .block = layout.block, .kept = {}, .causal = layout.causal};
  const int64_t size = layout.blocks * layout.blocks;
  for (const DimRange& range : ranges) {
    own.heads += range.length;
    own.kept.insert(own.kept.end(), layout.kept.begin() + range.begin * size,
                    layout.kept.begin() + (range.begin + range.length) * size);
  }
  return own;
}

// Heads, or samples, on the ranks that have them.
at::Tensor attend_in_parts(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                           const LayoutRows& rows, SparseAttentionOptions options) {
  const BlockLayout& layout = *rows.layout();
  require(
      is_split(query) && is_split(key) && is_split(value), kSparseAttention,
      ": expected query, key and value all split over ranks, or none of them; parallel::whole_of(x) gives the whole");
  const Placement& placement = placement_of(query);
  const auto cut_of = [](const at::Tensor& x) { return placement_of(x).cut; };
  require(query.dim() == 4 && placement.cut && placement.cut == cut_of(key) && placement.cut == cut_of(value) &&
              placement.cut->dim < 2 && query.sizes() == key.sizes() && query.sizes() == value.sizes(),
          kSparseAttention,
          ": expected query, key and value of one shape, cut alike along their batch or heads, found ",
          "others; parallel::whole_of(x) gives the whole");
  for (const at::Tensor* mask : {&options.key_padding_mask, &options.attention_mask}) {
    require(!mask->defined() || !is_split(*mask), kSparseAttention, ": expected masks that are not split over ranks");
  }
  // Of the whole: what fits a part alone would be taken for all.
  check_layout(layout, query.sizes());
  check_masks(kSparseAttention, query.sizes(), query.device(), options);
  const int64_t dim = placement.cut->dim;
  const int64_t whole = query.size(dim);
  const TensorPart part(query.sizes().vec(), *placement.cut, placement.axis->rank(), placement.axis->size());
  const std::vector<DimRange> ranges = part.ranges();
  if (dim == 0) options.key_padding_mask = part_of_mask(options.key_padding_mask, 0, ranges, whole);
  if (options.attention_mask.defined() && options.attention_mask.dim() == 4) {
    options.attention_mask = part_of_mask(options.attention_mask, dim, ranges, whole);
  }
  const bool own_layout = dim == 1 && layout.heads > 1;
  const auto attend_own = [&](const LayoutRows& own) {
    return attend_as_cast(part_of(query), part_of(key), part_of(value), own, options);
  };
  const at::Tensor own =
      own_layout ? attend_own(LayoutRows(std::make_shared<const BlockLayout>(part_of_layout(layout, ranges))))
                 : attend_own(rows);
  return make_split(own, placement, query.sizes());
}

}  // namespace

at::Tensor attention_of_layout(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                               const LayoutRows& rows, const SparseAttentionOptions& options) {
  const auto split = [](const at::Tensor& x) { return x.defined() && is_split(x); };
  if (split(query) || split(key) || split(value)) return attend_in_parts(query, key, value, rows, options);
  return attend_as_cast(query, key, value, rows, options);
}

at::Tensor sparse_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                            const BlockLayout& layout, const SparseAttentionOptions& options) {
  const std::shared_ptr<const BlockLayout> lent(std::shared_ptr<void>(), &layout);
  return attention_of_layout(query, key, value, LayoutRows(lent), options);
}

}  // namespace ds::ops
