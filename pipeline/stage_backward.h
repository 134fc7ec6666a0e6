// Backward through one stage for one micro-batch, in one pass or in two: gradients of the stage's inputs first ("B" of
// zero-bubble schedules, Qi et al., arXiv:2401.10241), so that they can be sent, and those of its weights whenever
// there is time ("W"). Both ways give the same gradients, bit for bit where operators are deterministic: every
// operator's backward is called with the same tensors, only at another time.
//
// How the split works. Of the nodes of the graph between outputs and inputs, those that also lead to weights (a linear
// layer's, a layer norm's) are executed twice: in the first pass for their inputs only, where what flows into them is
// kept; in the second for their weights only, one by one, without walking the graph between them. Nodes that cannot be
// asked for part of their results (functions with code of their own, activation checkpoints) give their weights'
// gradients in the first pass, from where these are added in the second.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <vector>

#include "core/torch_version/node.h"

namespace ds::pipeline {

class StageBackward {
 public:
  // `outputs` that require gradients, of a forward pass that began at `inputs` (leaves). Keeps the graph, not the
  // tensors; inputs without requires_grad get no gradient.
  StageBackward(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs);

  // Whether the second pass has anything to do; else run both in one: split() is slower then and keeps more memory.
  // Looks at the graph.
  bool can_split();

  // `gradients` of the outputs, one each. Accumulates into weights, returns gradients of the inputs, undefined where an
  // input requires none or did not take part. The graph is given back.
  std::vector<at::Tensor> whole(const std::vector<at::Tensor>& gradients);
  // The first pass. What only it needed of the graph is given back.
  std::vector<at::Tensor> inputs_only(const std::vector<at::Tensor>& gradients);
  // The second pass: accumulates into weights and runs their hooks.
  void weights();

 private:
  using Edges = torch::autograd::edge_list;
  // A node whose weights wait for the second pass.
  struct Joint {
    NodePointer<> node;
    size_t first_capture = 0;         // among what the first pass captures
    std::vector<at::Tensor> flowing;  // into the node, kept by the first pass
  };
  struct Split;

  std::vector<at::Tensor> scattered(std::vector<at::Tensor> of_edges) const;

  Edges roots_;
  Edges inputs_;                         // the edges of inputs that require a gradient
  std::vector<size_t> input_positions_;  // positions of these inputs among all
  size_t input_count_ = 0;
  std::shared_ptr<Split> split_;  // null: not looked at yet
};

}  // namespace ds::pipeline
