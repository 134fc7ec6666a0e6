#include "parallel/axis/overlap.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <utility>

#include "core/torch_version/node.h"
#include "parallel/axis/axis.h"
#include "parallel/axis/collectives.h"
#include "parallel/axis/conversions.h"

namespace ds::parallel {
namespace {

namespace autograd = torch::autograd;

class WaitForSum : public autograd::Node {
 public:
  explicit WaitForSum(std::shared_ptr<BegunCollective> begun) : begun_(std::move(begun)) {}
  std::string name() const override { return "SplitSumWait"; }
  // NOLINTNEXTLINE(cppcoreguidelines-rvalue-reference-param-not-moved): autograd's signature
  autograd::variable_list apply(autograd::variable_list&& gradients) override {
    const BegunCollective begun = std::exchange(*begun_, {});
    begun.work.wait();
    return {std::move(gradients[0])};
  }

 private:
  std::shared_ptr<BegunCollective> begun_;
};

class BeginSum : public autograd::Node {
 public:
  BeginSum(Placement placement, std::shared_ptr<BegunCollective> begun, uint64_t beside)
      : placement_(std::move(placement)), begun_(std::move(begun)), beside_(beside) {}
  std::string name() const override { return "SplitSumBegin"; }
  uint64_t beside() const { return beside_; }

  // NOLINTNEXTLINE(cppcoreguidelines-rvalue-reference-param-not-moved): autograd's signature
  autograd::variable_list apply(autograd::variable_list&& gradients) override {
    if (!gradients[0].defined()) return {at::Tensor()};
    at::Tensor gradient = whole_of(gradients[0]);
    if (gradient.is_sparse()) gradient = gradient.to_dense();
    if (at::GradMode::is_enabled() || autograd::AnomalyMode::is_enabled()) {
      // For gradients of gradients, which are to have a history; and a search for NaN reads what a node returns at
      // once.
      return {placement_.cut ? summed_to_part(gradient, placement_) : summed(gradient, placement_.axis)};
    }
    *begun_ = placement_.cut ? begin_reduce_scatter_parts(gradient, placement_)
                             : begin_all_reduce_sum(gradient, *placement_.axis);
    return {begun_->result};
  }

 private:
  Placement placement_;  // no cut: the sum is whole
  std::shared_ptr<BegunCollective> begun_;
  uint64_t beside_;
};

at::Tensor with_overlapped_gradient(const at::Tensor& values, const at::Tensor& from, const Placement& placement) {
  const auto begun = std::make_shared<BegunCollective>();
  // In this order, for their numbers.
  const auto wait = make_node<WaitForSum>(begun);
  const uint64_t beside = at::sequence_number::get_and_increment();
  const auto begin = make_node<BeginSum>(placement, begun, beside);
  wait->set_next_edges({autograd::impl::gradient_edge(from)});
  wait->add_input_metadata(from);
  begin->set_next_edges({autograd::Edge(wait, 0)});
  at::Tensor result = values;
  autograd::set_history(result, begin);
  return result;
}

}  // namespace

at::Tensor used_in_part_overlapped(const at::Tensor& plain, const std::shared_ptr<SplitAxis>& axis) {
  at::Tensor values;
  {
    const at::NoGradGuard no_grad;
    values = plain.tensor_data();
  }
  return with_overlapped_gradient(values, plain, {.axis = axis, .cut = std::nullopt});
}

at::Tensor joined_for_parts_overlapped(const at::Tensor& part, const Placement& placement, c10::IntArrayRef sizes) {
  return with_overlapped_gradient(all_gather_parts(part.detach(), placement, sizes), part, placement);
}

std::optional<uint64_t> number_beside(const at::Tensor& converted) {
  if (!converted.defined() || !converted.requires_grad()) return std::nullopt;
  const auto* const begin = dynamic_cast<const BeginSum*>(converted.grad_fn().get());
  return begin == nullptr ? std::nullopt : std::optional(begin->beside());
}

bool is_converted_from(const at::Tensor& converted, const at::Tensor& from) {
  if (!converted.grad_fn() || !from.requires_grad()) return !converted.grad_fn() && !from.requires_grad();
  autograd::Edge edge = converted.grad_fn()->next_edge(0);
  if (dynamic_cast<const WaitForSum*>(edge.function.get()) != nullptr) edge = edge.function->next_edge(0);
  return edge == autograd::impl::gradient_edge(from);
}

}  // namespace ds::parallel
