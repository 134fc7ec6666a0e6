#include "parallel/axis/conversions.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>
#include <vector>

#include "core/check.h"
#include "core/torch_version/node.h"
#include "parallel/axis/collectives.h"

namespace ds::parallel {
namespace {

enum class Kind : uint8_t {
  kSlice,
  kJoin,
  kSum,
  kUseInPart,
  kJoinForParts,
  kSumToPart,
  kSumForParts,
  kExchange,
  kExchangeRows,
  kShareOut,
  kDivide,
  kSliceOfSummed,
  kPad,
};

struct Conversion {
  Kind kind;
  Placement placement;         // of the part that goes in or comes out
  std::vector<int64_t> sizes;  // of the whole
  Cut to;                      // kExchange: of the part that comes out
  RowSplits rows = {};         // kExchangeRows
};

Conversion inverse_of(const Conversion& conversion) {
  Conversion result = conversion;
  switch (conversion.kind) {
    case Kind::kSlice:
      result.kind = Kind::kJoin;
      break;
    case Kind::kJoin:
      result.kind = Kind::kSlice;
      break;
    case Kind::kSum:
      result.kind = Kind::kUseInPart;
      break;
    case Kind::kUseInPart:
      result.kind = Kind::kSum;
      break;
    case Kind::kJoinForParts:
      result.kind = Kind::kSumToPart;
      break;
    case Kind::kSumToPart:
      result.kind = Kind::kJoinForParts;
      break;
    case Kind::kSumForParts:
      break;
    case Kind::kExchangeRows:
      result.rows = {.sent = conversion.rows.received, .received = conversion.rows.sent};
      break;
    case Kind::kExchange:
      result.placement.cut = conversion.to;
      result.to = *conversion.placement.cut;
      break;
    case Kind::kShareOut:
      result.kind = Kind::kDivide;
      break;
    case Kind::kDivide:
      result.kind = Kind::kShareOut;
      break;
    case Kind::kSliceOfSummed:
      result.kind = Kind::kPad;
      break;
    case Kind::kPad:
      result.kind = Kind::kSliceOfSummed;
      break;
  }
  return result;
}

at::Tensor exchange_parts(const at::Tensor& part, const Placement& from, const Cut& to, c10::IntArrayRef sizes) {
  if (from.cut->dim != to.dim) return all_to_all_parts(part, from, to, sizes);
  return slice_of(all_gather_parts(part, from, sizes), {.axis = from.axis, .cut = to})
      .clone(at::MemoryFormat::Contiguous);
}

at::Tensor padded(const at::Tensor& part, const Placement& placement, c10::IntArrayRef sizes) {
  at::Tensor result = at::zeros(sizes, part.options());
  copy_part_into(result, part, *placement.cut, placement.axis->rank(), placement.axis->size());
  return result;
}

at::Tensor values_of(const Conversion& conversion, const at::Tensor& x) {
  switch (conversion.kind) {
    case Kind::kSlice:
    case Kind::kSliceOfSummed:
      return slice_of(x, conversion.placement);
    case Kind::kJoin:
    case Kind::kJoinForParts:
      return all_gather_parts(x, conversion.placement, conversion.sizes);
    case Kind::kSum:
    case Kind::kSumForParts:
      return all_reduce_sum(x, *conversion.placement.axis);
    case Kind::kExchangeRows:
      return all_to_all_rows(x, *conversion.placement.axis, conversion.rows.sent, conversion.rows.received);
    case Kind::kUseInPart:
    case Kind::kShareOut:
      return x.tensor_data();  // no view, which would keep x
    case Kind::kSumToPart:
      return reduce_scatter_parts(x, conversion.placement);
    case Kind::kExchange:
      return exchange_parts(x, conversion.placement, conversion.to, conversion.sizes);
    case Kind::kDivide:
      return x / static_cast<double>(conversion.placement.axis->size());
    case Kind::kPad:
      return padded(x, conversion.placement, conversion.sizes);
  }
  ensure(false, "a conversion is one of its kinds");
  return x;
}

at::Tensor convert(const at::Tensor& x, const Conversion& conversion);

class ConversionBackward : public torch::autograd::Node {
 public:
  explicit ConversionBackward(Conversion backward) : backward_(std::move(backward)) {}
  std::string name() const override { return "SplitConversion"; }
  // NOLINTNEXTLINE(cppcoreguidelines-rvalue-reference-param-not-moved): autograd's signature
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    if (!gradients[0].defined()) return {at::Tensor()};
    at::Tensor gradient = whole_of(gradients[0]);
    if (gradient.is_sparse()) gradient = gradient.to_dense();
    return {convert(gradient, backward_)};
  }

 private:
  Conversion backward_;
};

at::Tensor convert(const at::Tensor& x, const Conversion& conversion) {
  const bool differentiable = at::GradMode::is_enabled() && x.requires_grad();
  at::Tensor result;
  {
    const at::NoGradGuard no_grad;
    result = values_of(conversion, x);
  }
  if (differentiable) {
    auto node = make_node<ConversionBackward>(inverse_of(conversion));
    node->set_next_edges({torch::autograd::impl::gradient_edge(x)});
    torch::autograd::set_history(result, node);
  }
  return result;
}

}  // namespace

at::Tensor sliced(const at::Tensor& plain, const Placement& placement) {
  return convert(plain, {.kind = Kind::kSlice, .placement = placement, .sizes = plain.sizes().vec(), .to = {}});
}

at::Tensor joined(const at::Tensor& part, const Placement& placement, c10::IntArrayRef sizes) {
  return convert(part, {.kind = Kind::kJoin, .placement = placement, .sizes = sizes.vec(), .to = {}});
}

at::Tensor summed(const at::Tensor& addend, const std::shared_ptr<SplitAxis>& axis) {
  return convert(addend, {.kind = Kind::kSum, .placement = {.axis = axis, .cut = {}}, .sizes = {}, .to = {}});
}

at::Tensor used_in_part(const at::Tensor& plain, const std::shared_ptr<SplitAxis>& axis) {
  if (!plain.defined() || !plain.requires_grad() || !at::GradMode::is_enabled()) return plain;
  return convert(plain, {.kind = Kind::kUseInPart, .placement = {.axis = axis, .cut = {}}, .sizes = {}, .to = {}});
}

at::Tensor joined_for_parts(const at::Tensor& part, const Placement& placement, c10::IntArrayRef sizes) {
  return convert(part, {.kind = Kind::kJoinForParts, .placement = placement, .sizes = sizes.vec(), .to = {}});
}

at::Tensor summed_to_part(const at::Tensor& addend, const Placement& placement) {
  return convert(addend, {.kind = Kind::kSumToPart, .placement = placement, .sizes = addend.sizes().vec(), .to = {}});
}

at::Tensor summed_for_parts(const at::Tensor& addend, const std::shared_ptr<SplitAxis>& axis) {
  return convert(addend, {.kind = Kind::kSumForParts, .placement = {.axis = axis, .cut = {}}, .sizes = {}, .to = {}});
}

at::Tensor rows_exchanged(const at::Tensor& rows, const std::shared_ptr<SplitAxis>& axis, const RowSplits& splits) {
  return convert(
      rows,
      {.kind = Kind::kExchangeRows, .placement = {.axis = axis, .cut = {}}, .sizes = {}, .to = {}, .rows = splits});
}

at::Tensor exchanged(const at::Tensor& part, const Placement& from, const Cut& to, c10::IntArrayRef sizes) {
  if (*from.cut == to) return part;
  return convert(part, {.kind = Kind::kExchange, .placement = from, .sizes = sizes.vec(), .to = to});
}

at::Tensor shared_out(const at::Tensor& tensor, const std::shared_ptr<SplitAxis>& axis) {
  if (!tensor.requires_grad() || !at::GradMode::is_enabled()) return tensor;
  return convert(tensor, {.kind = Kind::kShareOut, .placement = {.axis = axis, .cut = {}}, .sizes = {}, .to = {}});
}

at::Tensor sliced_of_summed(const at::Tensor& tensor, const Placement& placement) {
  return convert(tensor,
                 {.kind = Kind::kSliceOfSummed, .placement = placement, .sizes = tensor.sizes().vec(), .to = {}});
}

at::Tensor whole_of(const at::Tensor& tensor) {
  if (!is_split(tensor)) return tensor;
  const Placement& placement = placement_of(tensor);
  const at::Tensor part = part_of(tensor);
  if (placement.summed) return shared_out(part, placement.axis);
  if (placement.addend) return summed(part, placement.axis);
  return placement.cut ? joined(part, placement, tensor.sizes()) : part;
}

}  // namespace ds::parallel
