#include <ATen/autocast_mode.h>
#include <ATen/core/Reduction.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/result_type.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "core/check.h"
#include "core/split/split_tensor.h"
#include "dsengine/ops.h"
#include "ops/chunked_loss.h"

namespace ds::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kLoss = "linear_cross_entropy: ";

void check_shapes(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& bias,
                  const at::Tensor& targets) {
  require(hidden.defined() && weight.defined() && targets.defined(), kLoss,
          "expected hidden, weight and targets, found an undefined tensor");
  require(hidden.dim() >= 1 && weight.dim() == 2 && hidden.size(-1) == weight.size(1), kLoss,
          "expected hidden of [..., H] and weight of [V, H], found ", hidden.sizes(), " and ", weight.sizes());
  require(weight.size(0) > 0 && weight.size(1) > 0, kLoss,
          "expected weight of [V, H] with V > 0 classes and H > 0, found ", weight.sizes());
  require(!bias.defined() || (bias.dim() == 1 && bias.size(0) == weight.size(0)), kLoss, "expected a bias of [",
          weight.size(0), "], one element for each row of weight, found ", lazy([&] { return cat(bias.sizes()); }));
  require(targets.scalar_type() == at::kLong, kLoss, "expected targets of int64, found ", targets.scalar_type(),
          "; convert them with targets.to(at::kLong). Class probabilities are cross_entropy_loss's");
  require(targets.sizes() == hidden.sizes().slice(0, hidden.dim() - 1), kLoss,
          "expected targets of the shape of hidden without its last dimension, found ", targets.sizes(), " beside ",
          hidden.sizes());
}

void check_types(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& targets,
                 bool autocast) {
  require(is_floating(hidden.scalar_type()), kLoss, "expected hidden of float32, float64, bfloat16 or float16, found ",
          hidden.scalar_type());
  for (const at::Tensor* other : {&weight, &bias}) {
    require(!other->defined() || other->scalar_type() == hidden.scalar_type() ||
                (autocast && is_floating(other->scalar_type()) && other->scalar_type() != at::kDouble),
            kLoss, "expected weight and bias of hidden's dtype ", hidden.scalar_type(), ", found ",
            lazy([&] { return cat(other->scalar_type()); }), "; cast one of them, or use autocast");
  }
  for (const at::Tensor* other : {&weight, &bias, &targets}) {
    require(!other->defined() || other->device() == hidden.device(), kLoss, "expected all tensors on hidden's device ",
            hidden.device(), ", found one on ", lazy([&] { return cat(other->device()); }));
  }
}

void check_options(const LinearCrossEntropyOptions& options) {
  require(options.label_smoothing >= 0.0 && options.label_smoothing <= 1.0, kLoss,
          "expected label_smoothing in [0, 1], found ", options.label_smoothing);
  require(std::isfinite(options.logit_scale), kLoss, "expected a finite logit_scale, found ", options.logit_scale);
  const double softcap = options.logit_softcap.value_or(1.0);
  require(std::isfinite(softcap) && softcap > 0.0, kLoss, "expected a finite logit_softcap > 0, found ", softcap,
          "; leave it out for logits without a cap");
  require(options.chunk_rows >= 0, kLoss, "expected chunk_rows >= 0, found ", options.chunk_rows);
}

// On other devices the host would have to wait for the answer.
void check_targets(const at::Tensor& targets, int64_t classes, int64_t ignore_index) {
  if (!targets.is_cpu() || targets.numel() == 0) return;
  const at::Tensor wrong = targets.lt(0).logical_or_(targets.ge(classes)).logical_and_(targets.ne(ignore_index));
  if (!wrong.any().item<bool>()) return;
  const auto position = wrong.to(at::kByte).argmax().item<int64_t>();
  throw UsageError(cat(kLoss, "expected targets in [0, ", classes, ") or ignore_index ", ignore_index, ", found ",
                       targets[position].item<int64_t>(), " at position ", position, " of ", targets.numel()));
}

// The product of `gradient` and a scalar in `factor`, in `type`. Where nobody asks for it again, in its own memory.
at::Tensor scaled(const at::Tensor& gradient, const at::Tensor& factor, at::ScalarType type, bool once) {
  if (!gradient.defined()) return {};
  if (gradient.scalar_type() != factor.scalar_type()) return gradient.to(factor.scalar_type()).mul_(factor).to(type);
  return (once ? gradient.mul_(factor) : gradient.mul(factor)).to(type);
}

struct LinearCrossEntropy : torch::autograd::Function<LinearCrossEntropy> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& hidden, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias, const ChunkedLossInput& input,
                            const WantedGradients& wanted) {
    const ChunkedLoss loss = chunked_loss(input, wanted);
    context->save_for_backward({loss.hidden_gradient, loss.weight_gradient, loss.bias_gradient, loss.counted});
    const LinearCrossEntropyOptions& options = input.options;
    context->saved_data["scale"] = options.logit_scale;
    context->saved_data["mean"] = options.reduction == LossReduction::kMean;
    context->saved_data["hidden"] = hidden.scalar_type();
    context->saved_data["weight"] = weight.scalar_type();
    context->saved_data["bias"] = bias ? bias->scalar_type() : weight.scalar_type();
    return reduced(loss, options);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    require(!at::GradMode::is_enabled(), kLoss,
            "expected a backward pass without create_graph: its gradients are made ",
            "in forward and have no derivative. Use at::linear and at::cross_entropy_loss for second derivatives");
    const variable_list saved = context->get_saved_variables();
    at::Tensor factor =
        gradients[0].to(wide_type(gradients[0].scalar_type())) * context->saved_data["scale"].toDouble();
    // The gradients of no targets are 0, not NaN.
    if (context->saved_data["mean"].toBool()) factor = factor.div_(saved[3].clamp_min(1));
    const bool once = !torch::autograd::get_current_graph_task_keep_graph();
    const auto gradient_of = [&](size_t input, const char* type) {
      const at::Tensor& gradient = saved[input];
      const bool asked = gradient.defined() && context->needs_input_grad(input);
      return asked ? scaled(gradient, factor, context->saved_data[type].toScalarType(), once) : at::Tensor();
    };
    return {gradient_of(0, "hidden"), gradient_of(1, "weight"), gradient_of(2, "bias"), {}, {}};
  }

  static at::Tensor reduced(const ChunkedLoss& loss, const LinearCrossEntropyOptions& options) {
    return options.reduction == LossReduction::kMean ? loss.total / loss.counted : loss.total;
  }
};

bool any_split(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& targets) {
  return is_split(hidden) || is_split(weight) || is_split(bias) || is_split(targets);
}

// The pair of operators, for tensors that are split over ranks: with a vocabulary that is cut, each rank has its part
// of the logits, and the loss is Megatron-LM's. Chunks would join the weight.
at::Tensor loss_of_pair(const at::Tensor& rows, const at::Tensor& weight, const at::Tensor& bias,
                        const at::Tensor& targets, const LinearCrossEntropyOptions& options) {
  const at::Tensor product = at::linear(rows, weight, bias.defined() ? std::optional<at::Tensor>(bias) : std::nullopt);
  at::Tensor logits = product.to(wide_type(product.scalar_type()));
  if (options.logit_scale != 1.0) logits = logits * options.logit_scale;
  if (options.logit_softcap) logits = (logits / *options.logit_softcap).tanh() * *options.logit_softcap;
  return at::cross_entropy_loss(logits, targets, {},
                                options.reduction == LossReduction::kMean ? at::Reduction::Mean : at::Reduction::Sum,
                                options.ignore_index, options.label_smoothing);
}

}  // namespace

at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& bias,
                                const at::Tensor& targets, const LinearCrossEntropyOptions& options) {
  check_options(options);
  check_shapes(hidden, weight, bias, targets);
  const c10::DeviceType device = hidden.device().type();
  const bool autocast = at::autocast::is_autocast_available(device) && at::autocast::is_autocast_enabled(device) &&
                        hidden.scalar_type() != at::kDouble;
  check_types(hidden, weight, bias, targets, autocast);
  const at::Tensor flat_targets = targets.reshape({-1});
  check_targets(flat_targets, weight.size(0), options.ignore_index);
  const at::Tensor rows = hidden.reshape({-1, hidden.size(-1)});
  if (any_split(hidden, weight, bias, targets)) return loss_of_pair(rows, weight, bias, flat_targets, options);

  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  ChunkedLossInput input{.hidden = rows,
                         .weight = weight,
                         .bias = bias,
                         .targets = flat_targets,
                         .type = autocast ? at::autocast::get_autocast_dtype(device) : hidden.scalar_type(),
                         .options = options};
  const bool graph = at::GradMode::is_enabled();
  const WantedGradients wanted{.hidden = graph && rows.requires_grad(),
                               .weight = graph && weight.requires_grad(),
                               .bias = graph && bias.defined() && bias.requires_grad()};
  if (!wanted.any()) {
    const at::NoGradGuard no_grad;
    return LinearCrossEntropy::reduced(chunked_loss(input, {}), options);
  }
  const std::optional<at::Tensor> given_bias = bias.defined() ? std::optional(bias) : std::nullopt;
  return LinearCrossEntropy::apply(rows, weight, given_bias, input, wanted);
}

}  // namespace ds::ops
