// The boundary of an accumulation: finish the reductions, judge the gradients, update the slices, publish the
// parameters.
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/scalar_tensor.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "core/check.h"
#include "core/log.h"
#include "engine/agreement/shared_failure.h"
#include "engine/engine_impl.h"
#include "zero/gradient_norm.h"

namespace ds::engine {
namespace {

constexpr double kClipEpsilon = 1e-6;

}  // namespace

void Engine::Impl::update() {
  const at::NoGradGuard no_grad;
  saving.wait_copied();
  access->wait_all();  // what was gathered ahead and is not used reads slices, and holds the memory they are read into
  finish_delayed_update();
  reducer->finish();
  reduce_tied();
  reporter->reductions_end();
  if (plan.require_all_gradients) require_gradients();
  const double scale = loss_scaler ? loss_scaler->scale() : 1.0;
  const double norm = plan.compute_grad_norm ? global_norm() / scale : 0.0;
  const bool overflow = !std::isfinite(norm);
  const bool drops = overflow && plan.non_finite != config::NonFiniteGradients::kContinue;
  gradient_norm.reset();
  if (plan.compute_grad_norm) gradient_norm = drops ? std::numeric_limits<double>::infinity() : norm;
  if (drops) roll_back_speculation();
  const std::string report = judge(norm);
  if (!drops) {
    double clip = 1.0;
    // As torch.nn.utils.clip_grad_norm_: min(1, max_norm / (norm + 1e-6)).
    if (plan.clip_norm > 0) clip = std::min(1.0, plan.clip_norm / (norm + kClipEpsilon));
    apply(clip / scale);
    half_stepped = false;
    step_applied = true;
  }
  gradient_bytes = reducer->take_peak_bytes();
  if (gatherer) {
    gathered_bytes = gatherer->take_peak_elements() * buckets.front().flat().element_size();
  }
  drop_gradients();
  if (optimizer) reducer->keep_local(optimizer->wants_local_gradients());
  judge_speculation();
  require<NonFiniteError>(!drops || plan.non_finite != config::NonFiniteGradients::kError, report);
  if (loss_scaler) loss_scaler->update(overflow);  // last: throws when the scale cannot fall any further
}

// Of a norm that is not finite: what all ranks then know of it; all but an error is logged.
std::string Engine::Impl::judge(double norm) {
  if (std::isfinite(norm)) {
    bad_steps_in_a_row = 0;
    return {};
  }
  const bool applied = plan.non_finite == config::NonFiniteGradients::kContinue;
  // Weights that have become NaN make every later step one of these.
  const auto row = static_cast<uint64_t>(++bad_steps_in_a_row);
  if (applied && !std::has_single_bit(row)) return {};
  const std::string report = explain_non_finite(norm);
  if (plan.non_finite == config::NonFiniteGradients::kError || world->rank() != 0) return report;
  log::warning(report, applied && row > 1 ? cat(" (", row, " steps in a row)") : std::string());
  return report;
}

void Engine::Impl::drop_gradients(bool unused) {
  reducer->reset();
  batches.forget(unused);
  if (gradient_check) gradient_check->reset();
}

// Weights that several stages use have the gradients of all of them. Each rank has the same slice of them. In the order
// of the list, which all stages have: that of the buckets is another one where a stage uses them in another order.
void Engine::Impl::reduce_tied() {
  if (!pipeline) return;
  for (size_t k = 0; k < pipeline->tied.size(); ++k) {
    for (size_t b = 0; b < buckets.size(); ++b) {
      if (pipeline->tied_of_bucket[b] != static_cast<int>(k)) continue;
      const at::Tensor gradient = reducer->gradient(b);
      const at::Tensor wire = gradient.to(device);
      pipeline->tied[k].ranks->all_reduce(wire, comm::ReduceOp::kSum, "tied gradients").wait();
      if (!wire.is_same(gradient)) at::Tensor(gradient).copy_(wire);
    }
  }
}

// L2 norm of the reduced gradient over the whole model, with loss scale still in it.
double Engine::Impl::global_norm() {
  zero::SquareSum sum;
  for (size_t b = 0; b < buckets.size(); ++b) {
    if (!pipeline || pipeline->counts(b)) sum.add(reducer->gradient(b));
  }
  double squares = sum.total();
  const bool local = reducer->keeps_local();
  const auto over = [&](comm::Communicator& ranks) {
    if (ranks.size() == 1) return;
    at::Tensor total = at::scalar_tensor(squares, at::TensorOptions().dtype(at::kDouble).device(device)).view({1});
    ranks.all_reduce(total, comm::ReduceOp::kSum, "gradient norm").wait();
    squares = total.item<double>();
  };
  if ((plan.partition_optimizer || local) && groups.shards->size() > 1) {
    over(*groups.shards);
    // Nobody has the mean of local gradients. Its norm is at most the root mean square of theirs, which clips all ranks
    // by one factor.
    if (local) squares *= plan.average_gradients ? 1.0 / groups.shards->size() : groups.shards->size();
  }
  if (pipeline) over(*pipeline->ranks);
  // Sums over other buckets or slices differ in the last bits of a double; none of them reaches the update.
  return static_cast<float>(std::sqrt(squares));
}

// zero_optimization.ignore_unused_parameters: false. All ranks throw when one has to.
void Engine::Impl::require_gradients() {
  const std::vector<int64_t> missing = reducer->parameters_without_gradient();
  const int64_t largest = largest_of_ranks(static_cast<int64_t>(missing.size()), device, *world, "unused parameters");
  if (largest == 0) return;
  drop_gradients();
  require(!missing.empty(), "step(): ", largest, " trainable parameters got no gradient on another rank, which names ",
          "them, and zero_optimization.ignore_unused_parameters is false");
  std::string names;
  for (const int64_t index : missing) {
    names += cat(names.empty() ? "" : ", ", parameters[static_cast<size_t>(index)].name);
  }
  throw UsageError(cat("step(): ", missing.size(), " of ", parameters.size(), " trainable parameters got no gradient: ",
                       names, ". Use them in forward, freeze them with set_requires_grad(false), or set ",
                       "zero_optimization.ignore_unused_parameters to true"));
}

void Engine::Impl::apply(double gradient_scale) {
  if (client_optimizer) {
    for (size_t b = 0; b < buckets.size(); ++b) {
      const at::Tensor gradient = reducer->gradient(b);
      if (gradient_scale != 1.0) gradient.mul_(gradient_scale);
      if (plan.clip_value > 0) gradient.clamp_(-plan.clip_value, plan.clip_value);
      // Also for parameters that this rank, or its last backward, did not use: all ranks update alike.
      for (const Segment& segment : buckets[b].layout().segments) {
        const at::Tensor& parameter = parameters[static_cast<size_t>(segment.parameter)].tensor;
        parameter.mutable_grad() = zero::view_of(gradient, segment, parameter);
      }
    }
    half_stepped = true;
    client_optimizer->step();
    return;
  }
  // The sum over ranks of what compressed exchanges take the mean of.
  if (reducer->keeps_local() && !plan.average_gradients) gradient_scale *= groups.shards->size();
  const bool speculated = speculation_fits(gradient_scale);
  if (!speculated) optimizer->begin_step();
  const auto clip_values = [this, gradient_scale](const at::Tensor& gradient) {
    clip_by_value(gradient, gradient_scale);
  };
  const auto update_bucket = [&](size_t b) {
    const at::Tensor gradient = reducer->gradient(b);
    clip_values(gradient);
    update_slice(b, gradient, gradient_scale);
    access->updated(b);
  };
  for (size_t b = 0; b < buckets.size(); ++b) {
    if (!offloaded || !offloaded->updates(b)) update_bucket(b);
  }
  if (offloaded && delays_update()) {
    offloaded->start_update(*optimizer, gradient_scale, clip_values);
  } else if (offloaded && !(speculated && publish_speculation())) {
    offloaded->for_each(update_bucket);
  }
  access->end_update();
}

void Engine::Impl::clip_by_value(const at::Tensor& gradient, double gradient_scale) const {
  if (plan.clip_value <= 0) return;
  // With the loss scale still in it: without it small values may be lost to float16.
  const double bound = plan.clip_value / gradient_scale;
  constexpr double kLargestHalf = 65504.0;
  if (gradient.scalar_type() != at::kHalf || bound < kLargestHalf) gradient.clamp_(-bound, bound);
}

void Engine::Impl::publish(size_t b, const at::Tensor& weights) {
  const zero::ParameterBucket& bucket = buckets[b];
  half_stepped = true;
  bucket.use_slice(/*changes=*/true, [&] { at::Tensor(bucket.slice(groups.shards->rank())).copy_(weights); });
  access->updated(b);
}

bool Engine::Impl::delays_update() const {
  return plan.offload.delayed && offloaded->gradients() && optimizer->step_count() >= plan.delayed_update_start;
}

// Publishes what the update of the last step has made.
void Engine::Impl::finish_delayed_update() {
  if (!offloaded || !offloaded->update_runs()) return;
  const at::NoGradGuard no_grad;
  access->wait_all();
  offloaded->finish_update([&](size_t b, const at::Tensor& weights) { publish(b, weights); });
  at::autocast::clear_cache();  // copies of the weights before
  access->end_update();
  half_stepped = false;
}

// The optimizer's step on this rank's part of a bucket, and what operators will read of it.
void Engine::Impl::update_slice(size_t b, const at::Tensor& gradient, double gradient_scale) {
  const zero::ParameterBucket& bucket = buckets[b];
  const at::Tensor own = plan.partition_optimizer ? bucket.slice(groups.shards->rank()) : bucket.flat();
  if (own.is_alias_of(masters[b])) {
    bucket.use_slice(/*changes=*/true, [&] { optimizer->update(static_cast<int64_t>(b), gradient, gradient_scale); });
    half_stepped = true;
    return;
  }
  bucket.use_slice(/*changes=*/true, [&] {
    if (offloaded && offloaded->updates(b)) {
      offloaded->update(*optimizer, b, gradient, gradient_scale, own);
    } else {
      optimizer->update_into(static_cast<int64_t>(b), gradient, gradient_scale, own);
    }
    half_stepped = true;
  });
}

}  // namespace ds::engine
