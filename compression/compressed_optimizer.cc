#include "compression/compressed_optimizer.h"

#include <ATen/core/grad_mode.h>

#include <utility>

#include "core/check.h"
#include "core/tensor_check.h"
#include "optim/chunked_update.h"

namespace ds::compression {

CompressedOptimizer::CompressedOptimizer(std::vector<optimizers::GroupOptions> groups, comm::Communicator& communicator)
    : CopyingOptimizer(std::move(groups)), communicator_(communicator) {}

void CompressedOptimizer::allocate_states(int64_t index, const optimizers::NewState& new_state) {
  const optimizers::Slice& own = slice(index);
  require(optimizers::state_type(own.master.scalar_type()) == at::kFloat, name(), ": expected parameters of float32, ",
          "bfloat16 or float16, found ", describe(own.master));
  require(own.exchange->size() == 1 || own.exchange->size() == communicator_.size(), name(),
          ": expected slices of whole buckets, or of ", communicator_.size(), " ranks, found ", own.exchange->size());
  allocate_slice_states(index, new_state);
  exchanges_.emplace_back(own, index, communicator_, scratch_);
}

void CompressedOptimizer::update_into(int64_t index, const at::Tensor& gradient, double gradient_scale,
                                      const at::Tensor& copy) {
  const at::NoGradGuard no_grad;
  if (is_local(step_count_)) {
    require(index >= 0 && index < slice_count() && step_count_ > 0, "update: expected begin_step(), and a slice below ",
            slice_count(), ", found ", index);
    const int64_t numel = slice(index).master.numel() * slice(index).exchange->size();
    require(gradient.defined() && gradient.dim() == 1 && gradient.is_contiguous() && gradient.numel() == numel &&
                gradient.device() == slice(index).master.device() && at::isFloatingType(gradient.scalar_type()),
            "update: expected this rank's gradient of the whole bucket, flat, ", numel, " elements, found ",
            describe(gradient));
  } else {
    slice_for_update(index, gradient);
  }
  advance(index, gradient, gradient_scale, copy);
}

void CompressedOptimizer::set_average_mask(int64_t index, const at::Tensor& mask) {
  require(index >= 0 && index < slice_count(), "expected a slice below ", slice_count(), ", found ", index);
  const int64_t numel = slice(index).master.numel() * slice(index).exchange->size();
  require(mask.defined() && mask.dim() == 1 && mask.numel() == numel && mask.scalar_type() == at::kBool, name(),
          ": exp_avg_mask: expected a flat bool tensor of ", numel, " elements, found ", describe(mask));
  exchange(index).set_mask(mask);
}

optimizers::NamedStates CompressedOptimizer::rank_states() {
  optimizers::NamedStates states;
  for (const BucketExchange& exchange : exchanges_) exchange.add_errors(states);
  return states;
}

void CompressedOptimizer::states_changed(bool rank_states) {
  for (BucketExchange& exchange : exchanges_) exchange.states_changed(rank_states);
}

void require_freeze_step(int64_t freeze_step, bool deepspeed_semantics) {
  const int64_t fewest = deepspeed_semantics ? 2 : 1;  // their first one moves nothing
  require<ConfigError>(freeze_step >= fewest, "optimizer.params.freeze_step: expected at least ", fewest, ", found ",
                       freeze_step, "; the variance that is frozen comes from the steps before");
}

}  // namespace ds::compression
