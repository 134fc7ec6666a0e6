#include "dsengine/activation_checkpoint.h"
#include "core/torch_version/node.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/variable.h>

#include <chrono>
#include <mutex>

#include "core/check.h"
#include "core/memory/tensor_holders.h"
#include "core/tensor_check.h"
#include "recompute/region.h"

namespace ds::recompute {

namespace autograd = torch::autograd;

namespace {

class CheckpointBackward : public autograd::Node {
 public:
  explicit CheckpointBackward(std::shared_ptr<const Region> region) : region_(std::move(region)) {}

  std::string name() const override { return "CheckpointBackward"; }

  autograd::variable_list apply(autograd::variable_list&& gradients) override {
    std::shared_ptr<const Region> region;
    {
      const std::lock_guard lock(mutex_);
      region = region_;
    }
    TORCH_CHECK(region != nullptr, autograd::ERR_BACKWARD_TWICE);
    require(!at::GradMode::is_enabled(), "checkpoint: backward with create_graph: expected first derivatives only, ",
            "found a double backward through a checkpointed region; call its function without checkpoint");
    std::vector<bool> wanted;
    for (size_t i = 0; i < num_outputs(); ++i) wanted.push_back(task_should_compute_output(i));
    return region->backward(std::move(gradients), wanted);
  }

  void release_variables() override {
    std::shared_ptr<const Region> released;
    const std::lock_guard lock(mutex_);
    released.swap(region_);
  }

 private:
  std::shared_ptr<const Region> region_;
};

// What the caller gets for an output: the same memory and count of changes, none of its past.
at::Tensor released_output(const at::Tensor& output, bool shared) {
  at::Tensor alias = alias_of(output);
  if (!shared) return alias;
  // A view made by a custom function: autograd refuses to change it in place, which would lose gradients.
  return autograd::make_variable_differentiable_view(alias_of(output), autograd::ViewInfo(alias, nullptr, nullptr),
                                                     std::nullopt, /*shared_view_info=*/false,
                                                     autograd::CreationMeta::IN_CUSTOM_FUNCTION);
}

struct FirstRun {
  std::vector<at::Tensor> outputs;
  std::vector<OutsideTensor> outside;
  double seconds = 0;
};

FirstRun run_without_graph(const RegionFunction& function, const std::vector<at::Tensor>& inputs) {
  std::vector<at::Tensor> aliases;
  std::vector<int64_t> versions;
  for (const at::Tensor& input : inputs) {
    aliases.push_back(input.defined() ? alias_of(input) : at::Tensor());
    versions.push_back(version_of(input));
  }
  FirstRun run;
  const auto begin = std::chrono::steady_clock::now();
  {
    const at::NoGradGuard no_graph;
    const WithoutAutocastCache no_cache;
    OutsideRecorder recorder;
    run.outputs = function(aliases);
    for (const at::Tensor& output : run.outputs) recorder.see(output);  // captured and returned as it is
    run.outside = recorder.take();
  }
  run.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  for (size_t i = 0; i < inputs.size(); ++i) {
    require(version_of(inputs[i]) == versions[i], "checkpoint: the function changed its input ", i, " (",
            describe(inputs[i]), ") in place, so it cannot be computed again; change a clone of it");
  }
  require_unchanged(run.outside, "by the function itself");
  return run;
}

// Of the engine that has split what the region reads; null: none has, and its inputs may differ by rank.
std::shared_ptr<comm::Communicator> group_of_engine(const std::vector<at::Tensor>& inputs,
                                                    const std::vector<OutsideTensor>& outside) {
  for (const OutsideTensor& read : outside) {
    if (auto group = split_group_of(read.tensor)) return group;
  }
  for (const at::Tensor& input : inputs) {
    if (auto group = split_group_of(input)) return group;
  }
  return nullptr;
}

// Gives the outputs one node of autograd.
std::vector<at::Tensor> with_graph(std::shared_ptr<const Region> region, autograd::edge_list edges,
                                   const std::vector<at::Tensor>& outputs) {
  const std::vector<bool> shared = find_shared(outputs);
  const std::vector<OutputShape>& shapes = region->outputs;
  const NodePointer<> node = make_node<CheckpointBackward>(std::move(region));
  node->set_next_edges(std::move(edges));
  std::vector<at::Tensor> result;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!shapes[i].differentiable) {
      result.push_back(outputs[i]);
      continue;
    }
    result.push_back(released_output(outputs[i], shared[i]));
    autograd::impl::set_gradient_edge(result.back(), {node, node->add_input_metadata(result.back())});
  }
  return result;
}

}  // namespace

std::vector<at::Tensor> checkpoint_tensors(const CheckpointOptions& options, RegionFunction function,
                                           const std::vector<at::Tensor>& inputs) {
  if (!at::GradMode::is_enabled()) return function(inputs);
  CheckpointThread& thread = CheckpointThread::current();
  const auto region = std::make_shared<Region>();
  region->options = options;
  region->thread = thread;
  region->devices = accelerators_in_use(inputs);
  checkpoint_boundary(region->options, region->devices);
  region->state = ExecutionState::capture(region->devices, region->options.preserve_rng_state);
  FirstRun run = [&] {
    const ReplayTape::Recording decisions(region->decisions);
    return run_without_graph(function, inputs);
  }();
  checkpoint_boundary(region->options, region->devices);

  autograd::edge_list edges;
  for (const at::Tensor& input : inputs) {
    if (input.defined() && input.requires_grad()) edges.push_back(autograd::impl::gradient_edge(input));
  }
  for (const OutsideTensor& outside : run.outside) edges.push_back(outside.edge);
  if (edges.empty()) {
    const std::vector<bool> shared = find_shared(run.outputs);
    for (size_t i = 0; i < run.outputs.size(); ++i) {
      if (run.outputs[i].defined() && !shared[i]) run.outputs[i] = alias_of(run.outputs[i]);
    }
    return std::move(run.outputs);
  }
  if (region->options.partition_activations && !region->options.tensor_parallel_group) {
    region->options.tensor_parallel_group = group_of_engine(inputs, run.outside);
  }
  int64_t bytes = 0;
  for (size_t i = 0; i < inputs.size(); ++i) {
    bytes += region->inputs.emplace_back(inputs[i], i, region->options, *thread.slots).bytes();
  }
  region->function = std::move(function);
  region->outside = std::move(run.outside);
  region->outputs = shapes_of(run.outputs);
  if (region->options.profile) {
    thread.statistics->add({.regions = 1, .bytes_kept = bytes, .forward_seconds = run.seconds});
  }
  return with_graph(region, std::move(edges), run.outputs);
}

}  // namespace ds::recompute
