// The parts of a LAMB step on a slice (see optim/lamb.h), for optimizers that follow LAMB for a while.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "optim/shard_optimizer.h"

namespace ds::optimizers {

struct LambRule {
  bool bias_correction = true;
  bool eps_inside_sqrt = false;
  double max_coeff = 10.0;
  double min_coeff = 0.01;
};

// Throws ConfigError when min_coeff is above max_coeff or not positive.
void require_lamb_rule(const LambRule& rule);

struct LambState {
  at::Tensor exp_avg, exp_avg_sq;
  std::vector<int64_t> parameters;  // the bucket's parameters in order, by their index in Slice::parameters
  std::vector<int64_t> position;    // for each segment, its parameter's index in `parameters`
};

// Throws UsageError naming `optimizer` when the bucket does not hold the whole of a parameter.
LambState make_lamb_state(const Slice& slice, at::Tensor exp_avg, at::Tensor exp_avg_sq, const char* optimizer);

// Elements of a flat tensor that belong to a segment.
at::Tensor segment_part(const at::Tensor& flat, const Segment& segment);
// The sum of the squares of a tensor, a float64 scalar.
at::Tensor sum_of_squares(const at::Tensor& values);

// sqrt(variance) + eps, or sqrt(variance + eps). New memory.
at::Tensor lamb_divisor(const LambRule& rule, const GroupOptions& group, const at::Tensor& variance);

// Moves the running means by the mean gradient, and returns [2, parameters of the bucket], float64: sums of squares of
// w and of u, over all ranks. Collective over the slice's exchange. `gradient` may be overwritten.
at::Tensor advance_lamb(const Slice& slice, const LambState& state, const LambRule& rule, const GroupOptions& group,
                        const at::Tensor& gradient, double gradient_scale);
// One trust coefficient per parameter of the bucket, float64.
at::Tensor lamb_coefficients(const LambRule& rule, const at::Tensor& squares);
// w -= step_size coefficient u
void apply_lamb(const Slice& slice, const LambState& state, const LambRule& rule, const GroupOptions& group,
                const at::Tensor& coefficients, double step_size);
// lr with the bias correction of means that were updated so many times.
double lamb_step_size(const LambRule& rule, const GroupOptions& group, int64_t average_updates,
                      int64_t variance_updates);

}  // namespace ds::optimizers
