#include "parallel/rules/operand.h"

#include <ATen/core/grad_mode.h>

#include "parallel/axis/conversions.h"
#include "parallel/axis/overlap.h"

namespace ds::parallel {
namespace {

// The last conversion that shared_for_parts made, as long as the tensor lives that it was made of, and others hold what
// it was converted to (a graph does, which saved it for backward): a thread keeps no memory of a model that is gone.
struct SharedConversion {
  c10::weak_intrusive_ptr<c10::TensorImpl> from;
  c10::weak_intrusive_ptr<c10::TensorImpl> to;
  const Axis* axis;
  uint32_t version;
  bool with_grad;
};

std::optional<SharedConversion>& last_conversion() {
  thread_local std::optional<SharedConversion> last;
  return last;
}

}  // namespace

Operand operand_of(const at::Tensor& tensor) {
  Operand result;
  if (!tensor.defined()) return result;
  result.sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
  if (!is_split(tensor)) {
    result.tensor = tensor;
    return result;
  }
  result.tensor = part_of(tensor);
  result.cut = placement_of(tensor).cut;
  result.summed = placement_of(tensor).summed;
  return result;
}

at::Tensor part_as(const Operand& operand, const Cut& cut, const std::shared_ptr<Axis>& axis) {
  const Cut wanted = normalized(cut, operand.sizes[cut.dim], axis->size());
  if (operand.summed) return sliced_of_summed(operand.tensor, {.axis = axis, .cut = wanted});
  if (!operand.is_split()) return sliced(operand.tensor, {.axis = axis, .cut = wanted});
  return exchanged(operand.tensor, {.axis = axis, .cut = operand.cut}, wanted, operand.sizes);
}

at::Tensor for_parts(const Operand& operand, const std::shared_ptr<Axis>& axis) {
  if (operand.summed) return operand.tensor;
  if (!operand.is_split()) return used_in_part(operand.tensor, axis);
  return joined_for_parts(operand.tensor, {.axis = axis, .cut = operand.cut}, operand.sizes);
}

at::Tensor as_plain(const Operand& operand, const std::shared_ptr<Axis>& axis) {
  if (operand.summed) return shared_out(operand.tensor, axis);
  if (!operand.is_split()) return operand.tensor;
  return joined(operand.tensor, {.axis = axis, .cut = operand.cut}, operand.sizes);
}

std::optional<Cut> sequence_cut(const Sizes& sizes, const Axis& axis) {
  const auto dim = static_cast<int64_t>(sizes.size()) - 2;
  if (!axis.cuts_sequences() || dim < 0 || sizes[dim] % axis.size() != 0) return std::nullopt;
  return Cut{.dim = dim, .blocks = {}};
}

at::Tensor shared_for_parts(const at::Tensor& given, const std::shared_ptr<Axis>& axis) {
  const Operand operand = operand_of(given);
  const bool with_grad = at::GradMode::is_enabled();
  const bool converts = !operand.summed && (operand.is_split() || (with_grad && given.requires_grad()));
  if (!converts || given.is_inference() || operand.tensor.is_inference()) return for_parts(operand, axis);
  const uint32_t version = given._version() + operand.tensor._version();
  std::optional<SharedConversion>& last = last_conversion();
  if (last && last->axis == axis.get() && last->version == version && last->with_grad == with_grad &&
      !last->from.expired() && last->from._unsafe_get_target() == given.unsafeGetTensorImpl()) {
    const auto living = last->to.lock();
    const at::Tensor converted = living ? at::Tensor(living) : at::Tensor();
    // A recomputation changes where the tensor's gradient goes, while it runs.
    if (converted.defined() && is_converted_from(converted, operand.tensor)) return converted;
  }
  const bool overlaps = axis->overlaps() && with_grad && operand.tensor.requires_grad();
  const at::Tensor result =
      !overlaps ? for_parts(operand, axis)
      : operand.is_split()
          ? joined_for_parts_overlapped(operand.tensor, {.axis = axis, .cut = operand.cut}, operand.sizes)
          : used_in_part_overlapped(operand.tensor, axis);
  last = SharedConversion{.from = c10::weak_intrusive_ptr<c10::TensorImpl>(given.getIntrusivePtr()),
                          .to = c10::weak_intrusive_ptr<c10::TensorImpl>(result.getIntrusivePtr()),
                          .axis = axis.get(),
                          .version = version,
                          .with_grad = with_grad};
  return result;
}

void drop_old_conversion() {
  std::optional<SharedConversion>& last = last_conversion();
  if (last && last->from.expired()) last.reset();
}

}  // namespace ds::parallel
