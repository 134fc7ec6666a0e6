// Where passes begin and end, told by hooks of tensors in plain backward passes.
#include "loops/backward_pass.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "dsengine/errors.h"

namespace ds::loops {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::ThrowsMessage;

// A leaf whose gradient's hook enters, and what has happened, in order.
struct Watched {
  Watched()
      : pass({.begin = [this] { note("begin", fails_at_begin); },
              .end = [this] { note("end", fails_at_end); },
              .abandon = [this] { events.emplace_back("abandon"); }}) {}

  at::Tensor leaf(const std::string& name) {
    at::Tensor tensor = torch::ones({3}, torch::requires_grad());
    tensor.register_hook([this, name](const at::Tensor&) {
      pass.enter();
      events.push_back(name);
      if (name == fails_at) throw std::runtime_error("a hook that throws");
    });
    return tensor;
  }
  void note(const std::string& what, bool fails) {
    events.push_back(what);
    if (fails) throw std::runtime_error(what + " that throws");
  }
  std::vector<std::string> take() { return std::exchange(events, {}); }

  std::vector<std::string> events;
  std::string fails_at;
  bool fails_at_begin = false;
  bool fails_at_end = false;
  BackwardPass pass;
};

// Not seen by autograd as an input of the function.
struct Captured {
  at::Tensor weight;
};

// Runs backward() of its own inside backward: what reentrant activation checkpointing does.
struct Inner : torch::autograd::Function<Inner> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const Captured& captured) {
    context->save_for_backward({x});
    context->saved_data["weight"] = captured.weight;
    return x * captured.weight.detach();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const torch::AutoGradMode grad(true);
    const at::Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    (x * context->saved_data["weight"].toTensor()).backward(gradients[0]);
    return {x.grad(), at::Tensor()};
  }
};

TEST(BackwardPass, BeginsWithItsFirstHookAndEndsBeforeBackwardReturns) {
  Watched watched;
  const at::Tensor a = watched.leaf("a");
  const at::Tensor b = watched.leaf("b");
  for (int step = 0; step < 2; ++step) {
    const at::Tensor loss = ((a * 2).sin() * b).sum();
    EXPECT_FALSE(watched.pass.running());
    loss.backward();
    EXPECT_THAT(watched.take(), ElementsAre("begin", testing::_, testing::_, "end"));
    EXPECT_FALSE(watched.pass.running());
  }
  (torch::ones({3}, torch::requires_grad()) * 2).sum().backward();
  EXPECT_THAT(watched.take(), ElementsAre()) << "a pass that does not come by is none of its business";
}

TEST(BackwardPass, EndsOnceGradientsAreThere) {
  at::Tensor leaf;
  at::Tensor seen;
  BackwardPass pass({.begin = [] {}, .end = [&] { seen = leaf.grad().clone(); }, .abandon = [] {}});
  leaf = torch::ones({3}, torch::requires_grad());
  leaf.register_hook([&](const at::Tensor&) { pass.enter(); });
  (leaf * 5).sum().backward();
  EXPECT_TRUE(torch::equal(seen, torch::full({3}, 5.0)));
}

TEST(BackwardPass, PassesInsideAPassBelongToIt) {
  Watched watched;
  const at::Tensor a = watched.leaf("a");
  const at::Tensor b = watched.leaf("b");
  const at::Tensor c = watched.leaf("c");
  const at::Tensor x = Inner::apply(Inner::apply(a * 1, Captured{b}), Captured{c});  // all of b and c inside
  x.sum().backward();
  EXPECT_THAT(watched.take(), ElementsAre("begin", "c", "b", "a", "end"));
  Inner::apply(torch::ones({3}, torch::requires_grad()), Captured{b}).sum().backward();
  EXPECT_THAT(watched.take(), ElementsAre("begin", "b", "end")) << "all of it was inside";
  EXPECT_FALSE(watched.pass.running());
}

TEST(BackwardPass, AHookThatThrowsEndsThePassAndTheNextOneIsNew) {
  Watched watched;
  const at::Tensor a = watched.leaf("a");
  for (int step = 0; step < 2; ++step) {
    watched.fails_at = "a";
    EXPECT_THAT([&] { (a * 2).sum().backward(); }, ThrowsMessage<std::runtime_error>(HasSubstr("a hook that throws")));
    EXPECT_THAT(watched.take(), ElementsAre("begin", "a", "abandon"));
    EXPECT_FALSE(watched.pass.running());
    watched.fails_at.clear();
    (a * 2).sum().backward();
    EXPECT_THAT(watched.take(), ElementsAre("begin", "a", "end"));
  }
}

TEST(BackwardPass, AThrowInsideAPassInsideEndsBoth) {
  Watched watched;
  const at::Tensor a = watched.leaf("a");
  const at::Tensor b = watched.leaf("b");
  watched.fails_at = "b";
  EXPECT_THAT([&] { Inner::apply(a * 1, Captured{b}).sum().backward(); },
              ThrowsMessage<std::runtime_error>(HasSubstr("a hook that throws")));
  EXPECT_THAT(watched.take(), ElementsAre("begin", "b", "abandon"));
  watched.fails_at = "a";  // after the inner one has handed its end over
  EXPECT_THROW(Inner::apply(a * 1, Captured{b}).sum().backward(), std::runtime_error);
  EXPECT_THAT(watched.take(), ElementsAre("begin", "b", "a", "abandon"));
}

TEST(BackwardPass, WhatItsEndsThrowComesOutOfBackward) {
  Watched watched;
  const at::Tensor a = watched.leaf("a");
  watched.fails_at_begin = true;
  EXPECT_THAT([&] { (a * 2).sum().backward(); }, ThrowsMessage<std::runtime_error>(HasSubstr("begin that throws")));
  EXPECT_THAT(watched.take(), ElementsAre("begin", "abandon"));
  watched.fails_at_begin = false;
  watched.fails_at_end = true;
  EXPECT_THAT([&] { (a * 2).sum().backward(); }, ThrowsMessage<std::runtime_error>(HasSubstr("end that throws")));
  EXPECT_THAT(watched.take(), ElementsAre("begin", "a", "end", "abandon"));
  EXPECT_FALSE(watched.pass.running());
}

TEST(BackwardPass, OutsideOfBackwardThereIsNone) {
  Watched watched;
  EXPECT_THAT([&] { watched.pass.enter(); }, ThrowsMessage<UsageError>(HasSubstr("outside of one")));
  EXPECT_THAT(watched.take(), ElementsAre());
}

TEST(BackwardPass, MayBeDestroyedInsideAPass) {
  auto watched = std::make_unique<BackwardPass>(PassEvents{[] {}, [] { FAIL(); }, [] { FAIL(); }});
  const at::Tensor a = torch::ones({3}, torch::requires_grad());
  a.register_hook([&](const at::Tensor&) {
    watched->enter();
    watched.reset();
  });
  (a * 2).sum().backward();
  EXPECT_TRUE(a.grad().defined());
}

}  // namespace
}  // namespace ds::loops
