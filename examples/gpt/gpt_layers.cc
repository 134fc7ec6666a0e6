#include "gpt_layers.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/linear.h>

#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "gpt_init.h"

namespace gpt {
namespace {

using ds::pipeline::LayerSpec;

// A function that builds a part of the model with its start values.
template <class Part, class... Arguments>
auto part_of(const GptConfig& config, uint64_t seed, const std::string& name, Arguments... arguments) {
  return [=] {
    auto part = std::make_shared<Part>(arguments...);
    initialize_part(*part, name, config, seed);
    if (config.freeze_embeddings && (name == "wte" || name == "wpe")) {
      for (at::Tensor& parameter : part->parameters()) parameter.set_requires_grad(false);
    }
    return part;
  };
}

at::Tensor add_positions(const Embedding& wpe, const at::Tensor& x) {
  return x + wpe.forward(at::arange(x.size(1), at::TensorOptions().dtype(at::kLong).device(x.device())));
}

at::Tensor tied_head(const Embedding& wte, const at::Tensor& x) { return at::linear(x, wte.weight); }

at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& target) {
  const at::Tensor scores = logits.to(at::kFloat);
  return at::cross_entropy_loss(scores.view({-1, scores.size(-1)}), target.reshape({-1}));
}

}  // namespace

std::shared_ptr<ds::pipeline::PipelineModule> make_layers(const GptConfig& config, uint64_t seed,
                                                          const PipelineShape& shape,
                                                          const std::shared_ptr<const Drops>& drops) {
  require_valid(config);
  const auto wte = part_of<Embedding>(config, seed, "wte", config.vocab, config.hidden);
  const auto wpe = part_of<Embedding>(config, seed, "wpe", config.seq_len, config.hidden);
  std::vector<LayerSpec> layers;
  layers.push_back(config.tie_embeddings ? LayerSpec::made_by(wte).tied_by("wte")
                                         : LayerSpec::made_by(wte).named("wte"));
  layers.push_back(LayerSpec::made_by(wpe, add_positions).named("wpe"));
  for (int64_t i = 0; i < config.layers; ++i) {
    const std::string name = cat("h.", i);
    const auto forward = [drops, i, count = config.layers](const Block& block, const at::Tensor& x) {
      return run_block(*drops, i, count, x,
                       [&](const at::Tensor& input) { return block.forward(input, drops->attention.get()); });
    };
    layers.push_back(LayerSpec::made_by(part_of<Block>(config, seed, name, config), forward).named(name));
  }
  layers.push_back(LayerSpec::made_by(part_of<LayerNorm>(config, seed, "ln_f", config.hidden)).named("ln_f"));
  if (config.tie_embeddings) {
    layers.push_back(LayerSpec::made_by(wte, tied_head).tied_by("wte"));
  } else {
    layers.push_back(
        LayerSpec::made_by(part_of<Linear>(config, seed, "head", config.hidden, config.vocab, false)).named("head"));
  }
  ds::pipeline::PipelineOptions options{.loss = cross_entropy, .stages = shape.stages, .schedule = shape.schedule};
  if (config.activation_checkpointing) options.activation_checkpoint_interval = 1;
  return std::make_shared<ds::pipeline::PipelineModule>(std::move(layers), std::move(options));
}

}  // namespace gpt
