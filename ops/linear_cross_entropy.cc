#include "dsengine/ops.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/Reduction.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_log_softmax.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/result_type.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>

#include "core/check.h"
#include "core/split/split_tensor.h"
#include "ops/recorded_operator.h"
#include "ops/vector_types.h"

namespace ds::ops {
namespace {

// The operands that the loss and its gradients are made of.
struct ChunkedLossInput {
  at::Tensor hidden;                 // [N, H]
  at::Tensor weight;                 // [V, H]
  at::Tensor bias;                   // [V] or undefined
  at::Tensor targets;                // int64 [N]
  at::ScalarType type = at::kFloat;  // of the products: hidden, weight and bias are cast to it
  LinearCrossEntropyOptions options;
};

struct WantedGradients {
  bool hidden = false;
  bool weight = false;
  bool bias = false;
  bool any() const { return hidden || weight || bias; }
};

// Gradients are those of the sum of the losses of rows by the logits before their scale: they are to be multiplied by
// logit_scale and, for the mean, divided by the number of targets. So they are of the size of a probability times a
// weight, whatever N and the loss scale are, and fit into float16.
struct ChunkedLoss {
  at::Tensor total;            // [] sum over rows, in wide_type()
  at::Tensor counted;          // [] int64: targets that are not ignored
  at::Tensor hidden_gradient;  // [N, H] in `type`; undefined where not wanted, as the next two
  at::Tensor weight_gradient;  // [V, H] in wide_type(); bfloat16 where one chunk made it
  at::Tensor bias_gradient;    // [V] in wide_type()
};

constexpr int64_t kFewestRows = 128;  // fewer make products of matrices slow
constexpr int64_t kHostLogits = int64_t{1} << 23;
constexpr int64_t kHostNarrowLogits = int64_t{1} << 24;  // of 16 bits: adding up weight gradients takes a larger share
constexpr int64_t kDeviceLogits = int64_t{1} << 27;

int64_t rows_of_a_chunk(const ChunkedLossInput& input) {
  const int64_t rows = std::max<int64_t>(input.hidden.size(0), 1);
  if (input.options.chunk_rows > 0) return std::min(rows, input.options.chunk_rows);
  const bool narrow = input.type != wide_type(input.type);
  const int64_t logits = !input.hidden.is_cpu() ? kDeviceLogits : narrow ? kHostNarrowLogits : kHostLogits;
  const int64_t most = std::max(kFewestRows, logits / std::max<int64_t>(input.weight.size(0), 1));
  // Equal chunks: a short last one would be as slow as few rows are.
  const int64_t chunks = (rows + most - 1) / most;
  return (rows + chunks - 1) / chunks;
}

// The buffers of one chunk are those of all.
class Chunks {
 public:
  Chunks(const ChunkedLossInput& input, const WantedGradients& wanted)
      : options_(input.options),
        wanted_(wanted),
        type_(input.type),
        wide_(wide_type(input.type)),
        hidden_(input.hidden),
        weight_(input.weight.to(input.type)),
        targets_(input.targets),
        classes_(input.weight.size(0)),
        rows_(rows_of_a_chunk(input)) {
    if (input.bias.defined()) bias_ = input.bias.to(input.type);
    const at::TensorOptions wide = hidden_.options().dtype(wide_);
    logits_ = at::empty({rows_, classes_}, wide);
    log_shares_ = at::empty({rows_, classes_}, wide);
    if (type_ != wide_) narrow_ = at::empty({rows_, classes_}, wide.dtype(type_));
    ignored_ = targets_.eq(options_.ignore_index);
    safe_targets_ = targets_.masked_fill(ignored_, 0);
    result_.total = at::zeros({}, wide);
    result_.counted = targets_.ne(options_.ignore_index).sum();
    if (wanted.hidden) result_.hidden_gradient = at::empty(hidden_.sizes(), wide.dtype(type_));
    if (wanted.weight && hidden_.size(0) == 0) result_.weight_gradient = at::zeros(weight_.sizes(), wide);
    if (wanted.bias) result_.bias_gradient = at::zeros({classes_}, wide);
  }

  ChunkedLoss run() {
    for (int64_t begin = 0; begin < hidden_.size(0); begin += rows_) {
      chunk(begin, std::min(rows_, hidden_.size(0) - begin));
    }
    return std::move(result_);
  }

 private:
  void chunk(int64_t begin, int64_t rows) {
    const at::Tensor x = hidden_.narrow(0, begin, rows).to(type_);
    const at::Tensor target = safe_targets_.narrow(0, begin, rows).unsqueeze(1);
    const at::Tensor ignored = ignored_.narrow(0, begin, rows);
    const at::Tensor logits = make_logits(x, rows);
    at::Tensor log_shares = log_shares_.narrow(0, 0, rows);
    at::_log_softmax_out(log_shares, options_.logit_softcap ? logits.mul(*options_.logit_softcap) : logits, 1,
                         /*half_to_float=*/false);
    result_.total.add_(losses(log_shares, target).masked_fill_(ignored, 0).sum());
    if (!wanted_.any()) return;
    const at::Tensor gradient = logit_gradient(logits, log_shares.exp_(), target, ignored);
    add_gradients(begin, x, gradient);
  }

  // Scaled and, with a cap c, as tanh(logits / c): what the cap's derivative is made of.
  at::Tensor make_logits(const at::Tensor& x, int64_t rows) {
    at::Tensor logits = logits_.narrow(0, 0, rows);
    at::Tensor product = narrow_.defined() ? narrow_.narrow(0, 0, rows) : logits;
    if (bias_.defined()) {
      at::addmm_out(product, bias_, x, weight_.t());
    } else {
      at::mm_out(product, x, weight_.t());
    }
    if (narrow_.defined()) logits.copy_(product);
    if (options_.logit_scale != 1.0) logits.mul_(options_.logit_scale);
    if (options_.logit_softcap) logits.div_(*options_.logit_softcap).tanh_();
    return logits;
  }

  at::Tensor losses(const at::Tensor& log_shares, const at::Tensor& target) const {
    const double smoothing = options_.label_smoothing;
    at::Tensor result = log_shares.gather(1, target).squeeze(1).mul_(smoothing - 1.0);
    if (smoothing != 0.0) result.sub_(log_shares.sum(1), smoothing / static_cast<double>(classes_));
    return result;
  }

  // Softmax minus the target's distribution, in the memory of `shares`.
  at::Tensor logit_gradient(const at::Tensor& logits, const at::Tensor& shares, const at::Tensor& target,
                            const at::Tensor& ignored) const {
    const double smoothing = options_.label_smoothing;
    shares.scatter_add_(1, target, at::full(target.sizes(), smoothing - 1.0, shares.options()));
    if (smoothing != 0.0) shares.sub_(smoothing / static_cast<double>(classes_));
    shares.masked_fill_(ignored.unsqueeze(1), 0);
    if (options_.logit_softcap) shares.mul_(logits.square_().neg_().add_(1.0));
    return shares;
  }

  void add_gradients(int64_t begin, const at::Tensor& x, const at::Tensor& gradient) {
    if (wanted_.bias) result_.bias_gradient.add_(gradient.sum(0));
    if (!wanted_.hidden && !wanted_.weight) return;
    at::Tensor factor = gradient;
    if (narrow_.defined()) factor = narrow_.narrow(0, 0, x.size(0)).copy_(gradient);
    if (wanted_.hidden) {
      at::Tensor rows = result_.hidden_gradient.narrow(0, begin, x.size(0));
      at::mm_out(rows, factor, weight_);
    }
    if (wanted_.weight) add_weight_gradient(x, factor, gradient);
  }

  void add_weight_gradient(const at::Tensor& x, const at::Tensor& factor, const at::Tensor& gradient) {
    at::Tensor& sum = result_.weight_gradient;
    const bool first = !sum.defined();
    if (type_ != at::kBFloat16) {  // also of float16, whose range sums over rows may leave
      const at::Tensor wide_x = x.to(wide_);
      first ? void(sum = at::mm(gradient.t(), wide_x)) : void(sum.addmm_(gradient.t(), wide_x));
      return;
    }
    // A chunk's own sum is made in float32 and rounded once; sums of chunks are kept in float32.
    if (x.size(0) == hidden_.size(0)) {
      sum = at::mm(factor.t(), x);
      return;
    }
    if (first) product_ = at::empty(weight_.sizes(), weight_.options());
    at::mm_out(product_, factor.t(), x);
    first ? void(sum = product_.to(wide_)) : void(sum.add_(product_));
  }

  const LinearCrossEntropyOptions& options_;
  const WantedGradients wanted_;
  at::ScalarType type_, wide_;
  at::Tensor hidden_, weight_, bias_, targets_;
  int64_t classes_, rows_;
  at::Tensor logits_, log_shares_;  // [rows_, V] in wide_
  at::Tensor narrow_;               // [rows_, V] in type_; undefined where that is wide_
  at::Tensor product_;              // [V, H]
  at::Tensor ignored_, safe_targets_;
  ChunkedLoss result_;
};

// Computes the loss in chunks of rows, with gradients off (at::NoGradGuard or inside of a Function's forward). It is
// one operator, whatever the number of rows: ranks have different ones, and at stage 3 each use counts.
ChunkedLoss chunked_loss(const ChunkedLossInput& input, const WantedGradients& wanted) {
  const RecordedOperator recorded("dsengine::linear_cross_entropy", {input.hidden, input.weight, input.bias});
  return Chunks(input, wanted).run();
}

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
