#include "recompute/region.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <chrono>
#include <optional>
#include <unordered_set>
#include <utility>

#include "core/check.h"
#include "core/replay/recomputation.h"
#include "core/tensor_check.h"

namespace ds::recompute {

namespace autograd = torch::autograd;

namespace {

constexpr const char* kSameTwice =
    "; both runs of the function must compute the same, from its inputs and what it captures by value";

void require_same_outputs(const std::vector<OutputShape>& expected, const std::vector<at::Tensor>& found) {
  require(expected.size() == found.size(), "checkpoint: the recomputation returned ", found.size(),
          " outputs: expected ", expected.size(), ", as the first run", kSameTwice);
  for (size_t i = 0; i < found.size(); ++i) {
    const OutputShape& first = expected[i];
    const bool same = first.defined == found[i].defined() &&
                      (!first.defined || (first.dtype == found[i].scalar_type() && found[i].sizes() == first.sizes));
    require(same, "checkpoint: output ", i, " of the recomputation: found ", describe(found[i]), ", expected ",
            lazy([&] {
              return first.defined ? cat(c10::toString(first.dtype), ' ', at::IntArrayRef(first.sizes)) : "undefined";
            }),
            ", as in the first run", kSameTwice);
  }
}

// The graph of a recomputation may end at the copies of the inputs and at the outside tensors only: a gradient that
// arrives elsewhere would be lost.
class GraphCheck {
 public:
  GraphCheck() : begin_(at::sequence_number::peek()), thread_(at::RecordFunction::currentThreadId()) {}

  void may_end_at(const autograd::Node* node) { ends_.insert(node); }

  void run(const autograd::edge_list& roots) const {
    std::unordered_set<const autograd::Node*> seen = ends_;
    std::vector<const autograd::Node*> open;
    const auto enter = [&](const autograd::edge_list& edges) {
      for (const autograd::Edge& edge : edges) {
        if (edge.function && seen.insert(edge.function.get()).second) open.push_back(edge.function.get());
      }
    };
    enter(roots);
    while (!open.empty()) {
      const autograd::Node* node = open.back();
      open.pop_back();
      require_new(*node);
      enter(node->next_edges());
    }
  }

 private:
  void require_new(const autograd::Node& node) const {
    if (const auto* leaf = dynamic_cast<const autograd::AccumulateGrad*>(&node)) {
      throw UsageError(cat("checkpoint: the recomputation used a leaf tensor that requires a gradient, ",
                           describe(leaf->variable), ", which the first run did not read", kSameTwice));
    }
    require(node.sequence_nr() >= begin_ && node.thread_id() == thread_,
            "checkpoint: the recomputation used a tensor with an older graph (", lazy([&] { return node.name(); }),
            "), which the first run did not read", kSameTwice);
  }

  const uint64_t begin_;
  const uint64_t thread_;
  std::unordered_set<const autograd::Node*> ends_;
};

// Where the inner backward pass begins: at the recomputed outputs for which a gradient came.
struct Roots {
  autograd::edge_list edges;
  autograd::variable_list gradients;
};

Roots roots_of(const std::vector<OutputShape>& shapes, const std::vector<at::Tensor>& outputs,
               autograd::variable_list gradients) {
  Roots roots;
  size_t next = 0;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!shapes[i].differentiable) continue;
    at::Tensor gradient = std::move(gradients[next++]);
    if (!gradient.defined() || !outputs[i].requires_grad()) continue;
    roots.edges.push_back(autograd::impl::gradient_edge(outputs[i]));
    roots.gradients.push_back(std::move(gradient));
  }
  return roots;
}

// Runs the inner backward pass. Returns a gradient for each of `captures`: undefined where it is not wanted or none
// arrives. Edges that are not wanted are released before the pass.
autograd::variable_list gradients_at(autograd::edge_list captures, const std::vector<bool>& wanted,
                                     const Roots& roots) {
  autograd::variable_list result(captures.size());
  autograd::edge_list needed;
  for (size_t i = 0; i < captures.size(); ++i) {
    if (wanted[i]) needed.push_back(captures[i]);
  }
  if (roots.edges.empty() || needed.empty()) return result;
  captures.clear();
  autograd::variable_list found = autograd::Engine::get_default_engine().execute(
      roots.edges, roots.gradients, /*keep_graph=*/false, /*create_graph=*/false, /*accumulate_grad=*/false, needed);
  size_t taken = 0;
  for (size_t i = 0; i < result.size(); ++i) {
    if (wanted[i]) result[i] = std::move(found[taken++]);
  }
  return result;
}

}  // namespace

std::vector<OutputShape> shapes_of(const std::vector<at::Tensor>& outputs) {
  std::vector<OutputShape> shapes;
  for (const at::Tensor& output : outputs) {
    OutputShape& shape = shapes.emplace_back();
    shape.defined = output.defined();
    if (!shape.defined) continue;
    shape.dtype = output.scalar_type();
    shape.differentiable = autograd::isDifferentiableType(shape.dtype);
    shape.sizes = output.sizes().vec();
  }
  return shapes;
}

void require_unchanged(const std::vector<OutsideTensor>& outside, const char* when) {
  for (const OutsideTensor& each : outside) {
    require(version_of(each.tensor) == each.version, "checkpoint: a tensor that the region reads and that requires a ",
            "gradient (", describe(each.tensor), ") was changed in place ", when, ": expected version ", each.version,
            ", found ", version_of(each.tensor), "; change a clone of it");
  }
}

autograd::variable_list Region::backward(autograd::variable_list gradients, const std::vector<bool>& wanted) const {
  const CheckpointThread::Scope settings(thread);
  checkpoint_boundary(options, devices);
  require_unchanged(outside, "after the region ran");
  const auto begin = std::chrono::steady_clock::now();
  std::vector<at::Tensor> leaves;
  for (const KeptInput& input : inputs) leaves.push_back(input.restore());

  GraphCheck check;
  const OutsideCut cut(outside);  // until the inner pass is over
  std::vector<at::Tensor> found;
  autograd::edge_list captures;
  {
    const at::AutoGradMode with_graph(true);
    const WithoutAutocastCache no_cache;
    const ExecutionState::Scope as_before(state);
    const ReplayTape::Playing as_decided(decisions);
    const Recomputation::Scope again;
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (!inputs[i].requires_grad()) continue;
      leaves[i].requires_grad_(true);
      captures.push_back(autograd::impl::gradient_edge(leaves[i]));
      check.may_end_at(captures.back().function.get());
    }
    found = function(leaves);
    require(as_decided.finished(),
            "checkpoint: the recomputation asked for fewer decisions than the first run (layers ",
            "that may be left out)", kSameTwice);
  }
  leaves.clear();
  require_same_outputs(outputs, found);
  for (uint32_t i = 0; i < outside.size(); ++i) captures.emplace_back(cut.node(), i);
  check.may_end_at(cut.node().get());

  const Roots roots = roots_of(outputs, found, std::move(gradients));
  found.clear();
  check.run(roots.edges);
  if (options.profile) {
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - begin;
    thread.statistics->add({.recomputations = 1, .recomputation_seconds = spent.count()});
  }
  autograd::variable_list result = gradients_at(std::move(captures), wanted, roots);
  checkpoint_boundary(options, devices);
  return result;
}

}  // namespace ds::recompute
