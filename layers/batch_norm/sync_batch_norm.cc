
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_batch_norm_impl_index_native.h>
#include <ATen/ops/batch_norm_native.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "core/check.h"
#include "core/replay/recomputation.h"
#include "core/torch_version/node.h"
#include "layers/batch_norm/batch_statistics.h"
#include "layers/batch_norm/converted_layers.h"
#include "layers/layer_operators.h"

namespace ds::norm {
namespace {

namespace autograd = torch::autograd;
using MaybeTensor = std::optional<at::Tensor>;
using ImplOutputs = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, int64_t>;

at::Tensor or_none(const MaybeTensor& tensor) { return tensor ? *tensor : at::Tensor(); }

// Operators inside compute in the dtypes that they are given.
struct WithoutAutocast {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::autocast_dispatch_keyset};
};

// A layer whose ranks are there.
struct LayerOverRanks {
  std::string name;
  std::shared_ptr<torch::nn::Module> module;
  std::shared_ptr<comm::Communicator> group;
};

at::Tensor summed_over_ranks(const at::Tensor& sums, const LayerOverRanks& layer) {
  at::Tensor result = sums.clone();
  layer.group->all_reduce(result, comm::ReduceOp::kSum, "sync batch norm, gradient of " + layer.name).wait();
  return result;
}

class SyncBatchNormBackward : public layers::LayerBackward {
 public:
  SyncBatchNormBackward(LayerOverRanks layer, const at::Tensor& input, const at::Tensor& weight,
                        BatchStatistics statistics, double eps)
      : LayerBackward(input, weight), layer_(std::move(layer)), statistics_(std::move(statistics)), eps_(eps) {}

  std::string name() const override { return "SyncBatchNormBackward"; }

  // NOLINTNEXTLINE(cppcoreguidelines-rvalue-reference-param-not-moved): autograd's signature
  autograd::variable_list apply(autograd::variable_list&& gradients) override {
    require(
        !at::GradMode::is_enabled(), "sync batch norm ", layer_.name,
        ": backward with create_graph: expected first derivatives only, found a double backward through statistics ",
        "that are exchanged between ranks");
    require_unreleased();
    const WithoutAutocast plain;
    const at::Tensor input = this->input();
    const at::Tensor weight = this->weight();
    const at::Tensor& gradient = gradients[0];
    autograd::variable_list result(3);
    if (!gradient.defined()) return result;
    const at::Tensor sums = local_gradient_sums(gradient, input, statistics_, eps_);
    const int64_t channels = input.size(1);
    if (task_should_compute_output(0)) {
      result[0] = input_gradient(gradient, input, weight, statistics_, summed_over_ranks(sums, layer_));
    }
    // Gradients of this rank's part of the batch: the reduction of gradients adds them up. Autograd casts them to the
    // weights' dtype.
    const at::ScalarType type = statistics_.mean.scalar_type();
    if (task_should_compute_output(1)) result[1] = sums.narrow(0, 0, channels).to(type);
    if (task_should_compute_output(2)) result[2] = sums.narrow(0, channels, channels).to(type);
    return result;
  }

 private:
  const LayerOverRanks layer_;
  const BatchStatistics statistics_;
  const double eps_;
};

struct Arguments {
  const at::Tensor& input;
  LayerTensors tensors;  // without num_batches_tracked
  double momentum;
  double eps;
};

BatchStatistics joined_statistics(const LayerOverRanks& layer, const at::Tensor& input, double eps) {
  const at::Tensor own = local_statistics(input);
  at::Tensor all = at::empty({layer.group->size(), own.size(0)}, own.options());
  layer.group->all_gather(all, own, "sync batch norm, statistics of " + layer.name).wait();
  return join_statistics(all, input, eps);
}

// One number more than none on this rank: whether the ranks together have enough of them is known without a look.
void require_values(const LayerOverRanks& layer, const at::Tensor& input, const BatchStatistics& statistics) {
  if (input.numel() > input.size(1)) return;
  const auto count = statistics.count.item<double>();
  require(count > 1, "sync batch norm ", layer.name, ": expected more than 1 value per channel on all ranks together, ",
          "found ", count, " in training");
}

at::Tensor compute(LayerOverRanks layer, const Arguments& of) {
  require(of.input.dim() >= 2, "sync batch norm ", layer.name, ": expected an input of [N, C, ...], found ",
          of.input.sizes());
  const WithoutAutocast plain;
  BatchStatistics statistics;
  at::Tensor output;
  {
    const at::AutoGradMode no_graph(false);
    const at::Tensor input = of.input.detach();
    statistics = joined_statistics(layer, input, of.eps);
    require_values(layer, input, statistics);
    if (of.tensors.running_mean.defined() && !Recomputation::is_running()) {
      update_running(of.tensors.running_mean, statistics.exact_mean, of.momentum);
      update_running(of.tensors.running_var, statistics.unbiased, of.momentum);
    }
    output = normalize(input, of.tensors.weight, of.tensors.bias, statistics, of.eps);
  }
  layers::set_backward(output, of.input, of.tensors.weight, of.tensors.bias, [&] {
    return make_node<SyncBatchNormBackward>(std::move(layer), of.input, of.tensors.weight, std::move(statistics),
                                            of.eps);
  });
  return output;
}

// None: LibTorch computes it.
std::optional<LayerOverRanks> layer_over_ranks(const Arguments& of, bool training) {
  // In evaluation, and for shapes alone.
  if (!training || of.input.is_meta()) return std::nullopt;
  const auto layer = find_converted(of.tensors.weight, of.tensors.running_mean);
  auto module = layer ? layer->module.lock() : nullptr;
  // Without running statistics a layer in evaluation uses those of its batch, as torch's SyncBatchNorm its own rank's.
  if (!module || !module->is_training()) return std::nullopt;
  require(layer->has_ranks, "sync batch norm ", layer->name,
          ": expected the ranks to be known in training, found a layer that was converted without a group and has no ",
          "engine yet. Pass the group, convert_sync_batchnorm(module, group), or initialize the engine before");
  auto group = layer->group.lock();
  require(
      group != nullptr, "sync batch norm ", layer->name,
      ": expected the engine that trains the layer, found that it has ended; initialize another one with the module, ",
      "or convert it again");
  return LayerOverRanks{.name = layer->name, .module = std::move(module), .group = std::move(group)};
}

// The module has counted a batch before it called the operator; one that is computed again was counted before.
void count_once(torch::nn::Module& module) {
  if (!Recomputation::is_running()) return;
  const at::Tensor counted = tensors_of(module).num_batches_tracked;
  if (counted.defined()) counted.sub_(1);
}

// A rank alone is LibTorch's, which moves running statistics each time: what is computed again moves copies.
void leave_running_statistics(LayerTensors& tensors) {
  if (!Recomputation::is_running()) return;
  for (at::Tensor* const running : {&tensors.running_mean, &tensors.running_var}) {
    if (running->defined()) *running = running->detach().clone();
  }
}

// None: LibTorch computes it, of the tensors that are here then. `comes_again`: by an operator that comes here too.
std::optional<at::Tensor> sync_batch_norm(Arguments& of, bool training, bool comes_again) {
  auto layer = layer_over_ranks(of, training);
  if (!layer || (comes_again && layer->group->size() == 1)) return std::nullopt;
  count_once(*layer->module);
  if (layer->group->size() == 1) {
    leave_running_statistics(of.tensors);
    return std::nullopt;
  }
  layer->module.reset();  // graphs keep the ranks alone
  return compute(*std::move(layer), of);
}

// NOLINTNEXTLINE(readability-function-size): the operator's signature
at::Tensor batch_norm(const at::Tensor& input, const MaybeTensor& weight, const MaybeTensor& bias,
                      const MaybeTensor& running_mean, const MaybeTensor& running_var, bool training, double momentum,
                      double eps, bool cudnn_enabled) {
  Arguments given{
      input, {or_none(weight), or_none(bias), or_none(running_mean), or_none(running_var), {}}, momentum, eps};
  if (auto result = sync_batch_norm(given, training, /*comes_again=*/true)) return *std::move(result);
  return at::native::batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled);
}

// The operator that batch_norm is made of, for where it is decomposed before it comes to us.
// NOLINTNEXTLINE(readability-function-size): the operator's signature
ImplOutputs batch_norm_impl(const at::Tensor& input, const MaybeTensor& weight, const MaybeTensor& bias,
                            const MaybeTensor& running_mean, const MaybeTensor& running_var, bool training,
                            double momentum, double eps, bool cudnn_enabled) {
  Arguments given{
      input, {or_none(weight), or_none(bias), or_none(running_mean), or_none(running_var), {}}, momentum, eps};
  if (auto result = sync_batch_norm(given, training, /*comes_again=*/false)) {
    const at::Tensor none = at::empty({0}, input.options());
    return {*std::move(result), none, none, at::empty({0}, input.options().dtype(at::kByte)), 0};
  }
  return at::native::_batch_norm_impl_index(input, weight, bias, given.tensors.running_mean, given.tensors.running_var,
                                            training, momentum, eps, cudnn_enabled);
}

}  // namespace

void register_sync_batch_norm() {
  // Both aliases are before the one of composed operators, on every device. In this order: entries of autograd are
  // chosen again with a registration for autograd alone, and then see that there is a kernel below. Never destroyed:
  // the dispatcher may be used until the process ends. Used by nobody, and kept where leak checkers find it.
  [[gnu::used]] static const auto* const kRegistrations = [] {
    auto* const libraries = new std::vector<torch::Library>;
    for (const c10::DispatchKey key : {c10::DispatchKey::CompositeExplicitAutograd, c10::DispatchKey::Autograd}) {
      torch::Library& library = libraries->emplace_back(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
      library.impl("batch_norm", TORCH_FN(batch_norm));
      library.impl("_batch_norm_impl_index", TORCH_FN(batch_norm_impl));
    }
    return libraries;
  }();
}

}  // namespace ds::norm
