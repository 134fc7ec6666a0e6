#include "optim/lamb_rule.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <utility>

#include "core/check.h"
#include "optim/bucket_parameters.h"
#include "optim/chunked_update.h"
#include "optim/rounded_sqrt.h"

namespace ds::optimizers {
namespace {

// u of some elements, from their weights and both means.
at::Tensor lamb_direction(const LambRule& rule, const GroupOptions& group, const at::Tensor& master,
                          const std::vector<at::Tensor>& means) {
  at::Tensor result = means[0].div(lamb_divisor(rule, group, means[1]));
  if (group.weight_decay != 0.0) result.add_(master * group.weight_decay);
  return result;
}

std::vector<at::Tensor> means_of(const LambState& state, const Segment& segment) {
  return {segment_part(state.exp_avg, segment), segment_part(state.exp_avg_sq, segment)};
}

}  // namespace

void require_lamb_rule(const LambRule& rule) {
  require<ConfigError>(rule.min_coeff > 0 && rule.min_coeff <= rule.max_coeff,
                       "optimizer.params.min_coeff: expected above 0 and at most max_coeff (", rule.max_coeff,
                       "), found ", rule.min_coeff);
}

LambState make_lamb_state(const Slice& slice, at::Tensor exp_avg, at::Tensor exp_avg_sq, const char* optimizer) {
  LambState state{.exp_avg = std::move(exp_avg), .exp_avg_sq = std::move(exp_avg_sq), .parameters = {}, .position = {}};
  for (const BucketParameter& whole : bucket_parameters(slice, optimizer)) state.parameters.push_back(whole.parameter);
  for (const Segment& segment : slice.segments) {
    for (size_t i = 0; i < state.parameters.size(); ++i) {
      if (state.parameters[i] == segment.parameter) state.position.push_back(static_cast<int64_t>(i));
    }
  }
  require(state.position.size() == slice.segments.size(), optimizer,
          ": expected the parameters of a slice among its bucket's");
  return state;
}

at::Tensor segment_part(const at::Tensor& flat, const Segment& segment) {
  return flat.narrow(0, segment.slice_offset, segment.length);
}

at::Tensor sum_of_squares(const at::Tensor& values) {
  return at::linalg_vector_norm(values, 2, at::OptionalIntArrayRef(), /*keepdim=*/false, at::kDouble).square_();
}

at::Tensor lamb_divisor(const LambRule& rule, const GroupOptions& group, const at::Tensor& variance) {
  return rule.eps_inside_sqrt ? rounded_sqrt(variance.add(group.eps)) : rounded_sqrt(variance).add_(group.eps);
}

at::Tensor advance_lamb(const Slice& slice, const LambState& state, const LambRule& rule, const GroupOptions& group,
                        const at::Tensor& gradient, double gradient_scale) {
  const at::Tensor squares = at::zeros({2, static_cast<int64_t>(state.parameters.size())},
                                       slice.master.options().dtype(at::kDouble).requires_grad(false));
  for (size_t i = 0; i < slice.segments.size(); ++i) {
    const Segment& segment = slice.segments[i];
    for_each_chunk(segment_part(slice.master, segment), means_of(state, segment), segment_part(gradient, segment),
                   KernelMemory::kTemporaries,
                   [&](const at::Tensor& m, const at::Tensor& g, const std::vector<at::Tensor>& means) {
                     if (gradient_scale != 1.0) g.mul_(gradient_scale);
                     means[0].mul_(group.beta1).add_(g, 1 - group.beta1);
                     means[1].mul_(group.beta2).addcmul_(g, g, 1 - group.beta2);
                     squares[0][state.position[i]].add_(sum_of_squares(m));
                     squares[1][state.position[i]].add_(sum_of_squares(lamb_direction(rule, group, m, means)));
                   });
  }
  slice.exchange->sum(squares);
  return squares;
}

at::Tensor lamb_coefficients(const LambRule& rule, const at::Tensor& squares) {
  const at::Tensor weight = squares[0].sqrt();
  const at::Tensor step = squares[1].sqrt();
  const at::Tensor ratio = (weight / step).clamp_(rule.min_coeff, rule.max_coeff);
  return at::where((weight != 0).logical_and_(step != 0), ratio, at::ones_like(ratio));
}

void apply_lamb(const Slice& slice, const LambState& state, const LambRule& rule, const GroupOptions& group,
                const at::Tensor& coefficients, double step_size) {
  for (size_t i = 0; i < slice.segments.size(); ++i) {
    const Segment& segment = slice.segments[i];
    const at::Tensor factor = coefficients.select(0, state.position[i]) * step_size;
    const std::vector<at::Tensor> means = means_of(state, segment);
    for_each_chunk(segment_part(slice.master, segment), means, means[0], KernelMemory::kTemporaries,
                   [&](const at::Tensor& m, const at::Tensor& /*average*/, const std::vector<at::Tensor>& own) {
                     m.sub_(lamb_direction(rule, group, m, own).mul_(factor));
                   });
  }
}

double lamb_step_size(const LambRule& rule, const GroupOptions& group, int64_t average_updates,
                      int64_t variance_updates) {
  if (!rule.bias_correction) return group.lr;
  return group.lr * std::sqrt(1 - std::pow(group.beta2, static_cast<double>(variance_updates))) /
         (1 - std::pow(group.beta1, static_cast<double>(average_updates)));
}

}  // namespace ds::optimizers
