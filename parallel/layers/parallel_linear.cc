#include <ATen/core/grad_mode.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>

#include <cmath>

#include "core/check.h"
#include "dsengine/parallel_layers.h"

namespace ds::parallel {

ParallelLinearImpl::ParallelLinearImpl(const ParallelLinearOptions& given, Style style)
    : options(given), style_(style) {
  require(options.in > 0 && options.out > 0, "a parallel linear layer: expected sizes above 0, found in ", options.in,
          " and out ", options.out);
  require(style == Style::kColumn || style == Style::kRow, "a parallel linear layer is of style column or row");
  ParallelLinearImpl::reset();
}

void ParallelLinearImpl::reset() {
  weight = register_parameter("weight", at::empty({options.out, options.in}));
  if (options.bias) {
    bias = register_parameter("bias", at::empty({options.out}));
  } else {
    bias = register_parameter("bias", {}, /*requires_grad=*/false);
  }
  // torch::nn::Linear's: uniform in +- 1 / sqrt(in), its weight first.
  const at::NoGradGuard no_grad;
  const double bound = 1 / std::sqrt(static_cast<double>(options.in));
  weight.uniform_(-bound, bound);
  if (options.bias) bias.uniform_(-bound, bound);
}

at::Tensor ParallelLinearImpl::forward(const at::Tensor& x) const { return at::linear(x, weight, bias); }

std::vector<SplitRule> ParallelLinearImpl::splits() const {
  return {{.pattern = "", .style = style_, .blocks = options.blocks, .grain = options.grain}};
}

VocabParallelEmbeddingImpl::VocabParallelEmbeddingImpl(const VocabParallelEmbeddingOptions& given) : options(given) {
  require(options.count > 0 && options.size > 0, "a parallel embedding: expected sizes above 0, found count ",
          options.count, " and size ", options.size);
  require(!options.padding || (*options.padding >= 0 && *options.padding < options.count),
          "a parallel embedding: expected padding to be one of ", options.count, " entries, found ",
          options.padding.value_or(0));
  VocabParallelEmbeddingImpl::reset();
}

void VocabParallelEmbeddingImpl::reset() {
  weight = register_parameter("weight", at::empty({options.count, options.size}));
  const at::NoGradGuard no_grad;
  weight.normal_();
  if (options.padding) weight.select(0, *options.padding).zero_();
}

at::Tensor VocabParallelEmbeddingImpl::forward(const at::Tensor& indices) const {
  return at::embedding(weight, indices, options.padding.value_or(-1));
}

std::vector<SplitRule> VocabParallelEmbeddingImpl::splits() const {
  return {{.pattern = "", .style = Style::kVocabulary}};
}

}  // namespace ds::parallel
