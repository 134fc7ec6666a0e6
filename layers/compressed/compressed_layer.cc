#include "layers/compressed/compressed_layer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "core/check.h"
#include "core/random_streams.h"
#include "core/replay/recomputation.h"
#include "layers/compressed/quantizers.h"
#include "layers/compressed/snip_momentum.h"

namespace ds::model_compression {
namespace {

constexpr const char* kBlockScores = "sparse_pruning_scores";
constexpr double kRangeMomentum = 0.95;  // DeepSpeed's act_range_momentum

struct MaskNames {
  const char* scores;
  const char* mask;
};
MaskNames names_of(Method method) {
  switch (method) {
    case Method::kSparsePruning:
      return {"sparse_mask_scores", "sparse_pruning_mask"};
    case Method::kRowPruning:
      return {"row_mask_scores", "row_pruning_mask"};
    case Method::kHeadPruning:
      return {"head_pruning_scores", "head_pruning_mask"};
    default:
      return {"channel_mask_scores", "channel_pruning_mask"};
  }
}

std::vector<int64_t> mask_shape(const Rule& rule, const at::Tensor& weight) {
  if (rule.method == Method::kSparsePruning) return weight.sizes().vec();
  if (rule.method == Method::kHeadPruning) return {1, rule.heads};
  std::vector<int64_t> shape(static_cast<size_t>(weight.dim()), 1);
  shape[0] = weight.size(0);
  return shape;
}

// As torch's kaiming_uniform_ with a = sqrt(5): within 1 / sqrt(elements of one entry of the first dimension).
at::Tensor start_scores(const std::vector<int64_t>& shape, const at::Tensor& weight, const RandomStream& stream) {
  int64_t fan_in = 1;
  for (size_t d = 1; d < shape.size(); ++d) fan_in *= shape[d];
  const double bound = 1.0 / std::sqrt(static_cast<double>(std::max<int64_t>(fan_in, 1)));
  const at::Tensor values = at::rand(shape, generator_of(stream), at::TensorOptions().dtype(at::kDouble));
  const at::Device device = weight.is_meta() ? at::Device(at::kCPU) : weight.device();
  return ((values * 2 - 1) * bound).to(weight.scalar_type()).to(device).set_requires_grad(true);
}

at::Tensor with_mask(const Rule& rule, const at::Tensor& weight, const at::Tensor& mask) {
  if (rule.method != Method::kHeadPruning) return weight * mask;
  return (weight.reshape({weight.size(0), rule.heads, -1}) * mask.view({1, rule.heads, 1})).reshape(weight.sizes());
}

bool masks_outputs(const Rule& rule) {
  return rule.method == Method::kRowPruning || rule.method == Method::kChannelPruning;
}

}  // namespace

namespace {

// A parameter of a module of the program's own; undefined where it has none of this name.
at::Tensor own_parameter(const torch::nn::Module& module, const char* name) {
  const auto parameters = module.named_parameters(/*recurse=*/false);
  const at::Tensor* const found = parameters.find(name);
  return found == nullptr ? at::Tensor() : *found;
}

}  // namespace

std::optional<LayerKind> kind_of(const torch::nn::Module& module) {
  if (dynamic_cast<const torch::nn::LinearImpl*>(&module) != nullptr) return LayerKind::kLinear;
  if (dynamic_cast<const torch::nn::EmbeddingImpl*>(&module) != nullptr) return LayerKind::kEmbedding;
  if (dynamic_cast<const torch::nn::Conv2dImpl*>(&module) != nullptr) return LayerKind::kConv2d;
  const at::Tensor weight = own_parameter(module, "weight");
  if (!weight.defined()) return std::nullopt;
  if (weight.dim() == 2) return LayerKind::kLinear;
  if (weight.dim() == 4) return LayerKind::kConv2d;
  return std::nullopt;
}

bool applies_to(Method method, LayerKind kind) {
  switch (method) {
    case Method::kWeightQuantization:
      return true;
    case Method::kActivationQuantization:
    case Method::kSparsePruning:
      return kind != LayerKind::kEmbedding;
    case Method::kRowPruning:
    case Method::kHeadPruning:
      return kind == LayerKind::kLinear;
    case Method::kChannelPruning:
      return kind == LayerKind::kConv2d;
  }
  return false;
}

at::Tensor weight_of(torch::nn::Module& module) {
  if (auto* linear = dynamic_cast<torch::nn::LinearImpl*>(&module)) return linear->weight;
  if (auto* embedding = dynamic_cast<torch::nn::EmbeddingImpl*>(&module)) return embedding->weight;
  if (auto* conv = dynamic_cast<torch::nn::Conv2dImpl*>(&module)) return conv->weight;
  return own_parameter(module, "weight");
}

at::Tensor bias_of(torch::nn::Module& module) {
  if (auto* linear = dynamic_cast<torch::nn::LinearImpl*>(&module)) return linear->bias;
  if (auto* conv = dynamic_cast<torch::nn::Conv2dImpl*>(&module)) return conv->bias;
  return own_parameter(module, "bias");
}

CompressedLayer::CompressedLayer(std::string name, const std::shared_ptr<torch::nn::Module>& module,
                                 std::shared_ptr<const Progress> progress)
    : name_(std::move(name)), module_(module), progress_(std::move(progress)) {
  const auto kind = kind_of(*module);
  ensure(kind.has_value(), "a compressed layer is a Linear, an Embedding or a Conv2d");
  kind_ = *kind;
}

at::Tensor CompressedLayer::weight() const {
  const auto module = module_.lock();
  return module ? weight_of(*module) : at::Tensor();
}

std::shared_ptr<torch::nn::Module> CompressedLayer::keeper() {
  const auto layer = module_.lock();
  if (const auto children = layer->named_children(); const auto* known = children.find(kKeeper)) return *known;
  return layer->register_module(kKeeper, std::make_shared<torch::nn::Module>(kKeeper));
}

void CompressedLayer::add(const Rule& rule) {
  const at::Tensor own = weight();
  const bool twice = rule.method == Method::kWeightQuantization ? weight_rule_.has_value()
                     : rule.method == Method::kActivationQuantization
                         ? input_rule_.has_value()
                         : std::any_of(prunings_.begin(), prunings_.end(),
                                       [&](const Pruning& other) { return other.rule.method == rule.method; });
  require<ConfigError>(!twice, rule.path, ".modules: expected each layer in one group of the method, found ", name_,
                       " in two of its patterns");
  if (rule.method == Method::kWeightQuantization) {
    require<ConfigError>(kind_ == LayerKind::kEmbedding || own.numel() % rule.groups == 0, rule.path,
                         ": expected quantize_groups that divide the weight of ", name_, ", ", own.sizes(), ", found ",
                         rule.groups);
    weight_rule_ = rule;
  } else if (rule.method == Method::kActivationQuantization) {
    input_rule_ = rule;
    const at::Device device = own.is_meta() ? at::Device(at::kCPU) : own.device();
    if (rule.static_range) {
      range_ = keeper()->register_buffer("activation_range", at::zeros({2, 2}, at::dtype(at::kFloat).device(device)));
    }
  } else {
    add_pruning(rule);
  }
  keeper();
}

void CompressedLayer::add_pruning(const Rule& rule) {
  const at::Tensor own = weight();
  require<ConfigError>(rule.method != Method::kHeadPruning || own.size(1) % rule.heads == 0, rule.path,
                       ": expected num_heads that divide the inputs of ", name_, ", ", own.size(1), ", found ",
                       rule.heads);
  Pruning pruning{.rule = rule};
  const MaskNames names = names_of(rule.method);
  const std::vector<int64_t> shape = mask_shape(rule, own);
  if (rule.learns_scores) {
    const std::string purpose = cat(name_, ".", names.scores);
    const RandomStream stream{.seed = progress_->seed, .purpose = purpose};
    pruning.scores = keeper()->register_parameter(names.scores, start_scores(shape, own, stream));
  } else {
    const at::Device device = own.is_meta() ? at::Device(at::kCPU) : own.device();
    pruning.mask = keeper()->register_buffer(names.mask, at::ones(shape, at::dtype(at::kBool).device(device)));
    if (rule.snip) {
      const BlockSize& block = rule.snip->block;
      const std::vector<int64_t> blocks = {own.size(0) / block.rows, own.numel() / own.size(0) / block.columns};
      pruning.blocks = keeper()->register_buffer(kBlockScores, at::zeros(blocks, at::dtype(at::kFloat).device(device)));
    }
  }
  prunings_.push_back(std::move(pruning));
  std::stable_sort(prunings_.begin(), prunings_.end(),
                   [](const Pruning& a, const Pruning& b) { return a.rule.method < b.rule.method; });
}

at::Tensor CompressedLayer::quantized_weight(const at::Tensor& weight, const Rule& rule, int64_t step,
                                             bool final) const {
  Levels levels{.bits = final ? rule.bits.target : bits_at(rule.bits, step),
                .symmetric = rule.symmetric,
                .groups = kind_ == LayerKind::kEmbedding ? weight.size(0) : rule.groups};
  // Ternary and binary weights are never rounded by chance, also not on the way from more bits.
  if (rule.stochastic && !final && levels.bits >= 3) {
    const std::string purpose = cat(name_, " weight rounding");
    const RandomStream stream{.seed = progress_->seed, .step = progress_->step, .purpose = purpose};
    const at::Tensor draws = at::rand(weight.sizes(), generator_of(stream), at::TensorOptions().dtype(at::kFloat));
    levels.noise = (draws - 0.5).to(weight.device());
  }
  at::Tensor values = quantized(weight, levels);
  const double share = final ? 0.0 : float_share_at(rule.bits, step);
  if (share == 0) return values;
  const at::NoGradGuard no_grad;
  return weight.detach() * share + values * (1 - share);
}

at::Tensor CompressedLayer::quantized_input(const at::Tensor& input) {
  const Rule& rule = *input_rule_;
  if (!rule.static_range) {
    const int64_t groups = input.numel() == 0 ? 1 : input.numel() / input.size(-1);
    return straight_through(
        input, quantized(input, {.bits = rule.bits.start, .symmetric = rule.symmetric, .groups = groups, .noise = {}}));
  }
  return straight_through(input, in_static_range(input));
}

at::Tensor CompressedLayer::range() const { return range_.to(at::kFloat).sum(0); }

void CompressedLayer::set_range(const at::Tensor& range) {
  range_.select(0, 0).copy_(range);
  range_.select(0, 1).copy_(range - range_.select(0, 0).to(at::kFloat));
}

at::Tensor CompressedLayer::in_static_range(const at::Tensor& input) {
  const at::NoGradGuard no_grad;
  if (module_.lock()->is_training() && !Recomputation::is_running() && input.numel() > 0) {
    const at::Tensor values = input.detach().to(at::kFloat);
    const at::Tensor seen = at::stack({-values.min(), values.max()});
    observed_ = observed_.defined() ? at::maximum(observed_, seen) : seen;
  }
  const at::Tensor range = this->range();
  // Before the first training step has been seen there is none.
  const at::Tensor known = range.select(0, 0) != range.select(0, 1);
  const at::Tensor values = quantized_in_range(input, range, input_rule_->bits.start, input_rule_->symmetric);
  return at::where(known, values, input.detach());
}

at::Tensor CompressedLayer::mask_now(const Pruning& pruning) {
  if (!pruning.scores.defined()) return pruning.mask;
  const at::Tensor chosen = largest_mask(pruning.scores, pruning.rule.dense_ratio);
  return straight_through(pruning.scores, chosen.to(pruning.scores.scalar_type()));
}

at::Tensor CompressedLayer::compressed_weight(const at::Tensor& weight) {
  used_ = true;
  at::Tensor result = weight;
  if (weight_rule_ && has_begun(*weight_rule_)) {
    const int64_t step = progress_->step - weight_rule_->schedule_offset;
    result = straight_through(weight, quantized_weight(weight, *weight_rule_, step, /*final=*/false));
  }
  for (const Pruning& pruning : prunings_) {
    if (has_begun(pruning.rule)) result = with_mask(pruning.rule, result, mask_now(pruning));
  }
  return result;
}

at::Tensor CompressedLayer::compressed_bias(const at::Tensor& bias) {
  bias_used_ = true;
  at::Tensor result = bias;
  for (const Pruning& pruning : prunings_) {
    if (masks_outputs(pruning.rule) && has_begun(pruning.rule)) result = result * mask_now(pruning).view(-1);
  }
  return result;
}

at::Tensor CompressedLayer::compressed_input(const at::Tensor& input) {
  return input_rule_ && has_begun(*input_rule_) ? quantized_input(input) : input;
}

bool CompressedLayer::changes_bias() const {
  return std::any_of(prunings_.begin(), prunings_.end(), [](const Pruning& one) { return masks_outputs(one.rule); });
}

bool CompressedLayer::awaits_masks() {
  bool any = false;
  for (Pruning& pruning : prunings_) {
    if (!pruning.mask.defined() || pruning.rule.snip || !has_begun(pruning.rule)) continue;
    // Also one that a checkpoint has brought, or taken away.
    if (const int64_t version = pruning.mask._version(); version != pruning.seen_version) {
      pruning.decided = !pruning.mask.all().item<bool>();
      pruning.seen_version = version;
    }
    any = any || !pruning.decided;
  }
  return any;
}

at::Tensor CompressedLayer::l1_scores(const Rule& rule) const {
  const at::Tensor values = weight().detach();
  const at::ScalarType type = values.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  at::Tensor size = values.abs().to(type);
  if (rule.method == Method::kSparsePruning) return size;
  if (rule.method == Method::kHeadPruning)
    return size.view({size.size(0), rule.heads, -1}).sum(at::IntArrayRef({0, 2})).view({1, -1});
  return size.flatten(1).sum(1);
}

void CompressedLayer::decide_masks() {
  const at::NoGradGuard no_grad;
  for (Pruning& pruning : prunings_) {
    if (!pruning.mask.defined() || pruning.rule.snip || !has_begun(pruning.rule) || pruning.decided) continue;
    pruning.mask.copy_(largest_mask(l1_scores(pruning.rule), pruning.rule.dense_ratio).view(pruning.mask.sizes()));
    pruning.decided = true;
    pruning.seen_version = pruning.mask._version();
  }
}

Pruning* CompressedLayer::snip() {
  if (!weight().requires_grad()) return nullptr;
  const auto found = std::find_if(prunings_.begin(), prunings_.end(), [](const Pruning& one) { return one.rule.snip; });
  return found == prunings_.end() ? nullptr : &*found;
}

void CompressedLayer::see_gradient(const at::Tensor& weight, const at::Tensor& gradient) {
  Pruning& pruning = *snip();
  // Of a pruned element the gradient is zero: its operator computed with the mask.
  pruning.seen = block_means((weight * gradient).abs(), pruning.rule.snip->block).to(pruning.blocks.device());
}

void CompressedLayer::keep_seen() {
  Pruning* const pruning = snip();
  if (pruning == nullptr || !pruning->seen.defined()) return;
  follow_score(pruning->blocks, std::exchange(pruning->seen, at::Tensor()));
}

void CompressedLayer::drop_seen() {
  for (Pruning& pruning : prunings_) pruning.seen.reset();
}

bool CompressedLayer::observes() const { return input_rule_ && input_rule_->static_range && has_begun(*input_rule_); }

at::Tensor CompressedLayer::take_observed() {
  at::Tensor result = std::exchange(observed_, at::Tensor());
  if (result.defined()) return result;
  return at::full({2}, -std::numeric_limits<float>::infinity(), at::dtype(at::kFloat).device(range_.device()));
}

void CompressedLayer::follow_range(const at::Tensor& observed) {
  const at::NoGradGuard no_grad;
  const at::Tensor range = this->range();
  const at::Tensor seen = at::stack({-observed.select(0, 0), observed.select(0, 1)});
  const at::Tensor moved = range * kRangeMomentum + seen * (1 - kRangeMomentum);
  const at::Tensor known = range.select(0, 0) != range.select(0, 1);
  set_range(at::where(seen.isfinite(), at::where(known, moved, seen), range));
}

at::Tensor CompressedLayer::final_mask(const Pruning& pruning, const at::Tensor& scores) {
  return (pruning.scores.defined() ? largest_mask(scores, pruning.rule.dense_ratio) : pruning.mask).flatten();
}

Operands CompressedLayer::final_values(const Operands& operands, const std::vector<at::Tensor>& scores) const {
  const at::NoGradGuard no_grad;
  Operands result = operands;
  if (weight_rule_) result.weight = quantized_weight(operands.weight, *weight_rule_, 0, /*final=*/true);
  for (size_t i = 0; i < prunings_.size(); ++i) {
    const Rule& rule = prunings_[i].rule;
    const at::Tensor mask = final_mask(prunings_[i], scores[i]).to(result.weight.device());
    result.weight = with_mask(rule, result.weight, mask.view(mask_shape(rule, result.weight)));
    if (masks_outputs(rule) && result.bias.defined()) result.bias = result.bias * mask;
  }
  return result;
}

}  // namespace ds::model_compression
