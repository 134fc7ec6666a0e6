#include "model/state/start_values.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <utility>

#include "core/check.h"
#include "core/split/split_tensor.h"
#include "optim/chunked_update.h"

namespace ds::engine {

StartValues::StartValues(const torch::nn::Module& module, StartFiles& files, zero::Init* init, const Ranks& ranks,
                         Elsewhere elsewhere)
    : files_(files), init_(init), elsewhere_(std::move(elsewhere)), device_(ranks.device), world_(*ranks.part) {
  files_.open(module, ranks);
}

// Returns the tensor to copy from; undefined where rank 0's values come over anyway.
at::Tensor StartValues::source(const zero::Parameter& tensor) const {
  if (!files_.is_settled(tensor.name)) {
    const at::Tensor values = files_.values(tensor.name, tensor.tensor);
    return values.defined() && tensor.part && files_.give(tensor.name) ? slice_of(values, *tensor.part) : values;
  }
  if (at::Tensor values = elsewhere_ ? elsewhere_(tensor) : at::Tensor(); values.defined()) return values;
  require(!tensor.tensor.is_meta(), tensor.name, " is on the meta device and has no values; pass ",
          ".weights = \"model.safetensors\"");
  return tensor.tensor.detach();
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
