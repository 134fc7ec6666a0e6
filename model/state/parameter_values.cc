#include "model/state/parameter_values.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "core/check.h"
#include "core/tensor_check.h"
#include "optim/chunked_update.h"
#include "zero/partition.h"

namespace ds::engine {

ParameterValues::ParameterValues(const ModelState& state, const at::Tensor& given, const char* call)
    : state_(state), call_(call) {
  const at::Tensor parameter = trained_tensor(given);
  const auto is_same = [&](const zero::Parameter& one) {
    return parameter.defined() && one.tensor.unsafeGetTensorImpl() == parameter.unsafeGetTensorImpl();
  };
  for (const zero::Parameter& one : state.frozen) {
    require(!is_same(one), call, ": parameter ", one.name, " is frozen: it has neither a master nor optimizer states; ",
            "read it in a scope of engine->gathered_parameters()");
  }
  const auto found = std::find_if(state.parameters.begin(), state.parameters.end(), is_same);
  require(found != state.parameters.end(), call, ": expected a parameter as model->parameters() has it, found ",
          describe(given), ", which is none of ", state.module->name());
  name_ = found->name;
  sizes_ = given.sizes().vec();
  part_ = found->part;
  numel_ = parameter.numel();
  const auto index = static_cast<int64_t>(found - state.parameters.begin());
  for (size_t b = 0; b < state.buckets.size(); ++b) {
    const zero::BucketLayout& layout = state.buckets[b].layout();
    const bool here = std::any_of(layout.segments.begin(), layout.segments.end(),
                                  [&](const Segment& segment) { return segment.parameter == index; });
    if (!here) continue;
    bucket_ = b;
    comm::Communicator& shards = state.groups_of(b).shards;
    split_ = state.plan.partition_optimizer && shards.size() > 1;
    own_ = split_ ? zero::slice_segments(layout, shards.rank()) : layout.segments;
  }
  std::erase_if(own_, [&](const Segment& segment) { return segment.parameter != index; });
}

at::ScalarType ParameterValues::value_type() const {
  return optimizers::state_type(state_.masters[bucket_].scalar_type());
}

int64_t ParameterValues::local_numel() const {
  int64_t numel = 0;
  for (const Segment& segment : own_) numel += segment.length;
  return numel;
}

// A sum with one part that is not zero is that part.
at::Tensor ParameterValues::whole(const at::Tensor& flat) const {
  const at::NoGradGuard no_grad;
  at::Tensor values = at::zeros({numel_}, at::TensorOptions().dtype(value_type()).device(state_.ranks.device));
  for (const Segment& segment : own_) {
    values.narrow(0, segment.parameter_offset, segment.length)
        .copy_(flat.narrow(0, segment.slice_offset, segment.length));
  }
  if (split_) {
    state_.groups_of(bucket_).shards.all_reduce(values, comm::ReduceOp::kSum, cat("values of ", name_)).wait();
  }
  return part_ ? state_.tensor->joined(values.view(part_->sizes()), *part_) : values.view(sizes_);
}

at::Tensor ParameterValues::local(const at::Tensor& flat) const {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> parts = {at::empty({0}, flat.options().dtype(value_type()))};
  for (const Segment& segment : own_) {
    parts.push_back(flat.narrow(0, segment.slice_offset, segment.length).to(value_type()));
  }
  return at::cat(parts);
}

void ParameterValues::require_shape(const at::Tensor& value, const std::vector<int64_t>& sizes) const {
  require(value.defined() && value.sizes() == sizes && value.is_floating_point(), call_, ": parameter ", name_,
          ": expected a floating-point tensor of shape ", at::IntArrayRef(sizes), ", found ", describe(value));
}

void ParameterValues::write_whole(const at::Tensor& flat, const at::Tensor& value) const {
  const at::NoGradGuard no_grad;
  require_shape(value, sizes_);
  const at::Tensor all = (part_ ? slice_of(value, *part_) : value.detach()).reshape({-1});
  for (const Segment& segment : own_) {
    flat.narrow(0, segment.slice_offset, segment.length).copy_(all.narrow(0, segment.parameter_offset, segment.length));
  }
}

void ParameterValues::write_local(const at::Tensor& flat, const at::Tensor& value) const {
  const at::NoGradGuard no_grad;
  require_shape(value, {local_numel()});
  int64_t from = 0;
  for (const Segment& segment : own_) {
    flat.narrow(0, segment.slice_offset, segment.length).copy_(value.detach().narrow(0, from, segment.length));
    from += segment.length;
  }
}

void ParameterValues::use_state(const std::string& state, bool changes,
                                const std::function<void(const at::Tensor& flat)>& use) const {
  require(state_.optimizer.own != nullptr, call_, ": the program's own optimizer has its states by itself; expected ",
          "an engine with the optimizer of its config");
  const auto visit = [&] {
    std::string names;
    for (const auto& [name, values] : state_.optimizer.states(bucket_)) {
      if (values.numel() != state_.masters[bucket_].numel()) continue;
      if (name == state) return use(values);
      names += cat(names.empty() ? "" : ", ", name);
    }
    throw UsageError(cat(call_, ": parameter ", name_, ": expected a state of ", state_.optimizer.name(), " (",
                         names.empty() ? "it has none by parameter" : names, "), found \"", state, "\""));
  };
  state_.use_master(bucket_, changes, [&](const at::Tensor&) { visit(); });
}

void ParameterValues::use_master(bool changes, const std::function<void(const at::Tensor& flat)>& use) const {
  state_.use_master(bucket_, changes, [&](const at::Tensor& master) {
    if (!changes) return use(master);
    const at::NoGradGuard no_grad;
    const at::Tensor own = state_.own_part(bucket_);
    state_.buckets[bucket_].kept_slice().use(/*changes=*/true, [&] {
      use(master);
      if (own.is_alias_of(master)) return;
      const at::Tensor weights = state_.optimizer.weights(bucket_, master);
      for (const Segment& segment : own_) {
        own.narrow(0, segment.slice_offset, segment.length)
            .copy_(weights.narrow(0, segment.slice_offset, segment.length));
      }
    });
  });
}

}  // namespace ds::engine
