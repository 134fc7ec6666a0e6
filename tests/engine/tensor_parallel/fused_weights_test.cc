// Weights in which several are fused, of other sizes (grouped heads: queries, keys and values; gate and up), through
// the engine and its checkpoints.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "checkpoint/folder_source.h"
#include "core/text.h"
#include "tests/engine/tensor_parallel/split_training.h"
#include "tests/support/grid.h"
#include "tests/support/scratch_folder.h"

namespace ds::engine {
namespace {

constexpr int64_t kHidden = 32;
constexpr int64_t kHeads = 8;
constexpr int64_t kGroups = 4;  // of keys and values
constexpr int64_t kSize = kHidden / kHeads;
constexpr int64_t kInner = 24;
constexpr int64_t kEntries = 50;
constexpr int64_t kTokens = 8;

// The layer of a model as Phi-3: one weight for queries, keys and values, one for gate and up.
struct FusedLayer : torch::nn::Module {
  explicit FusedLayer(bool bias) {
    const auto linear = [&](const char* name, int64_t inputs, int64_t outputs) {
      return register_module(name, torch::nn::Linear(torch::nn::LinearOptions(inputs, outputs).bias(bias)));
    };
    qkv = linear("qkv_proj", kHidden, kHidden + 2 * kGroups * kSize);
    out = linear("o_proj", kHidden, kHidden);
    gate_up = linear("gate_up_proj", kHidden, 2 * kInner);
    down = linear("down_proj", kInner, kHidden);
  }
  at::Tensor forward(const at::Tensor& x) {
    const int64_t batch = x.size(0);
    const auto heads = [&](const at::Tensor& of) { return of.view({batch, kTokens, -1, kSize}).transpose(1, 2); };
    const std::vector<at::Tensor> parts = qkv(x).split_with_sizes({kHidden, kGroups * kSize, kGroups * kSize}, -1);
    const auto repeated = [&](const at::Tensor& of) {
      const at::Tensor own = heads(of);
      return own.unsqueeze(2)
          .expand({batch, own.size(1), kHeads / kGroups, kTokens, kSize})
          .reshape({batch, -1, kTokens, kSize});
    };
    const at::Tensor mixed = at::scaled_dot_product_attention(heads(parts[0]), repeated(parts[1]), repeated(parts[2]),
                                                              {}, 0.0, /*is_causal=*/true);
    const at::Tensor middle = x + out(mixed.transpose(1, 2).reshape({batch, kTokens, -1}));
    const std::vector<at::Tensor> inner = gate_up(middle).chunk(2, -1);
    return middle + down(at::silu(inner[0]) * inner[1]);
  }
  torch::nn::Linear qkv{nullptr}, out{nullptr}, gate_up{nullptr}, down{nullptr};
};

struct FusedModel : torch::nn::Module {
  explicit FusedModel(bool bias) {
    embedding = register_module("embed_tokens", torch::nn::Embedding(kEntries, kHidden));
    for (int i = 0; i < 2; ++i) layers.push_back(register_module(cat("layer", i), std::make_shared<FusedLayer>(bias)));
    head = register_module("lm_head", torch::nn::Linear(torch::nn::LinearOptions(kHidden, kEntries).bias(false)));
    const at::NoGradGuard no_grad;
    int64_t index = 0;
    for (at::Tensor& parameter : parameters()) {  // of formulas: ranks that are threads share a generator
      const at::Tensor steps = at::arange(parameter.numel(), at::kDouble) * 0.7 + static_cast<double>(index++);
      parameter.copy_((steps.sin() * 0.2).view(parameter.sizes()));
    }
  }
  at::Tensor forward(const GptBatch& batch) {
    at::Tensor x = embedding(batch.tokens);
    for (const auto& layer : layers) x = layer->forward(x);
    return torch::nn::functional::cross_entropy(head(x).flatten(0, 1), batch.targets.flatten());
  }
  torch::nn::Embedding embedding{nullptr};
  std::vector<std::shared_ptr<FusedLayer>> layers;
  torch::nn::Linear head{nullptr};
};

std::vector<parallel::SplitRule> fused_rules() {
  using enum parallel::Style;
  return {{".*qkv_proj", kColumn, {kHidden, kGroups * kSize, kGroups * kSize}},
          {".*o_proj", kRow},
          {".*gate_up_proj", kColumn, {kInner, kInner}},
          {".*down_proj", kRow},
          {"embed_tokens|lm_head", kVocabulary}};
}

struct FusedRun {
  int tensor = 2;
  int stage = 0;
  bool bias = true;
  bool by_config = false;  // rules from the names and sizes of the layers

  GptBatch batch(int step) const { return gpt_batch(step, 0, {.seq_len = kTokens, .vocab = kEntries}); }
  nlohmann::json config() const {
    GptRun run{.tensor = tensor, .stage = stage};
    run.more["checkpoint"] = {{"durable", false}};
    return run.config();
  }
  std::shared_ptr<Engine> start(comm::Communicator& world, const std::shared_ptr<FusedModel>& net) const {
    return initialize({.model = net,
                       .config = config(),
                       .split = by_config ? std::vector<parallel::SplitRule>() : fused_rules(),
                       .communicator = {std::shared_ptr<void>(), &world},
                       .seed_generators = false})
        .engine;
  }
  Curve train(Engine& engine, FusedModel& net, int from, int to) const {
    Curve curve;
    for (int step = from; step < to; ++step) {
      curve.losses.push_back(engine.backward(net.forward(batch(step))).item<double>());
      engine.step();
      curve.norms.push_back(engine.get_global_grad_norm().value_or(-1));
    }
    return curve;
  }
  Curve plain(int steps) const {
    FusedModel net(bias);
    torch::optim::AdamW optimizer(net.parameters(), torch::optim::AdamWOptions(2e-3).weight_decay(0.01));
    Curve curve;
    for (int step = 0; step < steps; ++step) {
      optimizer.zero_grad();
      const at::Tensor loss = net.forward(batch(step));
      loss.backward();
      curve.losses.push_back(loss.item<double>());
      curve.norms.push_back(torch::nn::utils::clip_grad_norm_(net.parameters(), 0.5));
      optimizer.step();
    }
    return curve;
  }
};

TEST(TensorParallelFused, TrainsAsPlainTorch) {
  for (const auto& [tensor, stage, bias, by_config] :
       test::grid_sample(2, std::vector{2, 4}, std::vector{0, 3}, std::vector{false, true}, std::vector{false, true})) {
    SCOPED_TRACE(testing::Message() << "tensor " << tensor << ", stage " << stage << ", bias " << bias << ", by config "
                                    << by_config);
    const FusedRun run{.tensor = tensor, .stage = stage, .bias = bias, .by_config = by_config};
    const Curve expected = run.plain(10);
    test::run_ranks(tensor, [&](comm::Communicator& world) {
      const auto net = std::make_shared<FusedModel>(run.bias);
      const auto engine = run.start(world, net);
      expect_same(run.train(*engine, *net, 0, 10), expected, 5e-6, 2e-5);
      std::string joined;
      for (const parallel::JoinedOperator& one : engine->joined_operators()) joined += one.name + " ";
      EXPECT_EQ(joined, "");
    });
  }
}

// Names and values, also of the optimizer's states, are those of the whole model at any degree.
TEST(TensorParallelFused, CheckpointsOfAnyDegreeGoOnInAnyOther) {
  const test::ScratchFolder scratch;
  const std::string folder = scratch.path().string();
  const Curve expected = FusedRun{}.plain(8);
  const Curve rest{{expected.losses.begin() + 3, expected.losses.end()},
                   {expected.norms.begin() + 3, expected.norms.end()}};
  const std::vector<FusedRun> runs = {{.tensor = 1, .stage = 3}, {.tensor = 2, .stage = 0}, {.tensor = 4, .stage = 3}};
  for (const FusedRun& from : runs) {
    test::run_ranks(from.tensor, [&](comm::Communicator& world) {
      const auto net = std::make_shared<FusedModel>(true);
      const auto engine = from.start(world, net);
      from.train(*engine, *net, 0, 3);
      engine->save_checkpoint(folder, "saved");
    });
    for (const FusedRun& to : runs) {
      SCOPED_TRACE(cat("from ", from.tensor, " to ", to.tensor));
      test::run_ranks(to.tensor, [&](comm::Communicator& world) {
        const auto net = std::make_shared<FusedModel>(true);
        const auto engine = to.start(world, net);
        engine->load_checkpoint(folder, "saved");
        engine->save_checkpoint(folder, "again");
        expect_same(to.train(*engine, *net, 3, 8), rest, 5e-6, 2e-5);
      });
      const auto saved = checkpoint::open_folder(folder + "/saved");
      const auto again = checkpoint::open_folder(folder + "/again");
      EXPECT_EQ(saved->info("weights/layer0.qkv_proj.weight").sizes,
                (std::vector<int64_t>{kHidden + 2 * kGroups * kSize, kHidden}));
      int compared = 0;
      for (const auto& [path, info] : saved->tensors()) {
        if (path.starts_with("ranks/")) continue;
        EXPECT_TRUE(torch::equal(saved->tensor(path), again->tensor(path))) << path;
        ++compared;
      }
      EXPECT_GE(compared, 3 * 18);  // of 18 parameters the weight and two states
    }
  }
}

}  // namespace
}  // namespace ds::engine
