#include "model/state/start_values.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <exception>
#include <set>
#include <utility>

#include "checkpoint/module_weights.h"
#include "comm/agreement.h"
#include "core/check.h"
#include "core/log.h"
#include "dsengine/pipeline.h"
#include "layers/compressed/compressed_model.h"
#include "model/state/tensor_parts.h"
#include "optim/chunked_update.h"

namespace ds::engine {
namespace {

std::string tensor_name(const std::string& path) { return checkpoint::name_in("weights/", path); }

}  // namespace

StartValues::StartValues(const torch::nn::Module& module, const std::string& weights, zero::Init* init,
                         const Ranks& ranks, Elsewhere elsewhere)
    : from_file_(!weights.empty()),
      init_(init),
      elsewhere_(std::move(elsewhere)),
      device_(ranks.device),
      world_(*ranks.part) {
  for (const auto& item : module.named_parameters()) {
    names_[trained_tensor(item.value()).unsafeGetTensorImpl()].push_back(item.key());
  }
  for (const auto& item : module.named_buffers()) names_[item.value().unsafeGetTensorImpl()].push_back(item.key());
  if (!from_file_) return;
  // The outcome of reading is shared with all ranks, before anybody waits for values.
  std::exception_ptr failure;
  if (world_.rank() == 0) {
    try {
      check_file(module, weights);
    } catch (...) {
      failure = std::current_exception();
    }
  }
  const auto failed = comm::failure_of_ranks(failure, device_, *ranks.world);
  require<IoError>(!failed, "initialize: .weights: rank ", failed ? failed->rank : 0, " could not use ", weights, ": ",
                   failed ? failed->message : "");
}

void StartValues::check_file(const torch::nn::Module& module, const std::string& weights) {
  file_ = checkpoint::open_weights(weights);
  std::set<std::string> used;
  const auto check = [&](const std::string& first, const at::Tensor& tensor, bool needed) {
    const at::Tensor trained = trained_tensor(tensor);
    const std::string path = path_in_file(trained);
    require(!path.empty() || !needed, "initialize: .weights: ", weights, " has no tensor \"", first, "\"; it has ",
            file_->tensors().size(), " tensors, the first is \"",
            file_->tensors().empty() ? "" : tensor_name(file_->tensors().begin()->first), "\"");
    if (path.empty()) return;
    const std::vector<std::string>& names = names_.at(trained.unsafeGetTensorImpl());
    used.insert(names.begin(), names.end());
    const at::IntArrayRef found = file_->info(path).sizes;
    require(found == tensor.sizes(), "initialize: .weights: ", weights, ": tensor \"", tensor_name(path),
            "\": expected shape ", tensor.sizes(), ", found ", found);
  };
  // Scores that a method has registered are in no file of weights; they start as they were drawn.
  const auto compressed = model_compression::find_model(module);
  for (const auto& item : module.named_parameters()) {
    const bool drawn = compressed && compressed->has_scores(item.value()) && !item.value().is_meta();
    check(item.key(), item.value(), /*needed=*/!drawn);
  }
  for (const auto& item : module.named_buffers()) check(item.key(), item.value(), item.value().is_meta());
  const auto* stages = dynamic_cast<const pipeline::PipelineModule*>(&module);
  for (const auto& [path, info] : file_->tensors()) {
    const std::string name = tensor_name(path);
    const bool known = used.contains(name) || (stages && stages->is_elsewhere(name));
    if (!known) log::warning(weights, ": tensor \"", name, "\" is not in the model");
  }
}

std::string StartValues::path_in_file(const at::Tensor& tensor) const {
  return checkpoint::weight_for(*file_, names_.at(tensor.unsafeGetTensorImpl()));
}

// Returns the tensor to copy from; undefined where rank 0's values come over anyway.
at::Tensor StartValues::source(const zero::Parameter& tensor) const {
  if (!from_file_) {
    if (at::Tensor values = elsewhere_ ? elsewhere_(tensor) : at::Tensor(); values.defined()) return values;
    require(!tensor.tensor.is_meta(), tensor.name, " is on the meta device and has no values; pass ",
            ".weights = \"model.safetensors\"");
    return tensor.tensor.detach();
  }
  if (world_.rank() != 0) return {};
  const std::string path = path_in_file(tensor.tensor);
  if (path.empty()) return tensor.tensor.detach();
  return tensor.part ? slice_of(file_->tensor(path), *tensor.part) : file_->tensor(path);
}

at::Tensor StartValues::of_bucket(const zero::BucketLayout& layout, const std::vector<zero::Parameter>& parameters) {
  const at::NoGradGuard no_grad;
  const at::ScalarType dtype = optimizers::state_type(static_cast<at::ScalarType>(layout.dtype));
  const at::Tensor flat = zero::flatten(layout, parameters, at::TensorOptions().dtype(dtype).device(device_),
                                        [this](const zero::Parameter& parameter) { return source(parameter); });
  if (init_) {
    init_->rethrow();
    for (const Segment& segment : layout.segments) {
      init_->forget(parameters[static_cast<size_t>(segment.parameter)].tensor);
    }
  }
  if (world_.size() > 1) world_.broadcast(flat, 0, "initial parameters").wait();
  return flat;
}

at::Tensor StartValues::of(const zero::Parameter& tensor) {
  const at::NoGradGuard no_grad;
  const at::Tensor values =
      at::empty(tensor.tensor.sizes(), tensor.tensor.options().device(device_).requires_grad(false));
  const at::Tensor from = source(tensor);
  if (from.defined()) values.copy_(from);
  if (init_) {
    init_->rethrow();
    init_->forget(tensor.tensor);
  }
  if (world_.size() > 1 && values.numel() > 0) world_.broadcast(values, 0, tensor.name).wait();
  return values;
}

}  // namespace ds::engine
