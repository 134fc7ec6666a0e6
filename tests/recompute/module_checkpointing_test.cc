// Chosen modules give the losses and gradients that they give without, bit for bit, and keep less.
#include "dsengine/module_checkpointing.h"

#include <ATen/CPUGeneratorImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <thread>

#include "dsengine/activation_checkpoint.h"
#include "dsengine/errors.h"
#include "dsengine/ops.h"
#include "dsengine/sparse_attention.h"
#include "profiling/tensor_memory.h"
#include "tests/recompute/chosen_modules.h"
#include "tests/support/autocast_scope.h"

namespace ds::recompute {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::ThrowsMessage;

TEST(ModuleCheckpointing, AModelTrainsTheSame) {
  for (const Recompute recompute : kBothWays) {
    for (const bool in_place : {false, true}) {
      SCOPED_TRACE(testing::Message() << "way " << static_cast<int>(recompute) << ", in place " << in_place);
      const auto shared_net = std::make_shared<TestNet>(3, 16, 0.1, in_place);
      TestNet& net = *shared_net;
      const at::Tensor input = test_input();
      const auto statistics =
          expect_same_step(net, kBlocks, {.recompute = recompute}, [&] { return net.forward(input).pow(2).mean(); });
      EXPECT_EQ(statistics.regions, 3);
      EXPECT_GT(statistics.dropped_tensors, 3);
      EXPECT_GT(statistics.kept_tensors, 3);
    }
  }
}

TEST(ModuleCheckpointing, LargeDropoutMasksAreDrawnAgain) {
  struct Dropping : torch::nn::Module {
    torch::nn::Linear first = register_module("first", torch::nn::Linear(64, 256));
    torch::nn::Linear second = register_module("second", torch::nn::Linear(256, 64));
    at::Tensor forward(const at::Tensor& x) {
      return torch::dropout(second(torch::dropout(torch::gelu(first(x)), 0.3, true)), 0.2, true);
    }
  };
  const auto net = std::make_shared<Dropping>();
  const at::Tensor x = torch::randn({64, 64});
  for (const Recompute recompute : kBothWays) {
    const auto statistics = expect_same_step(*net, modules_named({""}), {.recompute = recompute},
                                             [&] { return net->forward(x).pow(2).sum(); });
    // The first mask, and what the second product read.
    EXPECT_GE(statistics.dropped_bytes, 2 * 64 * 256 * 4);
  }
}

// Live bytes between forward and backward.
int64_t live_bytes_after_forward(TestNet& net, const at::Tensor& input) {
  const profiling::TensorMemory memory;
  const at::Tensor loss = net.forward(input).pow(2).mean();
  const int64_t bytes = memory.live_bytes();
  loss.backward();
  return bytes;
}

TEST(ModuleCheckpointing, MemoryFallsToTheInputsOfModules) {
  constexpr int64_t kSize = 64;
  constexpr int64_t kLayers = 6;
  const auto shared_net = std::make_shared<TestNet>(kLayers, kSize, 0.0, false);
  TestNet& net = *shared_net;
  const at::Tensor input = torch::randn({8, 32, kSize});
  const int64_t stream = input.numel() * 4;
  net.forward(input).mean().backward();  // gradients have their memory
  const int64_t plain = live_bytes_after_forward(net, input);
  EXPECT_GE(plain, kLayers * 14 * stream) << "two norms, q, k, v, attention, 4 + 4 in the middle, two sums, and more";
  apply_activation_checkpointing(net, kBlocks, {.recompute = Recompute::kPointwise});
  const int64_t products = live_bytes_after_forward(net, input);
  // 4 of the activation function, 1 of each norm, 1 copy of what attention gave.
  EXPECT_LE(products, plain - kLayers * 6 * stream);
  EXPECT_GE(products, kLayers * 8 * stream) << "outputs of products stay";
  apply_activation_checkpointing(net, kBlocks);
  const int64_t inputs = live_bytes_after_forward(net, input);
  EXPECT_LE(inputs, (kLayers + 4) * stream) << "the input of each block, and what is outside of blocks";
  remove_activation_checkpointing(net);
  EXPECT_EQ(live_bytes_after_forward(net, input), plain);
}

TEST(ModuleCheckpointing, AGraphMayRunTwiceAndBeDifferentiatedTwice) {
  for (const Recompute recompute : kBothWays) {
    const auto shared_net = std::make_shared<TestNet>();
    TestNet& net = *shared_net;
    net.eval();
    const at::Tensor input = test_input();
    const auto twice = [&] {
      const at::Tensor loss = net.forward(input).pow(2).mean();
      loss.backward({}, /*retain_graph=*/true);
      return loss;
    };
    expect_same_step(net, kBlocks, {.recompute = recompute}, twice);
    const auto shared_formula = std::make_shared<TestNet>(2, 16, 0.0, /*in_place=*/true);
    TestNet& formula = *shared_formula;  // attention's operator has no second derivatives
    formula.eval();
    const auto penalty = [&] {
      const at::Tensor x = input.clone().requires_grad_(true);
      const at::Tensor loss = formula.forward(x).pow(2).mean();
      const at::Tensor gradient =
          torch::autograd::grad({loss}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
      return loss + gradient.pow(2).sum();
    };
    expect_same_step(formula, kBlocks, {.recompute = recompute}, penalty);
  }
}

// A module around a function, with a weight by which it is known.
struct WeightedBody : torch::nn::Module {
  explicit WeightedBody(std::function<at::Tensor(const at::Tensor&, WeightedBody&)> body) : function(std::move(body)) {
    weight = register_parameter("weight", torch::sin(torch::arange(64, torch::kFloat)).view({8, 8}));
  }
  at::Tensor forward(const at::Tensor& x) { return function(x, *this); }
  at::Tensor weight;
  std::function<at::Tensor(const at::Tensor&, WeightedBody&)> function;
};

ModuleCheckpointStatistics expect_same_body(const std::function<at::Tensor(const at::Tensor&, WeightedBody&)>& body) {
  ModuleCheckpointStatistics statistics;
  for (const Recompute recompute : kBothWays) {
    const auto module = std::make_shared<WeightedBody>(body);
    const at::Tensor start = torch::cos(torch::arange(32, torch::kFloat)).view({4, 8});
    statistics = expect_same_step(*module, modules_named({""}), {.recompute = recompute},
                                  [&] { return module->forward(start.clone()).pow(2).sum(); });
  }
  return statistics;
}

TEST(ModuleCheckpointing, ChangesInPlaceOfWhatIsNeededAreRight) {
  // The input is changed after something was made of it that saves nothing of it.
  expect_same_body([](const at::Tensor& x, WeightedBody& own) {
    at::Tensor h = torch::matmul(x, own.weight);
    at::Tensor doubled = (h * 2).exp();
    h.add_(1);
    h.mul_(0.5);
    return torch::matmul(doubled.sin(), own.weight) + torch::matmul(h, own.weight).sigmoid();
  });
  // Views of what is changed, by one another.
  expect_same_body([](const at::Tensor& x, WeightedBody& own) {
    at::Tensor h = torch::matmul(x, own.weight) + 1;
    at::Tensor half = h.narrow(1, 0, 4);
    half.mul_(3);
    h.narrow(1, 2, 4).add_(0.25);
    const at::Tensor used = torch::matmul(h.t().contiguous(), h.sin());
    return torch::matmul(used, own.weight).tanh();
  });
  // Memory that is filled part by part.
  expect_same_body([](const at::Tensor& x, WeightedBody& own) {
    at::Tensor h = torch::empty({4, 8});
    const at::Tensor product = torch::matmul(x, own.weight);
    h = h.zero_();
    h.narrow(0, 0, 2).copy_(product.narrow(0, 2, 2));
    h.narrow(0, 2, 2).copy_(product.narrow(0, 0, 2).sin());
    return torch::matmul(torch::cat({h.exp(), h.cos()}), own.weight);
  });
  // Changed without a graph.
  expect_same_body([](const at::Tensor& x, WeightedBody& own) {
    at::Tensor scale = torch::matmul(x, own.weight).detach().abs() + 1;
    const at::Tensor first = torch::matmul(x, own.weight) * (scale * 1).exp();
    {
      const torch::NoGradGuard no_graph;
      scale.mul_(0.5);
    }
    return torch::matmul(first / (scale * 3), own.weight);
  });
  expect_same_body([](const at::Tensor& x, WeightedBody& own) {
    at::Tensor scale = torch::matmul(x, own.weight).detach();
    const at::Tensor before = (scale * 2).cos();
    scale.data().add_(0.5);
    return torch::matmul(torch::matmul(x, own.weight) * before, own.weight) * (scale * 2).cos();
  });
}

TEST(ModuleCheckpointing, ChangesByListsOutputsAndSizesAreSeen) {
  expect_same_body([](const at::Tensor& x, WeightedBody& own) {
    const at::Tensor scale = torch::matmul(x, own.weight).detach().exp();
    const at::Tensor before = (scale * 2).cos();
    {
      const torch::NoGradGuard no_graph;
      std::vector<at::Tensor> list = {scale};
      at::_foreach_mul_(list, 0.5);
    }
    return torch::matmul(torch::matmul(x, own.weight) * before, own.weight) * (scale * 2).cos();
  });
  expect_same_body([](const at::Tensor& x, WeightedBody& own) {
    at::Tensor scale = torch::matmul(x, own.weight).detach().exp();
    const at::Tensor before = (scale * 2).cos();
    at::mul_out(scale, scale, before);
    return torch::matmul(torch::matmul(x, own.weight) * before, own.weight) * (scale * 2).cos();
  });
  expect_same_body([](const at::Tensor& x, WeightedBody& own) {
    at::Tensor scale = torch::matmul(x, own.weight).detach().exp();
    scale.resize_({8, 8});
    scale.narrow(0, 4, 4).fill_(0.5);
    at::Tensor replaced = torch::sigmoid(torch::matmul(x, own.weight).detach());
    replaced.set_data(scale * 3);
    scale = replaced * replaced.cos();
    return torch::matmul(own.weight * scale.sin(), own.weight);
  });
  // A generator of the program's own.
  auto generator = at::make_generator<at::CPUGeneratorImpl>(3);
  expect_same_body([&](const at::Tensor& x, WeightedBody& own) {
    generator.set_current_seed(5);
    const at::Tensor h = torch::matmul(x, own.weight);
    return torch::matmul(h * torch::empty_like(h).bernoulli_(0.5, generator) * at::rand(h.sizes(), generator),
                         own.weight);
  });
}

// One memory, known by tensors that count their changes apart.
TEST(ModuleCheckpointing, ChangesByTensorsThatCountApartAreRight) {
  const auto start_center = [] {
    at::Tensor center = torch::sin(torch::arange(32, torch::kFloat)).view({4, 8});
    center.mul_(2);  // changed before: `data` begins to count anew
    return center;
  };
  const auto statistics = expect_same_body([&](const at::Tensor& x, WeightedBody& own) {
    const at::Tensor center = start_center();
    const at::Tensor z = torch::tanh(torch::matmul(x, own.weight) - center.data());
    {
      const torch::NoGradGuard no_graph;
      center.mul_(0.9).add_(0.3);
    }
    return torch::matmul(z.exp(), own.weight).sin() * (center * 1).cos();
  });
  EXPECT_GT(statistics.dropped_tensors, 0);
  // Two values of one memory are needed, one by each tensor.
  expect_same_body([&](const at::Tensor& x, WeightedBody& own) {
    const at::Tensor center = start_center();
    const at::Tensor other = center.data();
    const at::Tensor h = torch::matmul(x, own.weight);
    const at::Tensor z = torch::tanh(h - center) * torch::sin(h + other.mul(2)) * torch::cos(h * center.mul(3));
    {
      const torch::NoGradGuard no_graph;
      other.add_(0.7);
    }
    return torch::matmul(z.exp(), own.weight).sin() * (other * 1).cos();
  });
}

TEST(ModuleCheckpointing, StatisticsThatASchemaDoesNotNameCountOnce) {
  for (const Recompute recompute : kBothWays) {
    std::vector<at::Tensor> expected;
    for (const bool chosen : {false, true}) {
      const at::Tensor mean = torch::zeros({8});
      const at::Tensor variance = torch::ones({8});
      const auto module = std::make_shared<WeightedBody>([&](const at::Tensor& x, WeightedBody& own) {
        const at::Tensor h = torch::matmul(x, own.weight);
        const auto [average, scale] = at::batch_norm_update_stats(h.detach(), mean, variance, 0.1);
        return torch::matmul(h * average.exp() * (mean * 2).cos() * scale.sin(), own.weight);
      });
      if (chosen) apply_activation_checkpointing(*module, modules_named({""}), {.recompute = recompute});
      module->forward(torch::cos(torch::arange(32, torch::kFloat)).view({4, 8})).pow(2).sum().backward();
      const std::vector<at::Tensor> found = {mean, variance, module->weight.grad()};
      if (chosen) {
        expect_same_tensors(found, expected);
      } else {
        expected = found;
      }
      remove_activation_checkpointing(*module);
    }
  }
}

TEST(ModuleCheckpointing, NestedTensorsAreKept) {
  expect_same_body([](const at::Tensor& x, WeightedBody& own) {
    const at::Tensor h = torch::matmul(x, own.weight).tanh();
    const at::Tensor nested =
        at::_nested_tensor_from_mask(h.view({2, 2, 8}), torch::tensor({{true, true}, {true, false}}));
    const at::Tensor padded = at::nested_to_padded_tensor(torch::relu(nested), 0.0);
    return torch::matmul(padded, own.weight).sin();
  });
}

TEST(ModuleCheckpointing, CopiesThatDoNotWaitAreKept) {
  const auto dropped = [](bool non_blocking) {
    return expect_same_body([=](const at::Tensor& x, WeightedBody& own) {
             const at::Tensor h = torch::matmul(x, own.weight).to(torch::kDouble, non_blocking, /*copy=*/false);
             return torch::matmul(h.sin().to(torch::kFloat), own.weight);
           })
        .dropped_bytes;
  };
  EXPECT_EQ(dropped(false) - dropped(true), 4 * 8 * 8) << "what sin() read";
}

TEST(ModuleCheckpointing, AnOperatorInPlaceOnKeptMemoryCopiesNothing) {
  constexpr int64_t kBytes = 8 * 16 * 64 * 4;
  torch::nn::Sequential net(torch::nn::Linear(16, 16), torch::nn::BatchNorm1d(64),
                            torch::nn::ReLU(torch::nn::ReLUOptions(true)), torch::nn::Linear(16, 16));
  const at::Tensor x = torch::sin(torch::arange(8 * 64 * 16, torch::kFloat)).view({8, 64, 16});
  const auto peak = [&] {
    profiling::TensorMemory memory;
    const at::Tensor loss = net->forward(x).sum();
    return memory.take_peak_bytes();
  };
  const int64_t plain = peak();
  apply_activation_checkpointing(*net, modules_named({""}));
  EXPECT_LT(peak(), plain + kBytes / 2);
  remove_activation_checkpointing(*net);
}

TEST(ModuleCheckpointing, AnInputThatRequiresAGradientEndsNoRegion) {
  const auto net = std::make_shared<TestBlock>(16, 0.1, false);
  for (const bool leaf : {false, true}) {
    const at::Tensor input = test_input().requires_grad_(leaf);
    const auto statistics =
        expect_same_step(*net, modules_named({""}), {}, [&] { return net->forward(input).pow(2).sum(); });
    EXPECT_EQ(statistics.regions, 1);
  }
}

TEST(ModuleCheckpointing, OperatorsOfManyKindsAreMadeAgain) {
  const auto statistics = expect_same_body([](const at::Tensor& x, WeightedBody& own) {
    const at::Tensor h = torch::matmul(x, own.weight);
    const at::Tensor mask = h.detach() > 0.1;
    at::Tensor y = torch::where(mask, h.exp(), h * 0.1).masked_fill(h.detach() > 1, 0.5);
    y = torch::stack({y, y.flip(0), torch::cumsum(y, 1)}).clamp(-2, 2);
    y = y.index({torch::tensor({0, 2})}).reshape({8, 8}) * torch::rand_like(own.weight).round();
    y = torch::logsumexp(torch::stack({y, y + 1}), 0) + torch::layer_norm(y, {8}).relu();
    const auto [values, places] = torch::max(torch::matmul(y, own.weight), 1, true);
    return (torch::matmul(values * y.softmax(0), own.weight) +
            torch::nn::functional::pad(values, torch::nn::functional::PadFuncOptions({0, 7})))
        .abs()
        .sqrt();
  });
  EXPECT_GT(statistics.dropped_tensors, 0);
}

// Their kernels write by pointers.
TEST(ModuleCheckpointing, OperatorsOfOursAreKept) {
  const auto statistics = expect_same_body([](const at::Tensor& x, WeightedBody& own) {
    const ops::SparseSelfAttention attend({.block = 2, .num_local_blocks = 1}, 2, 9);
    const at::Tensor h = ops::rms_norm(torch::gelu(torch::matmul(x, own.weight)), own.weight[0]);
    const at::Tensor heads = ops::swiglu(h, torch::matmul(h, own.weight)).view({1, 4, 2, 4}).transpose(1, 2);
    const at::Tensor angles = torch::arange(8, torch::kFloat).view({4, 2});
    const at::Tensor mixed = attend(ops::rope(heads, angles.cos(), angles.sin()), heads, torch::tanh(heads));
    return torch::matmul(mixed.transpose(1, 2).reshape({4, 8}), own.weight).sigmoid();
  });
  EXPECT_GT(statistics.dropped_tensors, 0);
}

TEST(ModuleCheckpointing, BatchNormCountsABatchOnce) {
  for (const Recompute recompute : kBothWays) {
    torch::nn::Sequential net(torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 8, 3).padding(1)),
                              torch::nn::BatchNorm2d(8), torch::nn::ReLU(torch::nn::ReLUOptions(true)),
                              torch::nn::Conv2d(8, 4, 3), torch::nn::BatchNorm2d(4), torch::nn::SiLU(),
                              torch::nn::MaxPool2d(2));
    torch::nn::Sequential plain = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(net->clone());
    const at::Tensor images = torch::sin(torch::arange(2 * 3 * 100, torch::kFloat)).view({2, 3, 10, 10});
    apply_activation_checkpointing(*net, modules_named({""}), {.recompute = recompute});
    for (int step = 0; step < 2; ++step) {
      plain->zero_grad();
      net->zero_grad();
      plain->forward(images).pow(2).sum().backward();
      net->forward(images).pow(2).sum().backward();
    }
    for (const auto& item : plain->named_parameters()) {
      EXPECT_TRUE(torch::equal(net->named_parameters()[item.key()].grad(), item.value().grad())) << item.key();
    }
    for (const auto& item : plain->named_buffers()) {
      EXPECT_TRUE(torch::equal(net->named_buffers()[item.key()], item.value())) << item.key();
    }
  }
}

TEST(ModuleCheckpointing, RecurrentAndTransformerLayersOfTorchTrainTheSame) {
  for (const Recompute recompute : kBothWays) {
    torch::nn::LSTM lstm(torch::nn::LSTMOptions(8, 12).num_layers(2).dropout(0.2).bidirectional(true));
    const at::Tensor series = torch::sin(torch::arange(5 * 2 * 8, torch::kFloat)).view({5, 2, 8});
    expect_same_step(*lstm, modules_named({""}), {.recompute = recompute},
                     [&] { return std::get<0>(lstm->forward(series)).pow(2).sum(); });
    torch::nn::TransformerEncoderLayer layer(torch::nn::TransformerEncoderLayerOptions(16, 2).dropout(0.1));
    const at::Tensor input = test_input();
    const auto statistics = expect_same_step(*layer, modules_named({""}), {.recompute = recompute},
                                             [&] { return layer->forward(input).pow(2).sum(); });
    EXPECT_GT(statistics.dropped_tensors, 2);
  }
}

TEST(ModuleCheckpointing, AutocastIsThatOfForward) {
  for (const Recompute recompute : kBothWays) {
    const auto shared_net = std::make_shared<TestNet>(3, 16, 0.1, true);
    TestNet& net = *shared_net;
    const at::Tensor input = test_input();
    const auto statistics = expect_same_step(net, kBlocks, {.recompute = recompute}, [&] {
      const test::AutocastScope autocast;
      return net.forward(input).to(torch::kFloat).pow(2).mean();
    });
    EXPECT_GT(statistics.dropped_tensors, 6);
  }
}

}  // namespace
}  // namespace ds::recompute
