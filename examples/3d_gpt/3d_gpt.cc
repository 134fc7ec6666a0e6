// A GPT on three axes at once, "3D parallelism". The program is a list of layers as for one process; which rank has
// what of them stands in ds_config.json.
//
//   cd examples/3d_gpt && ds-launch --num_procs 8 PATH/3d_gpt --deepspeed_config ds_config.json
//
// Eight ranks are then 2 x 2 x 2. rank = (stage x 2 + data) x 2 + tensor:
//
//                        data 0                data 1
//                   tensor 0  tensor 1    tensor 0  tensor 1
//     stage 0        rank 0    rank 1      rank 2    rank 3
//     stage 1        rank 4    rank 5      rank 6    rank 7
//
// * The pipe axis, "pipeline.stages": ranks 0 and 4 have different layers of one model. Rank 0 sends
//   activations to rank 4, which sends their gradients back: once for each micro-batch, few bytes. It is the outermost
//   axis, whose ranks may lie on different hosts.
// * The data axis, all ranks that the other two leave: ranks 0 and 2 have the same layers and train on other samples.
//   Their gradients are added once a step, and with "zero_optimization.stage" 1 each keeps half of the optimizer's
//   state.
// * The tensor axis, "tensor_parallel.autotp_size": ranks 0 and 1 have halves of the same layers and work on the same
//   samples. They add up activations four times in each block, so that their link has to be the fastest: it is the
//   innermost axis, whose ranks are neighbours on one host.
//
// Four hosts of two ranks each: ds-launch --hostfile hosts, with "hostA slots=2" and so on in it.
#include <dsengine/engine.h>
#include <dsengine/initialize.h>
#include <dsengine/pipeline.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace {

using ds::pipeline::LayerSpec;
using torch::nn::Embedding;
using torch::nn::LayerNorm;
using torch::nn::LayerNormOptions;
using torch::nn::Linear;

constexpr int64_t kVocab = 128;  // the bytes of ASCII
constexpr int64_t kTime = 32;    // bytes of a sample
constexpr int64_t kHidden = 64;
constexpr int64_t kHeads = 4;  // a rank of the tensor axis has 4 / autotp_size of them
constexpr int kBlocks = 4;     // a stage has half of them

constexpr std::string_view kText =
    "This is the farmer sowing the corn, that kept the cock that crowed in the morn, that waked the priest all shaven "
    "and shorn, that married the man all tattered and torn, that kissed the maiden all forlorn, that milked the cow "
    "with the crumpled horn, that tossed the dog, that worried the cat, that killed the rat, that ate the malt that "
    "lay in the house that Jack built.";

at::Tensor tokens_of(std::string_view text) { return torch::tensor(std::vector<int64_t>(text.begin(), text.end())); }

// Sample i begins at some byte of the text; its target is the byte that follows each of its bytes.
struct Rhyme {
  struct Example {
    at::Tensor data;    // [kTime]
    at::Tensor target;  // [kTime]
  };
  Example get(size_t index) const {
    const size_t first = index * 7919 % (kText.size() - kTime);
    return {tokens_of(kText.substr(first, kTime)), tokens_of(kText.substr(first + 1, kTime))};
  }
  size_t size() const { return 4096; }
};

// The layers are written as if there were one rank. What the tensor axis cuts it finds by these names: of qkv and fc
// each rank has a part of the outputs, of proj a part of the inputs, of wte a part of the vocabulary.
struct Attention : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    const auto heads = [&](const at::Tensor& part) {
      return part.view({x.size(0), x.size(1), kHeads, kHidden / kHeads}).transpose(1, 2);
    };
    const std::vector<at::Tensor> parts = qkv(x).split(kHidden, 2);
    const at::Tensor mixed = at::scaled_dot_product_attention(heads(parts[0]), heads(parts[1]), heads(parts[2]),
                                                              /*attn_mask=*/{}, /*dropout_p=*/0.0, /*is_causal=*/true);
    return proj(mixed.transpose(1, 2).reshape({x.size(0), x.size(1), kHidden}));
  }
  Linear qkv = register_module("qkv", Linear(kHidden, 3 * kHidden));
  Linear proj = register_module("proj", Linear(kHidden, kHidden));
};

struct Mlp : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return proj(at::gelu(fc(x))); }
  Linear fc = register_module("fc", Linear(kHidden, 4 * kHidden));
  Linear proj = register_module("proj", Linear(4 * kHidden, kHidden));
};

struct Block : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor attended = x + attn->forward(ln1(x));
    return attended + mlp->forward(ln2(attended));
  }
  LayerNorm ln1 = register_module("ln1", LayerNorm(LayerNormOptions({kHidden})));
  std::shared_ptr<Attention> attn = register_module("attn", std::make_shared<Attention>());
  LayerNorm ln2 = register_module("ln2", LayerNorm(LayerNormOptions({kHidden})));
  std::shared_ptr<Mlp> mlp = register_module("mlp", std::make_shared<Mlp>());
};

struct Positions : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return x + weight.narrow(0, 0, x.size(1)); }
  at::Tensor weight = register_parameter("weight", 0.02 * at::randn({kTime, kHidden}));
};

// Makes the table of bytes, with values so small that the first scores of the head are about equal.
std::shared_ptr<torch::nn::EmbeddingImpl> make_table() {
  const Embedding table(kVocab, kHidden);
  const at::NoGradGuard no_grad;
  table->weight.mul_(0.02);
  return table.ptr();
}

// The first layer and the last one have one weight. They are on different stages, each of which has a copy: the copies
// start equal, and their gradients are added.
std::vector<LayerSpec> layers() {
  std::vector<LayerSpec> list;
  list.push_back(LayerSpec::made_by(make_table).tied_by("wte"));
  list.push_back(LayerSpec::of<Positions>().named("wpe"));
  for (int i = 0; i < kBlocks; ++i) list.push_back(LayerSpec::of<Block>().named("h." + std::to_string(i)));
  list.push_back(LayerSpec::of<LayerNorm>(LayerNormOptions({kHidden})).named("ln_f"));
  const auto scores = [](const torch::nn::EmbeddingImpl& table, const at::Tensor& x) {
    return at::linear(x, table.weight);
  };
  list.push_back(LayerSpec::made_by(make_table, scores).tied_by("wte"));
  return list;
}

at::Tensor loss(const at::Tensor& scores, const at::Tensor& target) {
  return at::cross_entropy_loss(scores.view({-1, kVocab}), target.reshape({-1}));
}

// Appends the likeliest byte so many times. All ranks call it, as they call train_batch(): each computes its part.
std::string continued(ds::engine::Engine& engine, std::string text, int bytes) {
  for (int i = 0; i < bytes; ++i) {
    const auto context = std::string_view(text).substr(text.size() - std::min<size_t>(text.size(), kTime));
    const at::Tensor tokens = tokens_of(context).unsqueeze(0);
    const ds::pipeline::Evaluation evaluation = engine.eval_batch(
        [&] { return ds::pipeline::MicroBatch{.inputs = {tokens}, .labels = {}}; },
        {.num_micro_batches = 1, .compute_loss = false, .return_logits = true, .broadcast_logits = true});
    const at::Tensor scores = evaluation.logits.at(0).at(0);  // [1, length, kVocab]
    text += static_cast<char>(scores.select(1, -1).argmax(-1).item<int64_t>());
  }
  return text;
}

void train(const std::string& config, int steps) {
  const auto model = std::make_shared<ds::pipeline::PipelineModule>(
      layers(), ds::pipeline::PipelineOptions{.loss = loss, .seed_layers = true});
  auto [engine, optimizer, loader, schedule] =
      ds::engine::initialize({.model = model, .config = config, .training_data = Rhyme()});
  const bool prints = engine->global_rank() == 0;
  for (int step = 1; step <= steps; ++step) {
    const at::Tensor mean = engine->train_batch();
    if (prints && (step % 20 == 0 || step == steps)) {
      std::cout << "step " << step << "  loss " << mean.item<float>() << std::endl;
    }
  }
  const std::string text = continued(*engine, "This is the ", 60);
  if (prints) std::cout << text << std::endl;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Trains a small GPT with pipeline, data and tensor parallelism", "3d_gpt");
  std::string config;
  int steps = 200;
  app.add_option("--deepspeed_config", config, "The ds_config JSON file")->required();
  app.add_option("--steps", steps, "Batches to train on")->check(CLI::PositiveNumber)->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  try {
    train(config, steps);
    return EXIT_SUCCESS;
  } catch (const std::exception& error) {
    std::cerr << "3d_gpt: error: " << error.what() << std::endl;
    return EXIT_FAILURE;
  }
}
