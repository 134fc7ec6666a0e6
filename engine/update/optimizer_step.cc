#include "engine/update/optimizer_step.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/scalar_tensor.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "core/check.h"
#include "core/log.h"
#include "engine/agreement/shared_failure.h"
#include "engine/report/non_finite_report.h"
#include "zero/gradient_norm.h"

namespace ds::engine {
namespace {

constexpr double kClipEpsilon = 1e-6;

}  // namespace

void OptimizerStep::run() {
  const at::NoGradGuard no_grad;
  const Plan& plan = parts_.state.plan;
  parts_.saving.wait_copied();
  // What was gathered ahead and is not used reads slices, and holds the memory they are read into.
  parts_.state.access->wait_all();
  parts_.update.settle(Update::Next::kStep);
  parts_.state.gradients.reducer->finish();
  reduce_tied();
  parts_.reporter.reductions_end();
  if (plan.require_all_gradients) require_gradients();
  const double scale = parts_.accumulation.loss_scale();
  const double norm = plan.compute_grad_norm ? global_norm() / scale : 0.0;
  const bool overflow = !std::isfinite(norm);
  const bool drops = overflow && plan.non_finite != config::NonFiniteGradients::kContinue;
  parts_.progress.gradient_norm.reset();
  if (plan.compute_grad_norm) {
    parts_.progress.gradient_norm = drops ? std::numeric_limits<double>::infinity() : norm;
  }
  if (drops) parts_.update.settle(Update::Next::kDrop);
  const std::string report = judge(norm);
  if (!drops) apply(norm, scale);
  note_peaks();
  parts_.accumulation.drop();
  parts_.state.choose_gradients();
  parts_.update.step_over();
  require<NonFiniteError>(!drops || plan.non_finite != config::NonFiniteGradients::kError, report);
  if (parts_.loss_scaler) parts_.loss_scaler->update(overflow);  // last: throws when the scale cannot fall any further
}

void OptimizerStep::apply(double norm, double loss_scale) {
  double clip = 1.0;
  // As torch.nn.utils.clip_grad_norm_: min(1, max_norm / (norm + 1e-6)).
  const double limit = parts_.state.plan.clip_norm;
  if (limit > 0) clip = std::min(1.0, limit / (norm + kClipEpsilon));
  parts_.update.apply(clip / loss_scale);
  parts_.order.update_done();
  parts_.progress.step_applied = true;
}

void OptimizerStep::note_peaks() {
  const ModelState& state = parts_.state;
  parts_.progress.gradient_bytes = state.gradients.reducer->take_peak_bytes();
  if (!state.gatherer) return;
  const int64_t element = state.buckets.front().flat().element_size();
  parts_.progress.gathered_bytes = state.gatherer->take_peak_elements() * element;
}

// Of a norm that is not finite: what all ranks then know of it; all but an error is logged.
std::string OptimizerStep::judge(double norm) {
  if (std::isfinite(norm)) {
    bad_steps_in_a_row_ = 0;
    return {};
  }
  const ModelState& state = parts_.state;
  const bool applied = state.plan.non_finite == config::NonFiniteGradients::kContinue;
  // Weights that have become NaN make every later step one of these.
  const auto row = static_cast<uint64_t>(++bad_steps_in_a_row_);
  if (applied && !std::has_single_bit(row)) return {};
  NonFiniteStep step{
      .number = parts_.progress.global_steps, .norm = norm, .judged_by_default = parts_.judged_by_default};
  if (parts_.loss_scaler) {
    step.loss_scale = parts_.loss_scaler->scale();
    step.dynamic_scale = parts_.loss_scaler->dynamic();
  }
  const std::string report = explain_non_finite(state, parts_.batches, step);
  if (state.plan.non_finite == config::NonFiniteGradients::kError || state.ranks.world->rank() != 0) return report;
  log::warning(report, applied && row > 1 ? cat(" (", row, " steps in a row)") : std::string());
  return report;
}

// Weights that several stages use have the gradients of all of them. Each rank has the same slice of them. In the order
// of the list, which all stages have: that of the buckets is another one where a stage uses them in another order.
void OptimizerStep::reduce_tied() const {
  const ModelState& state = parts_.state;
  if (!state.pipeline) return;
  const PipelineParts& pipeline = *state.pipeline;
  for (size_t k = 0; k < pipeline.tied.size(); ++k) {
    for (size_t b = 0; b < state.buckets.size(); ++b) {
      if (pipeline.tied_of_bucket[b] != static_cast<int>(k)) continue;
      const at::Tensor gradient = state.gradients.reducer->gradient(b);
      const at::Tensor wire = gradient.to(state.ranks.device);
      pipeline.tied[k].ranks->all_reduce(wire, comm::ReduceOp::kSum, "tied gradients").wait();
      if (!wire.is_same(gradient)) at::Tensor(gradient).copy_(wire);
    }
  }
}

void OptimizerStep::add_over_ranks(double& squares, comm::Communicator& ranks) const {
  if (ranks.size() == 1) return;
  const auto options = at::TensorOptions().dtype(at::kDouble).device(parts_.state.ranks.device);
  at::Tensor total = at::scalar_tensor(squares, options).view({1});
  ranks.all_reduce(total, comm::ReduceOp::kSum, "gradient norm").wait();
  squares = total.item<double>();
}

double OptimizerStep::global_norm() const {
  const ModelState& state = parts_.state;
  zero::SquareSum sum;
  for (size_t b = 0; b < state.buckets.size(); ++b) {
    if (state.counts(b)) sum.add(state.gradients.reducer->gradient(b));
  }
  double squares = sum.total();
  const bool local = state.gradients.reducer->keeps_local();
  comm::Communicator& shards = *state.ranks.groups.shards;
  if ((state.plan.partition_optimizer || local) && shards.size() > 1) {
    add_over_ranks(squares, shards);
    // Nobody has the mean of local gradients. Its norm is at most the root mean square of theirs, which clips all ranks
    // by one factor.
    if (local) squares *= state.plan.average_gradients ? 1.0 / shards.size() : shards.size();
  }
  if (state.pipeline) add_over_ranks(squares, *state.pipeline->ranks);
  // Sums over other buckets or slices differ in the last bits of a double; none of them reaches the update.
  return static_cast<float>(std::sqrt(squares));
}

// zero_optimization.ignore_unused_parameters: false. All ranks throw when one has to.
void OptimizerStep::require_gradients() {
  const ModelState& state = parts_.state;
  const std::vector<int64_t> missing = state.gradients.reducer->parameters_without_gradient();
  const int64_t largest = largest_of_ranks(static_cast<int64_t>(missing.size()), state.ranks.device, *state.ranks.world,
                                           "unused parameters");
  if (largest == 0) return;
  parts_.accumulation.drop();
  require(!missing.empty(), "step(): ", largest, " trainable parameters got no gradient on another rank, which names ",
          "them, and zero_optimization.ignore_unused_parameters is false");
  std::string names;
  for (const int64_t index : missing) {
    names += cat(names.empty() ? "" : ", ", state.parameters[static_cast<size_t>(index)].name);
  }
  throw UsageError(cat("step(): ", missing.size(), " of ", state.parameters.size(),
                       " trainable parameters got no gradient: ", names,
                       ". Use them in forward, freeze them with set_requires_grad(false), or set ",
                       "zero_optimization.ignore_unused_parameters to true"));
}

}  // namespace ds::engine
