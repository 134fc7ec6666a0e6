#include "pipeline/stage_backward.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <set>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "core/check.h"

namespace ds::pipeline {
namespace {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::variable_list;

variable_list execute(const edge_list& roots, const variable_list& gradients, bool keep_graph, bool accumulate,
                      const edge_list& outputs) {
  return torch::autograd::Engine::get_default_engine().execute(roots, gradients, keep_graph, /*create_graph=*/false,
                                                               accumulate, outputs);
}

// A node that a graph task wants to reach, so that it runs.
class Goal : public Node {
 public:
  Goal() { add_input_metadata(at::zeros({1})); }
  variable_list apply(variable_list&& /*gradients*/) override { return {}; }
};

// Calls nodes from inside a graph task that wants certain edges, so that they compute nothing else: which gradients a
// node computes it learns from the running task.
class DirectCalls : public Node {
 public:
  DirectCalls(std::function<void()> calls, const Edge& goal) : calls_(std::move(calls)) {
    add_input_metadata(at::zeros({1}));
    add_next_edge(goal);
  }
  variable_list apply(variable_list&& /*gradients*/) override {
    calls_();
    return {at::Tensor()};
  }

 private:
  std::function<void()> calls_;
};

// Nodes from `roots` on, each after all nodes it leads to.
std::vector<NodePointer<>> children_first(const edge_list& roots) {
  std::vector<NodePointer<>> order;
  std::unordered_set<Node*> seen;
  std::vector<std::pair<NodePointer<>, size_t>> path;
  const auto enter = [&](const NodePointer<>& node) {
    if (node && seen.insert(node.get()).second) path.emplace_back(node, 0);
  };
  for (const Edge& root : roots) {
    enter(root.function);
    while (!path.empty()) {
      auto& [node, next] = path.back();
      if (next == node->num_outputs()) {
        order.push_back(std::move(node));
        path.pop_back();
      } else {
        enter(node->next_edge(next++).function);  // may move `path`
      }
    }
  }
  return order;
}

// Whether the node may run twice, each time for some of its results: one of LibTorch's own, nobody listens to.
bool runs_in_parts(Node& node) {
  return node.is_traceable() && node.tensor_pre_hooks().empty() && node.retains_grad_hooks().empty() &&
         node.pre_hooks().empty() && node.post_hooks().empty();
}

}  // namespace

// How the graph can be split into two passes.
struct StageBackward::Split {
  bool possible = false;
  std::vector<Joint> joints;
  Edges now;                                     // into weights, captured by the first pass
  variable_list of_now;                          // what it captured
  Edges later;                                   // into weights, from `joints`
  std::vector<std::pair<size_t, size_t>> where;  // of each of `later`: joint, and result of its node
  std::vector<NodePointer<>> passed;             // nodes that only the first pass executes
};

StageBackward::StageBackward(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs)
    : input_count_(inputs.size()) {
  for (const at::Tensor& output : outputs) {
    ensure(output.requires_grad(), "backward starts at outputs that require gradients");
    roots_.push_back(torch::autograd::impl::gradient_edge(output));
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].requires_grad()) continue;
    ensure(inputs[i].is_leaf(), "a stage begins at leaves");
    inputs_.push_back(torch::autograd::impl::gradient_edge(inputs[i]));
    input_positions_.push_back(i);
  }
}

bool StageBackward::can_split() {
  if (split_) return split_->possible;
  split_ = std::make_shared<Split>();
  if (inputs_.empty()) return false;
  std::unordered_set<Node*> spine;  // leads to an input
  for (const Edge& input : inputs_) spine.insert(input.function.get());
  const auto order = children_first(roots_);
  for (const auto& node : order) {
    bool leads = false;
    for (const Edge& next : node->next_edges()) leads = leads || (next.function && spine.contains(next.function.get()));
    if (leads) spine.insert(node.get());
  }
  const auto leaves_spine = [&](const Edge& edge) { return edge.function && !spine.contains(edge.function.get()); };
  // A node that nodes which run once lead to gets its gradient in the first pass, from all that lead to it.
  std::unordered_set<Node*> now;
  std::set<std::pair<Node*, uint32_t>> seen;
  for (const auto& node : order) {
    if (!spine.contains(node.get()) || runs_in_parts(*node)) continue;
    for (const Edge& next : node->next_edges()) {
      if (!leaves_spine(next)) continue;
      now.insert(next.function.get());
      if (seen.emplace(next.function.get(), next.input_nr).second) split_->now.push_back(next);
    }
  }
  for (const auto& node : order) {
    if (!spine.contains(node.get())) {
      for (const Edge& next : node->next_edges()) {
        if (now.contains(next.function.get())) return false;  // this would be executed in both passes
      }
      continue;
    }
    const size_t joint = split_->joints.size();
    const size_t known = split_->later.size();
    for (size_t i = 0; i < node->num_outputs(); ++i) {
      const Edge& next = node->next_edge(i);
      if (!leaves_spine(next)) continue;
      if (!now.contains(next.function.get())) {
        split_->later.push_back(next);
        split_->where.emplace_back(joint, i);
      } else if (seen.emplace(next.function.get(), next.input_nr).second) {
        split_->now.push_back(next);
      }
    }
    if (split_->later.size() > known) {
      split_->joints.push_back({.node = node});
    } else if (node->num_outputs() > 0) {
      split_->passed.push_back(node);
    }
  }
  split_->possible = !split_->joints.empty();
  return split_->possible;
}

std::vector<at::Tensor> StageBackward::scattered(std::vector<at::Tensor> of_edges) const {
  std::vector<at::Tensor> result(input_count_);
  for (size_t i = 0; i < input_positions_.size(); ++i) result[input_positions_[i]] = std::move(of_edges[i]);
  return result;
}

std::vector<at::Tensor> StageBackward::whole(const std::vector<at::Tensor>& gradients) {
  split_.reset();
  if (roots_.empty()) return std::vector<at::Tensor>(input_count_);  // nothing of the stage is trained
  // Into the inputs' own .grad as into any weight's: one pass for both.
  execute(roots_, gradients, /*keep_graph=*/false, /*accumulate=*/true, {});
  roots_.clear();
  variable_list found;
  for (const Edge& input : inputs_) {
    auto* const leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(input.function.get());
    ensure(leaf != nullptr, "the gradient edge of a leaf accumulates");
    found.push_back(std::exchange(leaf->variable.mutable_grad(), at::Tensor()));
  }
  inputs_.clear();
  return scattered(std::move(found));
}

std::vector<at::Tensor> StageBackward::inputs_only(const std::vector<at::Tensor>& gradients) {
  ensure(can_split(), "only a graph that can be split is");
  Edges wanted = inputs_;
  wanted.insert(wanted.end(), split_->now.begin(), split_->now.end());
  for (Joint& joint : split_->joints) {
    joint.first_capture = wanted.size();
    for (uint32_t i = 0; i < joint.node->num_inputs(); ++i) wanted.emplace_back(joint.node, i);
  }
  variable_list found = execute(roots_, gradients, /*keep_graph=*/true, /*accumulate=*/false, wanted);
  for (Joint& joint : split_->joints) {
    for (size_t i = 0; i < joint.node->num_inputs(); ++i) {
      joint.flowing.push_back(std::move(found[joint.first_capture + i]));
    }
  }
  for (size_t i = 0; i < split_->now.size(); ++i) split_->of_now.push_back(std::move(found[inputs_.size() + i]));
  for (const auto& node : split_->passed) node->release_variables();
  split_->passed.clear();
  roots_.clear();
  found.resize(inputs_.size());
  inputs_.clear();
  return scattered(std::move(found));
}

void StageBackward::weights() {
  ensure(split_ && roots_.empty(), "the second pass follows the first");
  Edges targets;
  variable_list found;
  const auto take = [&](const Edge& edge, at::Tensor gradient) {
    if (!gradient.defined()) return;
    targets.push_back(edge);
    found.push_back(std::move(gradient));
  };
  for (size_t i = 0; i < split_->now.size(); ++i) take(split_->now[i], std::move(split_->of_now[i]));
  const auto call_joints = [&] {
    const at::NoGradGuard no_grad;
    size_t edge = 0;
    for (size_t j = 0; j < split_->joints.size(); ++j) {
      Joint& joint = split_->joints[j];
      bool flows = false;
      for (const at::Tensor& gradient : joint.flowing) flows = flows || gradient.defined();
      variable_list results;
      if (flows) results = (*joint.node)(std::move(joint.flowing));
      joint.node->release_variables();
      for (; edge < split_->where.size() && split_->where[edge].first == j; ++edge) {
        if (flows) take(split_->later[edge], std::move(results[split_->where[edge].second]));
      }
      joint = {};
    }
  };
  const Edge goal(make_node<Goal>(), 0);
  Edges wanted = split_->later;
  wanted.push_back(goal);
  execute({Edge(make_node<DirectCalls>(call_joints, goal), 0)}, {at::zeros({1})}, /*keep_graph=*/false,
          /*accumulate=*/false, wanted);
  if (!targets.empty()) execute(targets, found, /*keep_graph=*/false, /*accumulate=*/true, {});
  split_.reset();
}

}  // namespace ds::pipeline
