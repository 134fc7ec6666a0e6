#include "model/state/start_values.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "core/check.h"
#include "core/split/split_tensor.h"
#include "optim/chunked_update.h"

namespace ds::engine {
namespace {

// Sends each rank its slice of rank 0's values, which follow one another and end in zeros.
void scatter_slices(const at::Tensor& values, const at::Tensor& slice, comm::Communicator& ranks) {
  const char* const label = "initial parameters";
  if (ranks.rank() != 0) return ranks.irecv(slice, 0, /*tag=*/0, label).wait();
  const at::Tensor flat = values.reshape({-1});
  for (int owner = ranks.size() - 1; owner >= 0; --owner) {  // its own stays in `slice`
    const int64_t begin = std::min(owner * slice.numel(), flat.numel());
    const int64_t length = std::min(slice.numel(), flat.numel() - begin);
    slice.narrow(0, 0, length).copy_(flat.narrow(0, begin, length));
    slice.narrow(0, length, slice.numel() - length).zero_();
    if (owner > 0) ranks.isend(slice, owner, /*tag=*/0, label).wait();
  }
}

}  // namespace

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

// After the last read of a tensor that zero::Init may have sharded.
void StartValues::end_source(const at::Tensor& tensor) {
  if (!init_) return;
  init_->rethrow();
  init_->forget(tensor);
}

at::Tensor StartValues::of_bucket(const zero::BucketLayout& layout, const std::vector<zero::Parameter>& parameters) {
  const at::NoGradGuard no_grad;
  const at::ScalarType dtype = optimizers::state_type(static_cast<at::ScalarType>(layout.dtype));
  const at::Tensor flat = zero::flatten(layout, parameters, at::TensorOptions().dtype(dtype).device(device_),
                                        [this](const zero::Parameter& parameter) { return source(parameter); });
  for (const Segment& segment : layout.segments) {
    end_source(parameters[static_cast<size_t>(segment.parameter)].tensor);
  }
  if (world_.size() > 1) world_.broadcast(flat, 0, "initial parameters").wait();
  return flat;
}

at::Tensor StartValues::of_slice(const zero::BucketLayout& layout, const std::vector<zero::Parameter>& parameters) {
  const at::NoGradGuard no_grad;
  ensure(layout.segments.size() == 1 && layout.numel == layout.slice_numel * world_.size(),
         "slices of one parameter for all ranks are made");
  const zero::Parameter& parameter = parameters[static_cast<size_t>(layout.segments.front().parameter)];
  const at::ScalarType dtype = optimizers::state_type(static_cast<at::ScalarType>(layout.dtype));
  const at::Tensor slice = at::empty({layout.slice_numel}, at::TensorOptions().dtype(dtype).device(device_));
  const bool of_module = files_.is_settled(parameter.name) && !elsewhere_;
  if (!of_module || !init_ || !init_->read_part(parameter.tensor, slice)) {
    scatter_slices(source(parameter), slice, world_);
  }
  end_source(parameter.tensor);
  return slice;
}

at::Tensor StartValues::of(const zero::Parameter& tensor) {
  const at::NoGradGuard no_grad;
  const at::Tensor values =
      at::empty(tensor.tensor.sizes(), tensor.tensor.options().device(device_).requires_grad(false));
  const at::Tensor from = source(tensor);
  if (from.defined()) values.copy_(from);
  end_source(tensor.tensor);
  if (world_.size() > 1 && values.numel() > 0) world_.broadcast(values, 0, tensor.name).wait();
  return values;
}

}  // namespace ds::engine
