// Sequences that are a dimension of split tensors, for modules that know nothing of it.
#include <utility>

#include "core/check.h"
#include "core/tensor_check.h"
#include "dsengine/sequence_attention.h"
#include "parallel/axis/conversions.h"
#include "parallel/axis/sequence_axis.h"
#include "parallel/dispatch.h"
#include "parallel/split_module.h"

namespace ds::parallel {
namespace {

const SequenceAxis& sequence_axis_of(const char* call, const std::shared_ptr<Axis>& axis) {
  const auto* const result = dynamic_cast<const SequenceAxis*>(axis.get());
  require(result != nullptr, call, ": expected an axis of make_sequence_axis(), found ",
          axis == nullptr ? "none" : "a tensor axis");
  return *result;
}

}  // namespace

std::shared_ptr<Axis> make_sequence_axis(std::shared_ptr<comm::Communicator> communicator,
                                         const SequenceAxisOptions& options) {
  auto result = std::make_shared<SequenceAxis>(std::move(communicator), options);
  if (result->size() > 1) register_split_operators();
  return result;
}

at::Tensor cut_sequence(const at::Tensor& whole, const std::shared_ptr<Axis>& axis, int64_t dim) {
  constexpr const char* kCall = "cut_sequence";
  const SequenceAxis& own = sequence_axis_of(kCall, axis);
  require(whole.defined() && dim >= -whole.dim() && dim < whole.dim() && !ds::is_split(whole), kCall,
          ": expected a full tensor with dimension ", dim, ", found ", ds::describe(whole));
  if (own.size() == 1) return whole;
  const int64_t along = dim < 0 ? dim + whole.dim() : dim;
  require(whole.size(along) >= own.size(), kCall, ": expected a position or more for each of the ", own.size(),
          " ranks along dimension ", dim, ", found ", ds::describe(whole));
  const bool zigzag = own.options().order == SequenceOrder::kZigzag;
  const Placement placement{
      .axis = axis, .cut = Cut{.dim = along, .blocks = {}, .order = zigzag ? PartOrder::kZigzag : PartOrder::kInOrder}};
  return make_split(sliced(whole, placement).clone(at::MemoryFormat::Contiguous), placement, whole.sizes());
}

SplitModule parallelize_sequence(torch::nn::Module& module, const std::shared_ptr<Axis>& axis) {
  sequence_axis_of("parallelize_sequence", axis);
  return split_with_values_of_rank_0(module, axis, plan_module(module, {}, axis->size()));
}

}  // namespace ds::parallel
