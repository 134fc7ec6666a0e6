// Comparing a training step of a model with chosen modules with one of the same model without.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "dsengine/module_checkpointing.h"

namespace ds::recompute {

// Pre-LayerNorm block: attention by its formula or the operator, GELU or a ReLU in place, dropout after both halves.
struct TestBlock : torch::nn::Module {
  TestBlock(int64_t size, double drop, bool in_place)
      : ln1(register_module("ln1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({size})))),
        ln2(register_module("ln2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({size})))),
        qkv(register_module("qkv", torch::nn::Linear(size, 3 * size))),
        proj(register_module("proj", torch::nn::Linear(size, size))),
        fc(register_module("fc", torch::nn::Linear(size, 4 * size))),
        out(register_module("out", torch::nn::Linear(4 * size, size))),
        dropout(register_module("dropout", torch::nn::Dropout(drop))),
        changes(in_place) {}

  at::Tensor forward(const at::Tensor& input) {
    at::Tensor x = input + dropout(proj(attention(qkv(ln1(input)))));
    at::Tensor hidden = fc(ln2(x));
    if (changes) {
      hidden = torch::relu_(hidden.mul_(0.5).add_(hidden.sigmoid()));
    } else {
      hidden = torch::gelu(hidden);
    }
    return x + dropout(out(hidden));
  }
  at::Tensor attention(const at::Tensor& x) const {
    const int64_t heads = 2;
    std::vector<at::Tensor> parts;
    for (const at::Tensor& part : x.chunk(3, -1)) {
      parts.push_back(part.view({x.size(0), x.size(1), heads, -1}).transpose(1, 2));
    }
    at::Tensor result;
    if (changes) {
      const at::Tensor scores = torch::matmul(parts[0], parts[1].transpose(-2, -1)) * 0.3;
      result = torch::matmul(torch::dropout(torch::softmax(scores, -1), 0.1, is_training()), parts[2]);
    } else {
      result = torch::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, true);
    }
    return result.transpose(1, 2).reshape({x.size(0), x.size(1), -1});
  }

  torch::nn::LayerNorm ln1, ln2;
  torch::nn::Linear qkv, proj, fc, out;
  torch::nn::Dropout dropout;
  bool changes;
};

struct TestNet : torch::nn::Module {
  explicit TestNet(int64_t layers = 3, int64_t size = 16, double drop = 0.1, bool in_place = false)
      : embed(register_module("embed", torch::nn::Linear(size, size))),
        head(register_module("head", torch::nn::Linear(size, 8))) {
    for (int64_t i = 0; i < layers; ++i) {
      blocks.push_back(
          register_module("blocks" + std::to_string(i), std::make_shared<TestBlock>(size, drop, in_place)));
    }
    torch::NoGradGuard no_grad;
    torch::manual_seed(3);
    for (at::Tensor& parameter : parameters()) parameter.copy_(torch::randn_like(parameter) * 0.2);
  }
  at::Tensor forward(const at::Tensor& input) {
    at::Tensor x = embed(input);
    for (const auto& block : blocks) x = block->forward(x);
    return torch::tanh(head(x));
  }
  torch::nn::Linear embed;
  std::vector<std::shared_ptr<TestBlock>> blocks;
  torch::nn::Linear head;
};

inline at::Tensor test_input(int64_t size = 16) {
  return torch::sin(torch::arange(2 * 6 * size, torch::kDouble) * 0.7).to(torch::kFloat).view({2, 6, size});
}

// Loss, gradients of all parameters, and where the generator stands, of one step.
inline std::vector<at::Tensor> step_of(torch::nn::Module& module, const std::function<at::Tensor()>& loss_of) {
  module.zero_grad();
  torch::manual_seed(11);
  const at::Tensor loss = loss_of();
  loss.backward();
  std::vector<at::Tensor> result = {loss.detach()};
  for (const at::Tensor& parameter : module.parameters()) {
    result.push_back(parameter.grad().defined() ? parameter.grad().clone() : at::Tensor());
  }
  result.push_back(torch::rand({3}));
  return result;
}

inline void expect_same_tensors(const std::vector<at::Tensor>& found, const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) {
    ASSERT_EQ(found[i].defined(), expected[i].defined()) << "tensor " << i;
    if (found[i].defined()) EXPECT_TRUE(torch::equal(found[i], expected[i])) << "tensor " << i;
  }
}

// The step without and with chosen modules; the statistics of the latter.
inline ModuleCheckpointStatistics expect_same_step(torch::nn::Module& module, const ModulePredicate& predicate,
                                                   const ModuleCheckpointOptions& options,
                                                   const std::function<at::Tensor()>& loss_of) {
  const std::vector<at::Tensor> expected = step_of(module, loss_of);
  apply_activation_checkpointing(module, predicate, options);
  take_module_checkpoint_statistics();
  expect_same_tensors(step_of(module, loss_of), expected);
  const ModuleCheckpointStatistics statistics = take_module_checkpoint_statistics();
  remove_activation_checkpointing(module);
  return statistics;
}

inline const ModulePredicate kBlocks = modules_named({"blocks\\d+"});

constexpr Recompute kBothWays[] = {Recompute::kEverything, Recompute::kPointwise};

}  // namespace ds::recompute
