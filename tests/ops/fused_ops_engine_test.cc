// Norms, SwiGLU and RoPE of ours under the engine: the same training as with LibTorch's chains, in every stage. Vector
// kernels read memory themselves, so at stage 3 the parameters have to be there.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <vector>

#include "dsengine/activation_checkpoint.h"
#include "dsengine/ops.h"
#include "tests/model/small_run.h"
#include "tests/ops/same_training.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using test::run_ranks;

constexpr int64_t kBlockWidth = 6;
constexpr double kBlockEps = 1e-5;

struct BlockKind {
  bool fused = false;
  bool regions = false;
};

// Two sublayers, each after an addition and a norm; every operator of ours reads a parameter or what one made.
struct FusedNet : torch::nn::Module {
  explicit FusedNet(const BlockKind& of) : kind(of) {
    start = register_parameter("start", torch::empty({4, kBlockWidth}));
    first = register_parameter("first", torch::empty({kBlockWidth}));
    second = register_parameter("second", torch::empty({kBlockWidth}));
    shift = register_parameter("shift", torch::empty({kBlockWidth}));
    gate = register_parameter("gate", torch::empty({4, kBlockWidth}));
    mix = register_module("mix", torch::nn::Linear(kBlockWidth, 2 * kBlockWidth));
    fill(*this);
    tables = ops::rope_tables(4, kBlockWidth, 10.0);
  }

  std::vector<at::Tensor> add_and_normalise(const at::Tensor& x, const at::Tensor& residual) {
    if (kind.fused) {
      const ops::NormedSum made = ops::add_rms_norm(x, residual, first, kBlockEps);
      return {made.normed, made.sum};
    }
    const at::Tensor sum = x + residual;
    return {at::rms_norm(sum, {kBlockWidth}, first, kBlockEps), sum};
  }

  at::Tensor turned(const at::Tensor& x) {
    if (kind.fused) return ops::rope(x, tables.cos, tables.sin);
    const std::vector<at::Tensor> halves = x.chunk(2, -1);
    const at::Tensor cos = tables.cos.to(x.scalar_type());
    const at::Tensor sin = tables.sin.to(x.scalar_type());
    return at::cat({halves[0] * cos - halves[1] * sin, halves[1] * cos + halves[0] * sin}, -1);
  }

  at::Tensor block(const at::Tensor& input) {
    const std::vector<at::Tensor> sums = add_and_normalise(input, start);  // a parameter as it is
    const at::Tensor both = mix(turned(sums[0]));
    const std::vector<at::Tensor> halves = both.chunk(2, -1);
    const at::Tensor mixed = kind.fused ? ops::swiglu(both) : at::silu(halves[0]) * halves[1];
    const at::Tensor gated = kind.fused ? ops::swiglu(gate, mixed) : at::silu(gate) * mixed;
    return sums[1] + gated;
  }

  at::Tensor loss(const at::Tensor& input) {
    const at::Tensor x = input.to(start.scalar_type());
    const auto body = [this](const at::Tensor& t) { return block(t); };
    const at::Tensor y = kind.regions ? recompute::checkpoint(body, x) : body(x);
    const at::Tensor normed = kind.fused ? ops::layer_norm(y, second, shift, kBlockEps)
                                         : at::layer_norm(y, {kBlockWidth}, second, shift, kBlockEps);
    return (normed.to(at::kFloat) - input.cos()).pow(2).mean();
  }

  BlockKind kind;
  at::Tensor start, first, second, shift, gate;
  torch::nn::Linear mix{nullptr};
  ops::RopeTables tables;
};

TrainedRun train_blocks(const ordered_json& config, comm::Communicator& communicator, const BlockKind& kind) {
  const auto model = std::make_shared<FusedNet>(kind);
  const auto engine = ds::engine::start(model, config, communicator).engine;
  return record_training(*engine, 4 * engine->gradient_accumulation_steps(),
                         [&](int64_t micro) { return model->loss(sample(micro, communicator.rank())); });
}

void expect_blocks_train_the_same(ordered_json config, BlockKind kind, double tolerance) {
  config["optimizer"] = {{"type", "SGD"}, {"params", {{"lr", 0.05}, {"momentum", 0.9}}}};
  config["zero_allow_untested_optimizer"] = true;
  run_ranks(2, [&](comm::Communicator& communicator) {
    kind.fused = false;
    const TrainedRun chain = train_blocks(config, communicator, kind);
    kind.fused = true;
    const TrainedRun fused = train_blocks(config, communicator, kind);
    expect_same_training(fused, chain, tolerance);
  });
}

TEST(FusedOperatorsInTheEngine, EveryStageTrainsTheSame) {
  for (const int stage : {0, 1, 2, 3}) {
    for (const bool regions : {false, true}) {
      SCOPED_TRACE(cat("stage ", stage, regions ? ", in regions" : ""));
      expect_blocks_train_the_same(small_config(stage, 2), {.regions = regions}, 2e-6);
    }
  }
}

TEST(FusedOperatorsInTheEngine, SixteenBitsAndAutocast) {
  for (const int stage : {0, 3}) {
    for (const char* section : {"bf16", "torch_autocast", "fp16"}) {
      SCOPED_TRACE(cat("stage ", stage, ", ", section));
      ordered_json config = small_config(stage, 1);
      config[section] = {{"enabled", true}};
      if (section == std::string("fp16")) config[section]["initial_scale_power"] = 10;
      expect_blocks_train_the_same(config, {}, 3e-2);
    }
  }
}

}  // namespace
}  // namespace ds::engine
