// Clipping by a global norm: the one rule that turns the L2 (or any other) norm of all gradients and the largest norm
// allowed into the factor that gradients are multiplied by, min(1, max_norm / (norm + 1e-6)), as
// torch::nn::utils::clip_grad_norm_ does.
//
// A norm that is not finite. An infinite norm gives the factor 0 everywhere. For a norm that is NaN there are two
// answers: the engine clips nothing, because what happens to such a step is decided by `non_finite_gradients` (the
// first two functions); wrappers and split modules do what torch does, so that every gradient becomes NaN
// (clip_to_norm()).
#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <vector>

namespace ds::optimizers {

// The factor of an engine's step. Limits apply one after the other, each to the norm that those before it have left; a
// limit of 0 clips nothing.
double clip_factor(double norm, std::initializer_list<double> max_norms);

// The factor of an engine's step whose norm, float64 [1], only the device knows: float32 [1] there, undefined where all
// limits are 0. Nobody waits for the device.
at::Tensor clip_factor(const at::Tensor& norm, std::initializer_list<double> max_norms);

// Multiplies the gradients of `parameters`, whose joint norm is `norm`, so that it is at most `max_norm`. Parameters
// without a gradient are left out.
void clip_to_norm(const std::vector<at::Tensor>& parameters, double norm, double max_norm);

}  // namespace ds::optimizers
