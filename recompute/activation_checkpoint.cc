#include "dsengine/activation_checkpoint.h"
#include "core/torch_version/node.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <unordered_map>

#include "core/check.h"
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

// The references to a storage, and to tensors on it, that outputs account for: themselves and what they are views of.
struct Owners {
  struct References {
    size_t counted = 0;
    size_t all = 0;
  };
  std::unordered_map<const at::TensorImpl*, References> tensors;
  int outputs = 0;

  bool others() const {
    return std::any_of(tensors.begin(), tensors.end(),
                       [](const auto& of) { return of.second.all > of.second.counted; });
  }
};

// Marks outputs whose memory somebody else can see: inputs, captured tensors, each other.
std::vector<bool> find_shared(const std::vector<at::Tensor>& outputs) {
  std::unordered_map<const c10::StorageImpl*, Owners> owners;
  const auto count = [&](const at::Tensor& tensor, bool is_output) {
    Owners& of = owners[tensor.storage().unsafeGetStorageImpl()];
    of.outputs += is_output ? 1 : 0;
    Owners::References& references = of.tensors[tensor.unsafeGetTensorImpl()];
    ++references.counted;
    references.all = tensor.use_count();
  };
  for (const at::Tensor& output : outputs) {
    if (!output.defined() || !output.has_storage()) continue;
    count(output, /*is_output=*/true);
    const auto* view = autograd::impl::get_view_autograd_meta(output);
    if (view == nullptr) continue;
    if (view->has_bw_view()) count(view->get_backward_view().base_, /*is_output=*/false);
    if (view->has_fw_view() && !view->shared_view_info()) count(view->get_forward_view().base_, /*is_output=*/false);
  }
  std::vector<bool> shared;
  for (const at::Tensor& output : outputs) {
    if (!output.defined() || !output.has_storage()) {
      shared.push_back(false);
      continue;
    }
    const Owners& of = owners.at(output.storage().unsafeGetStorageImpl());
    shared.push_back(of.outputs > 1 || of.others() || output.storage().use_count() > of.tensors.size());
  }
  return shared;
}

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
