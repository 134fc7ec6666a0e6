// The comparison of rules with the whole: it agrees with right ones on real models, and finds wrong ones.
#include "parallel/rules/rules.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "dsengine/errors.h"
#include "parallel/rules/operand.h"
#include "tests/parallel/llama.h"
#include "tests/parallel/split_ranks.h"

namespace ds::parallel {
namespace {

using enum Style;
using testing::HasSubstr;

TEST(Verify, EveryRuleOfALlamaAgrees) {
  torch::manual_seed(7);
  const at::Tensor tokens = at::randint(96, {2, 8}, at::kLong);
  expect_same_as_whole<Llama>([] { return std::make_shared<Llama>(); },
                              [&](Llama& model) { return model.forward(tokens, tokens); },
                              {.ranks = 2,
                               .rules = {{.pattern = ".*[qkv]_proj", .style = kColumn},
                                         {.pattern = ".*o_proj", .style = kRow},
                                         {.pattern = ".*(gate|up)_proj", .style = kColumn},
                                         {.pattern = ".*down_proj", .style = kRow},
                                         {.pattern = "embed_tokens|lm_head", .style = kVocabulary}},
                               .verify = true});
}

// What verify_rule says of a rule for x * w with x cut along its rows.
std::string verdict(const Rule& rule) {
  std::string result;
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    const std::shared_ptr<Axis> axis = make_axis(shared(communicator));
    const at::Tensor x = distribute(at::arange(8, at::kFloat).view({4, 2}) + 1, axis, 0);
    const at::Tensor w = at::ones({2}).requires_grad_();
    const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::mul", "Tensor");
    torch::jit::Stack stack = {x, w};
    try {
      verify_rule(rule, Call(op, stack, axis));
    } catch (const InternalError& error) {
      if (communicator.rank() == 0) result = error.what();
    }
    EXPECT_TRUE(stack[0].toTensor().is_same(x)) << "the call stays as it is";
    EXPECT_FALSE(is_verifying());
  });
  return result;
}

TEST(Verify, FindsARuleWithAWrongResult) {
  const auto product = [](Call& call, const at::Tensor& w, double factor) {
    const Operand x = call.operand(0);
    return call.finish_split(x.tensor * w * factor, *x.cut, x.sizes);
  };
  EXPECT_EQ(verdict([&](Call& call) { return product(call, for_parts(call.operand(1), call.axis()), 1); }), "");
  EXPECT_THAT(verdict([&](Call& call) { return product(call, for_parts(call.operand(1), call.axis()), 1.1); }),
              HasSubstr("the rule for aten::mul disagrees with the operator on joined tensors, in result 0"));
  EXPECT_THAT(verdict([&](Call& call) { return product(call, call.operand(1).tensor, 1); }), HasSubstr("in gradient 0"))
      << "each rank's use gives a part of the gradient, which must be added up";
  EXPECT_EQ(verdict([&](Call& /*call*/) { return Outcome::kJoin; }), "");
}

TEST(Verify, FindsALostGradientValuesThatAreNotFiniteAndAnotherDtype) {
  const auto changed = [](const std::function<at::Tensor(const at::Tensor&)>& change) {
    return verdict([&](Call& call) {
      const Operand x = call.operand(0);
      return call.finish_split(change(x.tensor * for_parts(call.operand(1), call.axis())), *x.cut, x.sizes);
    });
  };
  EXPECT_EQ(changed([](const at::Tensor& y) { return y; }), "");
  EXPECT_THAT(changed([](const at::Tensor& y) { return y.detach(); }), HasSubstr("in gradient 0"));
  EXPECT_THAT(changed([](const at::Tensor& y) { return y / 0; }), HasSubstr("in result 0: one has NaN or infinite"));
  EXPECT_THAT(changed([](const at::Tensor& y) { return y * NAN; }), HasSubstr("in result 0: one has NaN or infinite"));
  EXPECT_THAT(changed([](const at::Tensor& y) { return y.to(at::kDouble); }), HasSubstr("in result 0: dtypes"));
}

TEST(Verify, MemoryThatIsLeftAsItIsIsNotCompared) {
  test::run_ranks(2, [](comm::Communicator& communicator) {
    const std::shared_ptr<Axis> axis = make_axis(shared(communicator));
    axis->verify(true);
    const at::Tensor x = distribute(at::ones({4, 2}), axis, 0);
    for (int i = 0; i < 20; ++i) {
      const at::Tensor filled = at::empty({4, 2}).fill_(i);  // what the next one finds in memory
      EXPECT_TRUE(is_split(at::empty_like(x)));
    }
  });
}

}  // namespace
}  // namespace ds::parallel
