// Operators that are computed in another way for some layers: kernels of ours in front of LibTorch's, and the backward
// nodes of what they compute.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <utility>

#include "core/kernel_in_front.h"
#include "core/torch_version/node.h"

namespace ds::layers {

// Puts a boxed `Kernel` in front of the operator's at the key, for the rest of the process; nothing where the operator
// has none there. It is made of `given`, the operator's number of arguments, and the kernel behind.
template <class Kernel, class... Given>
void put_in_front_of(const char* name, const char* overload, c10::DispatchKey key, const Given&... given) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
  auto behind = kernel_at(op, key);
  if (!behind) return;
  auto kernel = std::make_unique<Kernel>(given..., op.schema().arguments().size(), *std::move(behind));
  put_in_front(op, key, c10::BoxedKernel::makeFromFunctor(std::move(kernel)));
}

// A backward node that saves the layer's input and its weight until it has run.
class LayerBackward : public torch::autograd::Node {
 public:
  void release_variables() override {
    input_.reset_data();
    weight_.reset_data();
    released_ = true;
  }

 protected:
  LayerBackward(const at::Tensor& input, const at::Tensor& weight)
      : input_(input, /*is_output=*/false), weight_(weight, /*is_output=*/false) {}

  // Throws where the node has run before and the graph was not retained.
  void require_unreleased() const { TORCH_CHECK(!released_, torch::autograd::ERR_BACKWARD_TWICE); }
  at::Tensor input() const { return input_.unpack(); }
  at::Tensor weight() const { return weight_.unpack(); }

 private:
  torch::autograd::SavedVariable input_;
  torch::autograd::SavedVariable weight_;
  bool released_ = false;
};

// Makes the output one of the graph, where input, weight or bias require it. `make` makes the node with
// make_node().
template <class Make>
void set_backward(at::Tensor& output, const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                  const Make& make) {
  namespace autograd = torch::autograd;
  if (!autograd::compute_requires_grad(input, weight, bias)) return;
  const NodePointer<> node = make();
  node->set_next_edges(autograd::collect_next_edges(input, weight, bias));
  autograd::set_history(output, node);
}

}  // namespace ds::layers
