#include "parallel/rules/call.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "core/check.h"
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

at::Tensor Call::given(size_t i) const { return argument(i).isTensor() ? argument(i).toTensor() : at::Tensor(); }

Operand Call::operand_of(const at::Tensor& tensor) {
  Operand result;
  if (!tensor.defined()) return result;
  result.sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
  if (!ds::is_split(tensor)) {
    result.tensor = tensor;
    return result;
  }
  result.tensor = part_of(tensor);
  result.cut = placement_of(tensor).cut;
  result.summed = placement_of(tensor).summed;
  return result;
}

std::vector<Operand> Call::operands(size_t i) const {
  std::vector<Operand> result;
  for (const at::Tensor& tensor : argument(i).toTensorVector()) result.push_back(operand_of(tensor));
  return result;
}

bool Call::changes(size_t i) const {
  const c10::AliasInfo* const alias = op_.schema().arguments()[i].alias_info();
  return alias != nullptr && alias->isWrite();
}

Outcome Call::finish(c10::IValue result) {
  torch::jit::drop(stack_, arguments());
  stack_.push_back(std::move(result));
  return Outcome::kDone;
}

Outcome Call::finish_joined(const at::Tensor& part, const Cut& cut, c10::IntArrayRef sizes) {
  return finish(joined(part, placed(normalized(cut, sizes[cut.dim], ranks())), sizes));
}

at::Tensor Call::part_as(const Operand& operand, const Cut& cut) const {
  const Cut wanted = normalized(cut, operand.sizes[cut.dim], ranks());
  if (operand.summed) return sliced_of_summed(operand.tensor, placed(wanted));
  if (!operand.is_split()) return sliced(operand.tensor, placed(wanted));
  return exchanged(operand.tensor, placed(*operand.cut), wanted, operand.sizes);
}

at::Tensor Call::for_parts(const Operand& operand) const {
  if (operand.summed) return operand.tensor;
  if (!operand.is_split()) return used_in_part(operand.tensor, axis_);
  return joined_for_parts(operand.tensor, placed(*operand.cut), operand.sizes);
}

at::Tensor Call::plain(const Operand& operand) const {
  if (operand.summed) return shared_out(operand.tensor, axis_);
  if (!operand.is_split()) return operand.tensor;
  return joined(operand.tensor, placed(*operand.cut), operand.sizes);
}

std::optional<Cut> Call::sequence_cut(const Sizes& sizes) const {
  const auto dim = static_cast<int64_t>(sizes.size()) - 2;
  if (!axis_->cuts_sequences() || dim < 0 || sizes[dim] % ranks() != 0) return std::nullopt;
  return Cut{.dim = dim, .blocks = {}};
}

at::Tensor Call::shared_for_parts(size_t i) const {
  const at::Tensor tensor = given(i);
  const Operand operand = operand_of(tensor);
  const bool with_grad = at::GradMode::is_enabled();
  const bool converts = !operand.summed && (operand.is_split() || (with_grad && tensor.requires_grad()));
  if (!converts || tensor.is_inference() || operand.tensor.is_inference()) return for_parts(operand);
  const uint32_t version = tensor._version() + operand.tensor._version();
  std::optional<SharedConversion>& last = last_conversion();
  if (last && last->axis == axis_.get() && last->version == version && last->with_grad == with_grad &&
      !last->from.expired() && last->from._unsafe_get_target() == tensor.unsafeGetTensorImpl()) {
    const auto living = last->to.lock();
    const at::Tensor converted = living ? at::Tensor(living) : at::Tensor();
    // A recomputation changes where the tensor's gradient goes, while it runs.
    if (converted.defined() && is_converted_from(converted, operand.tensor)) return converted;
  }
  const bool overlaps = axis_->overlaps() && with_grad && operand.tensor.requires_grad();
  const at::Tensor result = !overlaps ? for_parts(operand)
                            : operand.is_split()
                                ? joined_for_parts_overlapped(operand.tensor, placed(*operand.cut), operand.sizes)
                                : used_in_part_overlapped(operand.tensor, axis_);
  last = SharedConversion{.from = c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr()),
                          .to = c10::weak_intrusive_ptr<c10::TensorImpl>(result.getIntrusivePtr()),
                          .axis = axis_.get(),
                          .version = version,
                          .with_grad = with_grad};
  return result;
}

void drop_old_conversion() {
  std::optional<SharedConversion>& last = last_conversion();
  if (last && last->from.expired()) last.reset();
}

Cut along(Cut cut, int64_t dim) {
  cut.dim = dim;
  return cut;
}

int64_t wrapped_dim(int64_t dim, int64_t dims) { return dim < 0 ? dim + dims : dim; }

void broadcast(Sizes& result, const Sizes& sizes) {
  if (sizes.size() > result.size()) result.insert(result.begin(), sizes.size() - result.size(), 1);
  const size_t offset = result.size() - sizes.size();
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] != 1) result[offset + i] = sizes[i];
  }
}

int64_t elements_of(c10::IntArrayRef sizes) { return c10::multiply_integers(sizes); }

void require_changeable(const at::Tensor& split, const std::string& op) {
  require(placement_of(split).cut.has_value() || placement_of(split).summed, op,
          " would change a view of a tensor that was joined from its parts, ",
          "and the parts would not change; change the tensor itself, or a clone() of the view");
  require(!(at::GradMode::is_enabled() && split.is_leaf() && split.requires_grad()), op,
          " would change in place a leaf that requires a gradient; do it under torch::NoGradGuard");
}

}  // namespace ds::parallel
