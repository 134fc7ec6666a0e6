#include "parallel/rules/overlapped_product.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <utility>
#include <vector>

#include "parallel/axis/overlap.h"
#include "parallel/rules/dtypes.h"

namespace ds::parallel {
namespace {

namespace autograd = torch::autograd;

// Also where this rank has no column.
at::Tensor as_rows(const at::Tensor& tensor) {
  const int64_t rows = c10::multiply_integers(tensor.sizes().slice(0, tensor.dim() - 1));
  return tensor.reshape({rows, tensor.size(-1)});
}

// Of the input, and passes the gradient on to LayerWeightBackward.
class LayerInputBackward : public autograd::Node {
 public:
  explicit LayerInputBackward(const LayerFactors& factors)
      : weight_(factors.weight, /*is_output=*/false), sizes_(factors.x.sizes().vec()) {}
  std::string name() const override { return "SplitLayerInput"; }
  // NOLINTNEXTLINE(cppcoreguidelines-rvalue-reference-param-not-moved): autograd's signature
  autograd::variable_list apply(autograd::variable_list&& gradients) override {
    const at::Tensor& gradient = gradients[0];
    if (!gradient.defined()) return {at::Tensor(), at::Tensor()};
    at::Tensor of_input;
    if (task_should_compute_output(0)) of_input = at::mm(as_rows(gradient), weight_.unpack()).view(sizes_);
    return {of_input, gradient};
  }
  void release_variables() override { weight_.reset_data(); }

 private:
  autograd::SavedVariable weight_;
  std::vector<int64_t> sizes_;
};

class LayerWeightBackward : public autograd::Node {
 public:
  LayerWeightBackward(uint64_t number, const LayerFactors& factors)
      : autograd::Node(number), input_(factors.x, /*is_output=*/false) {}
  std::string name() const override { return "SplitLayerWeight"; }
  // NOLINTNEXTLINE(cppcoreguidelines-rvalue-reference-param-not-moved): autograd's signature
  autograd::variable_list apply(autograd::variable_list&& gradients) override {
    autograd::variable_list result(num_outputs());
    if (!gradients[0].defined()) return result;
    const at::Tensor rows = as_rows(gradients[0]);
    if (task_should_compute_output(0)) result[0] = at::mm(rows.t(), as_rows(input_.unpack()));
    if (num_outputs() > 1 && task_should_compute_output(1)) result[1] = rows.sum(0);
    return result;
  }
  void release_variables() override { input_.reset_data(); }

 private:
  autograd::SavedVariable input_;
};

}  // namespace

bool can_overlap(const LayerFactors& factors) {
  // Under autocast the product has another dtype than its factors.
  return at::GradMode::is_enabled() && factors.weight.requires_grad() && !factors.weight.is_complex() &&
         !factors.x.is_complex() && !under_autocast(factors.x) && number_beside(factors.x).has_value();
}

at::Tensor with_overlapped_gradients(const at::Tensor& product, const LayerFactors& factors) {
  const auto of_weight = std::shared_ptr<LayerWeightBackward>(
      new LayerWeightBackward(*number_beside(factors.x), factors), autograd::deleteNode);
  autograd::edge_list edges = {autograd::impl::gradient_edge(factors.weight)};
  if (factors.bias.defined()) {
    edges.push_back(factors.bias.requires_grad() ? autograd::impl::gradient_edge(factors.bias) : autograd::Edge());
  }
  of_weight->set_next_edges(std::move(edges));
  of_weight->add_input_metadata(product);
  const auto of_input = std::shared_ptr<LayerInputBackward>(new LayerInputBackward(factors), autograd::deleteNode);
  of_input->set_next_edges({autograd::impl::gradient_edge(factors.x), autograd::Edge(of_weight, 0)});
  at::Tensor result = product;
  autograd::set_history(result, of_input);
  return result;
}

}  // namespace ds::parallel
