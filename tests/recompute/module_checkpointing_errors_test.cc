// What chosen modules refuse, what they leave alone, and how they live with other parts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "dsengine/activation_checkpoint.h"
#include "dsengine/errors.h"
#include "dsengine/module_checkpointing.h"
#include "tests/recompute/chosen_modules.h"
#include "tests/support/thread_ranks.h"

namespace ds::recompute {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::ThrowsMessage;

TEST(ModuleCheckpointingUse, NamesAreThoseOfTheOutermostModulesThatAreChosen) {
  const auto shared_net = std::make_shared<TestNet>(2);
  TestNet& net = *shared_net;
  EXPECT_THAT(apply_activation_checkpointing(net, modules_named({"blocks1", "blocks\\d\\.ln1", "head"})),
              ElementsAre("head", "blocks0.ln1", "blocks1"));
  const auto linears = [](const std::string& /*name*/, const torch::nn::Module& module) {
    return dynamic_cast<const torch::nn::LinearImpl*>(&module) != nullptr;
  };
  EXPECT_EQ(apply_activation_checkpointing(net, linears).size(), 10u);
  remove_activation_checkpointing(net);
}

TEST(ModuleCheckpointingUse, WhatCannotBeChosenIsNamed) {
  const auto shared_net = std::make_shared<TestNet>(1);
  TestNet& net = *shared_net;
  EXPECT_THAT([&] { apply_activation_checkpointing(net, modules_named({"block"})); },
              ThrowsMessage<UsageError>(HasSubstr("chooses none of")));
  EXPECT_THAT([&] { apply_activation_checkpointing(net, modules_named({".*dropout"})); },
              ThrowsMessage<UsageError>(AllOf(HasSubstr("blocks0.dropout"), HasSubstr("choose the module around it"))));
  EXPECT_THAT([&] { apply_activation_checkpointing(net, nullptr); }, ThrowsMessage<UsageError>(HasSubstr("predicate")));
  EXPECT_THAT([&] { modules_named({"h[.)"}); }, ThrowsMessage<UsageError>(HasSubstr("h[.)")));
  const at::Tensor x = torch::ones({2}).requires_grad_(true);
  x.register_hook([&](const at::Tensor& /*gradient*/) { apply_activation_checkpointing(net, kBlocks); });
  EXPECT_THAT([&] { (x * 2).sum().backward(); }, ThrowsMessage<UsageError>(HasSubstr("outside of backward passes")));
}

TEST(ModuleCheckpointingUse, AChangeThatWouldMakeAnotherNumberIsAnError) {
  const auto shared_net = std::make_shared<TestNet>(2, 16, 0.0);
  TestNet& net = *shared_net;
  apply_activation_checkpointing(net, kBlocks);
  const at::Tensor loss = net.forward(test_input()).pow(2).mean();
  {
    const torch::NoGradGuard no_graph;
    net.blocks[1]->fc->weight.mul_(2);
  }
  EXPECT_THAT([&] { loss.backward(); },
              ThrowsMessage<UsageError>(HasSubstr("was changed in place after the module ran")));
  // What autograd itself would refuse.
  const auto changed = [&](const auto& change) {
    at::Tensor kept;
    torch::nn::Linear module(8, 8);
    apply_activation_checkpointing(*module, modules_named({""}));
    const at::Tensor y = (module(torch::ones({4, 8})) * 2).exp();
    const at::Tensor sum = (y * 3).sum();
    change(y);
    sum.backward();
  };
  EXPECT_THAT([&] { changed([](const at::Tensor& y) { y.detach().add_(1); }); },
              ThrowsMessage<UsageError>(HasSubstr("modified by an inplace operation")));
  remove_activation_checkpointing(net);
}

TEST(ModuleCheckpointingUse, MemoryThatIsWrittenByItsPointerIsFound) {
  torch::nn::Linear module(8, 8);
  apply_activation_checkpointing(*module, modules_named({""}));
  at::Tensor scale = module(torch::ones({4, 8})).detach().clone();
  for (int64_t i = 0; i < scale.numel(); ++i) scale.data_ptr<float>()[i] = 5;  // as a collective would
  const at::Tensor loss = (module(torch::ones({4, 8})) * scale).sum();
  EXPECT_THAT([&] { loss.backward(); },
              ThrowsMessage<UsageError>(AllOf(HasSubstr("aten::clone"), HasSubstr("by a pointer"))));
  remove_activation_checkpointing(*module);
}

TEST(ModuleCheckpointingUse, CollectivesInForwardAreSeen) {
  test::run_ranks(2, [](comm::Communicator& group) {
    torch::nn::Linear module(8, 8);
    {
      const torch::NoGradGuard no_graph;
      module->weight.copy_(torch::sin(torch::arange(64, torch::kFloat)).view({8, 8}));
      module->bias.zero_();
    }
    const at::Tensor x = torch::cos(torch::arange(32, torch::kFloat) + group.rank()).view({4, 8});
    const auto gradient = [&] {
      module->zero_grad();
      const at::Tensor h = module->forward(x).exp();
      const at::Tensor sum = h.detach().clone();
      const at::Tensor doubled = (sum * 2).sin();
      group.all_reduce(sum).wait();
      (module->forward(h / sum) * doubled * sum.log()).sum().backward();
      return module->weight.grad().clone();
    };
    const at::Tensor expected = gradient();
    apply_activation_checkpointing(*module, modules_named({""}));
    EXPECT_TRUE(torch::equal(gradient(), expected));
    EXPECT_GT(take_module_checkpoint_statistics().dropped_tensors, 0);
    remove_activation_checkpointing(*module);
  });
}

TEST(ModuleCheckpointingUse, AnOperatorThatFailsLeavesAllAsItWas) {
  const auto shared_net = std::make_shared<TestNet>(2, 16, 0.1, true);
  TestNet& net = *shared_net;
  const at::Tensor input = test_input();
  const auto loss = [&] { return net.forward(input).pow(2).mean(); };
  const std::vector<at::Tensor> expected = step_of(net, loss);
  apply_activation_checkpointing(net, kBlocks);
  EXPECT_THROW(net.blocks[1]->forward(torch::ones({2, 6, 5})), c10::Error);
  expect_same_tensors(step_of(net, loss), expected);
  // What a program throws between two operators of a block ends the block there.
  const auto interrupted = [&] {
    const at::Tensor half = net.blocks[0]->qkv(net.blocks[0]->ln1(torch::ones({2, 6, 16})));
    if (half.requires_grad()) throw std::runtime_error("between two operators");
  };
  EXPECT_THROW(interrupted(), std::runtime_error);
  take_module_checkpoint_statistics();
  expect_same_tensors(step_of(net, loss), expected);
  EXPECT_GT(take_module_checkpoint_statistics().dropped_tensors, 0) << "and the next ones drop theirs";
  remove_activation_checkpointing(net);
}

TEST(ModuleCheckpointingUse, RegionsOfCheckpointInsideAndAround) {
  const auto shared_net = std::make_shared<TestNet>(3, 16, 0.1, true);
  TestNet& net = *shared_net;
  const at::Tensor input = test_input();
  const auto loss = [&] {
    at::Tensor x = net.embed(input);
    x = checkpoint([&](const at::Tensor& t) { return net.blocks[0]->forward(t); }, x);
    x = net.blocks[1]->forward(x);
    x = x * checkpoint([](const at::Tensor& t) { return torch::dropout(t.sin(), 0.2, true); }, x);
    x = checkpoint([&](const at::Tensor& t) { return net.blocks[2]->forward(t.cos()); }, x);
    return net.head(x).pow(2).mean();
  };
  for (const Recompute recompute : kBothWays) expect_same_step(net, kBlocks, {.recompute = recompute}, loss);
}

// An autograd function whose work is hidden from those who watch operators.
struct Hidden : torch::autograd::Function<Hidden> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x) {
    at::Tensor result = x.clone();
    for (int64_t i = 0; i < result.numel(); ++i) result.data_ptr<float>()[i] *= 3;
    context->save_for_backward({x, result});
    return result;
  }
  static std::vector<at::Tensor> backward(torch::autograd::AutogradContext* context,
                                          std::vector<at::Tensor> gradients) {
    const auto saved = context->get_saved_variables();
    return {gradients[0] * 3 + 0 * saved[0] * saved[1]};
  }
};

TEST(ModuleCheckpointingUse, AutogradFunctionsOfAProgramKeepWhatTheyMake) {
  torch::nn::Linear module(8, 8);
  const at::Tensor x = torch::sin(torch::arange(32, torch::kFloat)).view({4, 8});
  for (const Recompute recompute : kBothWays) {
    expect_same_step(*module, modules_named({""}), {.recompute = recompute}, [&] {
      const at::Tensor h = Hidden::apply(module(x).exp() * 0.1);
      return (module(h.sin()) * h).sum();
    });
  }
}

TEST(ModuleCheckpointingUse, OperatorsThatAreKeptByName) {
  const auto shared_net = std::make_shared<TestNet>(2, 32, 0.0);
  TestNet& net = *shared_net;
  const at::Tensor input = test_input(32);
  const auto loss = [&] { return net.forward(input).pow(2).mean(); };
  const auto all = expect_same_step(net, kBlocks, {}, loss);
  std::vector<std::string> asked;
  const auto some = expect_same_step(net, kBlocks,
                                     {.keep =
                                          [&](std::string_view name) {
                                            asked.emplace_back(name);
                                            return name == "aten::gelu";
                                          }},
                                     loss);
  EXPECT_EQ(all.dropped_tensors - some.dropped_tensors, 2) << "one of each block";
  EXPECT_THAT(asked, testing::Contains("aten::mm"));
}

TEST(ModuleCheckpointingUse, AModuleRunsOftenAndSharesWeights) {
  const auto shared_net = std::make_shared<TestNet>(2, 16, 0.1);
  TestNet& net = *shared_net;
  net.blocks[1]->fc->weight = net.blocks[0]->fc->weight;
  const at::Tensor input = test_input();
  for (const Recompute recompute : kBothWays) {
    expect_same_step(net, kBlocks, {.recompute = recompute}, [&] {
      at::Tensor x = net.embed(input);
      for (int turn = 0; turn < 3; ++turn) {
        for (const auto& block : net.blocks) x = block->forward(x);
      }
      // Two graphs of the same modules, of which one is run first.
      const at::Tensor other = net.forward(input.flip(0)).pow(2).mean();
      other.backward();
      return net.head(x).pow(2).mean();
    });
  }
}

TEST(ModuleCheckpointingUse, BackwardOnAnotherThreadAndForwardThereKeepsAll) {
  const auto shared_net = std::make_shared<TestNet>(2, 16, 0.1);
  TestNet& net = *shared_net;
  const at::Tensor input = test_input();
  expect_same_step(net, kBlocks, {}, [&] {
    const at::Tensor loss = net.forward(input).pow(2).mean();
    std::thread([&] { loss.backward({}, /*retain_graph=*/true); }).join();
    return loss;
  });
  apply_activation_checkpointing(net, kBlocks);
  std::thread([&] {
    step_of(net, [&] { return net.forward(input).sum(); });
    EXPECT_EQ(take_module_checkpoint_statistics().regions, 0);
  }).join();
  remove_activation_checkpointing(net);
}

TEST(ModuleCheckpointingUse, NothingIsKeptAfterTheModuleAndItsGraphs) {
  c10::weak_intrusive_ptr<at::TensorImpl> weight(c10::intrusive_ptr<at::TensorImpl>{});
  {
    const auto shared_net = std::make_shared<TestNet>(1);
    TestNet& net = *shared_net;
    apply_activation_checkpointing(net, kBlocks);
    net.forward(test_input()).sum().backward();
    weight = c10::weak_intrusive_ptr<at::TensorImpl>(net.blocks[0]->fc->weight.getIntrusivePtr());
    EXPECT_FALSE(weight.expired());
  }
  EXPECT_TRUE(weight.expired());
}

TEST(ModuleCheckpointingUse, WithoutAGraphNothingIsDropped) {
  const auto shared_net = std::make_shared<TestNet>(1, 16, 0.0);
  TestNet& net = *shared_net;
  const at::Tensor expected = net.forward(test_input()).detach();
  apply_activation_checkpointing(net, kBlocks);
  take_module_checkpoint_statistics();
  {
    const torch::NoGradGuard no_graph;
    EXPECT_TRUE(torch::equal(net.forward(test_input()), expected));
  }
  EXPECT_EQ(take_module_checkpoint_statistics().dropped_tensors, 0);
  remove_activation_checkpointing(net);
}

}  // namespace
}  // namespace ds::recompute
