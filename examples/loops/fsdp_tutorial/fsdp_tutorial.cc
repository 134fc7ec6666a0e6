// PyTorch's FSDP2 tutorial (Getting Started with Fully Sharded Data Parallel) in C++:
//
//   ds-launch --num_procs 2 fsdp_tutorial [--explicit-prefetching] [--mixed-precision] [--checkpoints FOLDER]
#include <dsengine/fully_shard.h>
#include <dsengine/init_distributed.h>
#include <torch/torch.h>

#include <algorithm>
#include <filesystem>
#include <iostream>
#include <string>
#include <vector>

namespace nn = torch::nn;

constexpr int64_t kVocabulary = 64, kWidth = 64, kHeads = 4, kLength = 32, kLayers = 4;

struct TransformerBlockImpl : nn::Module {
  TransformerBlockImpl() {
    attention_norm = register_module("attention_norm", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
    qkv = register_module("qkv", nn::Linear(kWidth, 3 * kWidth));
    projection = register_module("projection", nn::Linear(kWidth, kWidth));
    ffn_norm = register_module("ffn_norm", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
    feed_forward = register_module(
        "feed_forward", nn::Sequential(nn::Linear(kWidth, 4 * kWidth), nn::GELU(), nn::Linear(4 * kWidth, kWidth)));
  }
  torch::Tensor forward(torch::Tensor x) {
    auto heads = qkv(attention_norm(x)).view({x.size(0), x.size(1), 3, kHeads, -1}).permute({2, 0, 3, 1, 4});
    auto mixed = torch::scaled_dot_product_attention(heads[0], heads[1], heads[2]).transpose(1, 2).reshape(x.sizes());
    x = x + projection(mixed);
    return x + feed_forward->forward(ffn_norm(x));
  }
  nn::LayerNorm attention_norm{nullptr}, ffn_norm{nullptr};
  nn::Linear qkv{nullptr}, projection{nullptr};
  nn::Sequential feed_forward{nullptr};
};
TORCH_MODULE(TransformerBlock);

struct TransformerImpl : nn::Module {
  TransformerImpl() {
    tokens = register_module("tokens", nn::Embedding(kVocabulary, kWidth));
    positions = register_module("positions", nn::Embedding(kLength, kWidth));
    register_module("layers", layers);
    for (int i = 0; i < kLayers; ++i) layers->push_back(TransformerBlock());
    output = register_module("output", nn::Linear(kWidth, kVocabulary));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    auto h = tokens(x) + positions(torch::arange(x.size(1)));
    for (auto& layer : *layers) h = layer->as<TransformerBlock>()->forward(h);
    return output(h);
  }
  nn::Embedding tokens{nullptr}, positions{nullptr};
  nn::ModuleList layers;
  nn::Linear output{nullptr};
};
TORCH_MODULE(Transformer);

int main(int count, char** arguments) {
  const std::vector<std::string> given(arguments + 1, arguments + count);
  const auto has = [&](const char* flag) { return std::find(given.begin(), given.end(), flag) != given.end(); };
  const std::string folder = has("--checkpoints") ? given.back() : "";

  const auto job = ds::engine::init_distributed();
  torch::manual_seed(job.ranks->rank());  // rank 0's weights, and batches of each rank's own
  Transformer model;
  ds::FullyShardOptions fsdp = {.process_group = job.ranks};
  if (has("--mixed-precision")) fsdp.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat32};
  std::vector<std::shared_ptr<ds::FullySharded>> layers;
  for (auto& layer : *model->layers) layers.push_back(ds::fully_shard(layer, fsdp));
  auto sharded = ds::fully_shard(model, fsdp);
  if (has("--explicit-prefetching")) {
    for (size_t i = 0; i + 2 < layers.size(); ++i)
      layers[i]->set_modules_to_forward_prefetch({layers[i + 1], layers[i + 2]});
    for (size_t i = 2; i < layers.size(); ++i)
      layers[i]->set_modules_to_backward_prefetch({layers[i - 1], layers[i - 2]});
  }
  if (!folder.empty() && std::filesystem::exists(folder)) sharded->load(folder);

  torch::optim::Adam optimizer(sharded->parameters(), torch::optim::AdamOptions(1e-3));
  for (int step = 1; step <= 40; ++step) {
    if (has("--explicit-prefetching")) sharded->unshard();
    auto x = torch::randint(0, kVocabulary, {16, kLength});
    auto logits = model->forward(x).to(torch::kFloat32);
    auto loss = torch::nn::functional::cross_entropy(logits.flatten(0, 1), ((x + 1) % kVocabulary).flatten());
    loss.backward();
    sharded->clip_grad_norm_(1.0);
    optimizer.step();
    optimizer.zero_grad();
    if (step % 10 == 0 && job.ranks->rank() == 0)
      std::cout << "step " << step << "  loss " << loss.item<float>() << std::endl;
  }
  const auto held = sharded->held_bytes();
  if (job.ranks->rank() == 0)
    std::cout << "this rank holds " << (held.parameters + held.master) / 1024 << " KiB of parameters" << std::endl;
  if (!folder.empty()) sharded->save(folder, "last");
}
