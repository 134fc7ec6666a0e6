// What all optimizers share: states, scales, dtypes, chunks, checks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "optim/chunked_update.h"
#include "optim/muon.h"
#include "tests/optim/sharded_model.h"
#include "tests/support/thrown.h"

namespace ds::optimizers {
namespace {

OptimizerOptions options_for(const std::string& type) {
  OptimizerOptions options{.type = type, .groups = {default_group_options(type)}};
  options.groups[0].lr = 0.01;
  if (type == "SGD") options.groups[0].momentum = 0.9;
  if (type == "Muon") options.groups.push_back(default_aux_adam_options());
  return options;
}

std::vector<std::vector<int64_t>> buckets_for(const std::string& type) {
  return type == "Muon" ? muon_buckets() : one_bucket();
}

class EveryOptimizer : public testing::TestWithParam<std::string> {
 protected:
  ShardedModel make(at::ScalarType master = at::kFloat) const {
    return {options_for(GetParam()), buckets_for(GetParam()), std::make_shared<Alone>(), master};
  }
  at::Tensor weights_after(int64_t steps, at::ScalarType gradient, double scale, at::ScalarType master = at::kFloat) {
    ShardedModel model = make(master);
    model.run(1, steps + 1, gradient, scale);
    return model.weights();
  }
};

TEST_P(EveryOptimizer, AppliesThePowerOfTwoOfALossScaleExactly) {
  EXPECT_TRUE(at::equal(weights_after(5, at::kFloat, 1.0), weights_after(5, at::kFloat, 1.0 / 1024)));
}

TEST_P(EveryOptimizer, AppliesAClippingFactor) {
  EXPECT_TRUE(at::allclose(weights_after(5, at::kFloat, 1.0), weights_after(5, at::kFloat, 0.3), 1e-5, 1e-6));
}

// Bits: a bfloat16 gradient is the float32 gradient of the same values, converted chunk by chunk.
TEST_P(EveryOptimizer, TakesBfloat16Gradients) {
  ShardedModel half = make();
  ShardedModel full = make();
  for (int64_t step = 1; step <= 5; ++step) {
    half.run(step, step + 1, at::kBFloat16);
    full.optimizer().begin_step();
    for (int64_t b = 0; b < full.optimizer().slice_count(); ++b) {
      const Slice& slice = full.optimizer().slice(b);
      at::Tensor gradient = at::zeros_like(slice.master);
      for (const Segment& s : slice.segments) {
        gradient.narrow(0, s.slice_offset, s.length).copy_(gradient_of(step, s.parameter).to(at::kBFloat16));
      }
      full.optimizer().update(b, gradient, 1.0);
    }
  }
  EXPECT_TRUE(at::equal(half.weights(), full.weights()));
}

TEST_P(EveryOptimizer, KeepsBfloat16MastersNearTheirFloat32Run) {
  const at::Tensor exact = weights_after(3, at::kFloat, 1.0);
  EXPECT_LT((weights_after(3, at::kFloat, 1.0, at::kBFloat16) - exact).abs().max().item<double>(), 0.05);
}

TEST_P(EveryOptimizer, UpdatesFloat64MastersInFloat64) {
  ShardedModel model = make(at::kDouble);
  model.run(1, 6);
  EXPECT_LT((model.weights() - weights_after(5, at::kFloat, 1.0)).abs().max().item<double>(), 1e-4);
  for (const auto& [name, state] : model.optimizer().states(0)) EXPECT_EQ(state.scalar_type(), at::kDouble) << name;
}

TEST_P(EveryOptimizer, StatesAreZeroedFlatAndCounted) {
  ShardedModel model = make();
  int64_t bytes = 0;
  int64_t bound = 0;
  for (int64_t b = 0; b < model.optimizer().slice_count(); ++b) {
    const int64_t numel = model.optimizer().slice(b).master.numel();
    bound += numel * model.optimizer().traits().state_bytes_per_element;
    for (const auto& [name, state] : model.optimizer().states(b)) {
      EXPECT_EQ(state.numel(), numel) << name;
      EXPECT_EQ(state.scalar_type(), at::kFloat) << name;
      EXPECT_EQ(state.abs().max().item<double>(), 0.0) << name;
      bytes += static_cast<int64_t>(state.nbytes());
    }
  }
  int64_t shared = 0;
  for (const auto& [name, state] : model.optimizer().shared_states()) shared += static_cast<int64_t>(state.nbytes());
  EXPECT_EQ(model.optimizer().state_bytes(), bytes + shared);
  if (GetParam() == "Muon") {
    EXPECT_LT(bytes, bound);
  } else {
    EXPECT_EQ(bytes, bound);
  }
}

TEST_P(EveryOptimizer, ContinuesFromCopiedStates) {
  ShardedModel first = make();
  first.run(1, 4);
  ShardedModel second = make();
  second.optimizer().set_step_count(first.optimizer().step_count());
  for (int64_t b = 0; b < first.optimizer().slice_count(); ++b) {
    second.optimizer().slice(b).master.copy_(first.optimizer().slice(b).master);
    const NamedStates from = first.optimizer().states(b);
    const NamedStates to = second.optimizer().states(b);
    for (size_t i = 0; i < from.size(); ++i) to[i].second.copy_(from[i].second);
  }
  const NamedStates shared = first.optimizer().shared_states();
  for (size_t i = 0; i < shared.size(); ++i) second.optimizer().shared_states()[i].second.copy_(shared[i].second);
  second.optimizer().states_changed(/*rank_states=*/true);
  first.run(4, 8);
  second.run(4, 8);
  EXPECT_TRUE(at::equal(first.weights(), second.weights()));
}

INSTANTIATE_TEST_SUITE_P(Optimizers, EveryOptimizer,
                         testing::Values("Adam", "AdamW", "SGD", "Adagrad", "Lion", "Lamb", "Muon", "RMSprop", "Adamax",
                                         "NAdam", "RAdam", "Adadelta"),
                         [](const auto& test) { return test.param; });

Slice flat_slice(int64_t numel) { return {.master = at::ones({numel}), .exchange = std::make_shared<Alone>()}; }

// Across the border of a conversion chunk, with elements that are no parameter's.
TEST(SliceUpdate, ConvertsChunkByChunk) {
  const int64_t numel = (int64_t{1} << 19) + 12345;
  const auto run = [&](at::ScalarType type) {
    const auto optimizer = make_optimizer({.type = "AdamW"});
    optimizer->add_slice(flat_slice(numel));
    at::manual_seed(3);
    const at::Tensor gradient = at::randn({numel}).to(at::kBFloat16);
    for (int step = 0; step < 3; ++step) {
      optimizer->begin_step();
      optimizer->update(0, gradient.to(type, /*non_blocking=*/false, /*copy=*/true), 0.5);
    }
    return optimizer->slice(0).master;
  };
  EXPECT_TRUE(at::equal(run(at::kBFloat16), run(at::kFloat)));
}

TEST(SliceUpdate, AFactorOfOneIsNotPassedOn) {
  const at::Tensor master = at::ones({3});
  EXPECT_FALSE(fused_grad_scale(1.0, master).has_value());
  EXPECT_EQ(fused_grad_scale(0.25, master)->item<double>(), 4.0);
}

// 0.1 in float32 is wrong from its 8th digit on.
TEST(SliceUpdate, AFactorOfFloat64LosesNoDigits) {
  const at::Tensor master = at::ones({3}, at::kDouble);
  const at::Tensor gradient = at::full({3}, 3.0, at::kDouble);
  EXPECT_FALSE(fused_grad_scale(0.1, master).has_value());
  scale_wide(gradient, 0.1);
  EXPECT_TRUE(at::equal(gradient, at::full({3}, 3.0 * 0.1, at::kDouble)));
}

// A gradient of another dtype is converted first: 3 * 0.1 in bfloat16 is wrong from its third digit on.
TEST(SliceUpdate, AFactorIsNotRoundedToTheDtypeOfTheGradient) {
  for (const char* type : {"AdamW", "Adagrad", "SGD"}) {
    const auto master_after = [&](at::ScalarType gradient) {
      const auto optimizer = make_optimizer({.type = type, .groups = {{.lr = 0.5, .eps = 1.0}}});
      optimizer->add_slice({.master = at::ones({3}, at::kDouble), .exchange = std::make_shared<Alone>()});
      optimizer->begin_step();
      optimizer->update(0, at::full({3}, 3.0, gradient), 0.1);
      return optimizer->slice(0).master;
    };
    for (const at::ScalarType gradient : {at::kBFloat16, at::kHalf, at::kFloat}) {
      EXPECT_TRUE(at::equal(master_after(gradient), master_after(at::kDouble))) << type << ", " << gradient;
    }
  }
}

TEST(Adam, WithoutBiasCorrectionTheFirstStepIsTheRawMean) {
  const auto optimizer = make_optimizer({.type = "Adam",
                                         .groups = {{.lr = 1.0, .beta1 = 0.9, .beta2 = 0.99, .eps = 0}},
                                         .values = {.bias_correction = false}});
  optimizer->add_slice(flat_slice(4));
  optimizer->begin_step();
  optimizer->update(0, at::full({4}, 2.0), 1.0);
  // m = 0.1 g, v = 0.01 g^2: m / sqrt(v) = 1.
  EXPECT_TRUE(at::allclose(optimizer->slice(0).master, at::zeros({4}), 0, 1e-6));
}

TEST(Lion, LeavesWeightsWithoutGradientAlone) {
  const auto optimizer = make_optimizer({.type = "Lion"});
  optimizer->add_slice(flat_slice(4));
  optimizer->begin_step();
  optimizer->update(0, at::zeros({4}), 1.0);
  EXPECT_TRUE(at::equal(optimizer->slice(0).master, at::ones({4})));
}

TEST(Muon, PicksMatricesByShapeAndName) {
  EXPECT_TRUE(uses_muon({"h.0.attn.qkv.weight", {8, 4}, 32}));
  EXPECT_TRUE(uses_muon({"conv.weight", {8, 4, 3, 3}, 288}));
  EXPECT_FALSE(uses_muon({"h.0.attn.qkv.bias", {8}, 8}));
  EXPECT_FALSE(uses_muon({"wte.weight", {8, 4}, 32, {"lm_head.weight"}}));  // one tensor under two names
  EXPECT_FALSE(uses_muon({"embed_tokens.weight", {8, 4}, 32}));
  EXPECT_FALSE(uses_muon({"lm_head.weight", {8, 4}, 32}));
}

TEST(Muon, ViewsAConvolutionAsAMatrix) {
  const std::vector<ParameterInfo> parameters = {{"conv.weight", {4, 2, 3, 3}, 72}};
  const auto optimizer = make_optimizer({.type = "Muon", .groups = {default_group_options("Muon")}});
  Slice slice = flat_slice(72);
  slice.segments = slice.bucket_segments = {{0, 0, 0, 72}};
  slice.parameters = &parameters;
  optimizer->add_slice(std::move(slice));
  optimizer->begin_step();
  const at::Tensor gradient = uniform(9, 72);
  optimizer->update(0, gradient.clone(), 1.0);
  const at::Tensor direction = orthogonalize(gradient.view({4, 18}), NewtonSchulzMethod::kGram).flatten();
  EXPECT_TRUE(at::allclose(optimizer->slice(0).master, 1.0 - 0.02 * direction, 0, 1e-6));
}

// Newton-Schulz as it is defined, of one block, in plain float32.
at::Tensor plain_step(const at::Tensor& u) {
  const bool tall = u.size(0) > u.size(1);
  at::Tensor x = (tall ? u.t() : u) / (u.norm() + 1e-7);
  for (int i = 0; i < 5; ++i) {
    const at::Tensor gram = x.mm(x.t());
    x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram.mm(gram)).mm(x);
  }
  const double factor = std::sqrt(std::max(1.0, static_cast<double>(u.size(0)) / static_cast<double>(u.size(1))));
  return (tall ? x.t() : x) * factor;
}

TEST(Muon, MakesHeadsOrthogonalByThemselves) {
  // Six heads of 4 rows that are wide, three of 8 that are tall; the last matrix is one.
  const std::vector<ParameterInfo> parameters = {
      {"attn.qkv.weight", {24, 10}, 240}, {"attn.q_proj.weight", {24, 5}, 120}, {"mlp.weight", {6, 10}, 60}};
  const std::vector<int64_t> rows = {4, 8, 0};
  for (const char* method : {"standard", "gram"}) {
    GroupOptions group = default_group_options("Muon");
    group.weight_decay = 0.1;
    const auto optimizer =
        make_optimizer({.type = "Muon", .groups = {group}, .values = {.ns_method = method}, .block_rows = rows});
    Slice slice = flat_slice(420);
    slice.segments = slice.bucket_segments = {{0, 0, 0, 240}, {1, 0, 240, 120}, {2, 0, 360, 60}};
    slice.parameters = &parameters;
    optimizer->add_slice(std::move(slice));
    at::Tensor expected = optimizer->slice(0).master.clone();
    const at::Tensor momentum = at::zeros({420});
    for (int64_t step = 1; step <= 3; ++step) {
      const at::Tensor gradient = uniform(static_cast<uint64_t>(step), 420);
      optimizer->begin_step();
      optimizer->update(0, gradient.clone(), 1.0);
      momentum.lerp_(gradient, 1 - group.momentum);
      const at::Tensor u = gradient.lerp(momentum, group.momentum);
      expected.mul_(1 - group.lr * group.weight_decay);
      int64_t begin = 0;
      for (size_t p = 0; p < parameters.size(); ++p) {
        const int64_t block = rows[p] > 0 ? rows[p] : parameters[p].sizes[0];
        const int64_t numel = block * parameters[p].sizes[1];
        for (int64_t end = begin + parameters[p].numel; begin < end; begin += numel) {
          const at::Tensor own = plain_step(u.narrow(0, begin, numel).view({block, parameters[p].sizes[1]}));
          expected.narrow(0, begin, numel).sub_(own.reshape({-1}), group.lr);
        }
      }
      EXPECT_TRUE(at::allclose(optimizer->slice(0).master, expected, 0, 1e-5)) << step;
    }
  }
}

// A stage of a pipeline whose parameters are all frozen has no slices, and may be the one that a checkpoint is read
// from.
TEST(NAdam, TheProductOfMomentaIsThatOfTheStepsAlsoWithoutSlices) {
  const auto with = make_optimizer({.type = "NAdam", .groups = {{.lr = 0.01}}});
  const auto without = make_optimizer({.type = "NAdam", .groups = {{.lr = 0.01}}});
  with->add_slice(flat_slice(4));
  for (int step = 0; step < 3; ++step) {
    for (const auto& optimizer : {with.get(), without.get()}) optimizer->begin_step();
    with->update(0, at::ones({4}), 1.0);
  }
  const at::Tensor product = with->shared_states()[0].second.clone();
  EXPECT_LT(product.item<double>(), 1.0);
  EXPECT_TRUE(without->shared_states()[0].second.equal(product));
  for (const auto& optimizer : {with.get(), without.get()}) {  // taken back, and made again
    optimizer->set_step_count(2);
    optimizer->begin_step();
    EXPECT_TRUE(optimizer->shared_states()[0].second.equal(product));
  }
}

template <class Error = UsageError, class Action>
std::string error_of(Action action) {
  return test::thrown_by<Error>(action);
}

TEST(Errors, SayWhatWasExpected) {
  using testing::HasSubstr;
  const auto adam = make_optimizer({});
  EXPECT_THAT(error_of([&] {
                adam->add_slice({.master = at::ones({2, 2}), .exchange = std::make_shared<Alone>()});
              }),
              HasSubstr("expected a flat contiguous tensor"));
  EXPECT_THAT(error_of([&] {
                Slice slice = flat_slice(2);
                slice.group = 1;
                adam->add_slice(slice);
              }),
              HasSubstr("expected a group below 1, found 1"));
  EXPECT_THAT(error_of([&] { adam->add_slice({.master = at::ones({2})}); }), HasSubstr("exchange"));
  adam->add_slice(flat_slice(4));
  EXPECT_THAT(error_of([&] { adam->update(0, at::ones({4}), 1.0); }), HasSubstr("begin_step()"));
  adam->begin_step();
  EXPECT_THAT(error_of([&] { adam->update(1, at::ones({4}), 1.0); }), HasSubstr("slice index below 1, found 1"));
  EXPECT_THAT(error_of([&] { adam->update(0, at::ones({5}), 1.0); }), HasSubstr("[4] on cpu, found Float [5] on cpu"));
}

TEST(Errors, SegmentsMustFit) {
  const auto add = [](const Segment& segment) {
    Slice slice = flat_slice(198);
    slice.segments = {segment};
    slice.parameters = &model_parameters();
    make_optimizer({})->add_slice(slice);
  };
  using testing::HasSubstr;
  EXPECT_THAT(error_of([&] { add({0, 50, 0, 20}); }), HasSubstr("inside the 60 elements of h.weight"));
  EXPECT_THAT(error_of([&] { add({0, 0, 190, 20}); }), HasSubstr("inside 198 elements"));
  EXPECT_THAT(error_of([&] { add({6, 0, 0, 1}); }), HasSubstr("parameter index below 6, found 6"));
}

TEST(Errors, LambAndMuonNeedWholeParameters) {
  Slice slice = flat_slice(198);
  slice.segments = {{0, 0, 0, 30}};
  slice.parameters = &model_parameters();
  EXPECT_THAT(error_of([&] { make_optimizer({.type = "Lamb"})->add_slice(slice); }),
              testing::HasSubstr("expected the 60 elements of h.weight, found 30"));
  slice.segments = {{0, 0, 0, 60}, {2, 0, 60, 7}};
  EXPECT_THAT(error_of([&] { make_optimizer({.type = "Muon"})->add_slice(slice); }),
              testing::HasSubstr("found h.weight and h.bias in group 0"));
}

TEST(Errors, BadOptions) {
  using testing::HasSubstr;
  EXPECT_THAT(error_of<ConfigError>([] { make_optimizer({.type = "AdamX"}); }), HasSubstr("found \"AdamX\""));
  EXPECT_THAT(error_of<ConfigError>([] { make_optimizer({.groups = {}}); }), HasSubstr("parameter group"));
  EXPECT_THAT(error_of<ConfigError>([] { make_optimizer({.groups = {{.lr = -1}}}); }),
              HasSubstr("params.lr: expected"));
  EXPECT_THAT(error_of<ConfigError>([] { make_optimizer({.groups = {{.beta2 = 1}}}); }), HasSubstr("betas[1]"));
  EXPECT_THAT(error_of<ConfigError>([] { make_optimizer({.type = "SGD", .values = {.nesterov = true}}); }),
              HasSubstr("nesterov"));
  EXPECT_THAT(error_of<ConfigError>([] { make_optimizer({.type = "Lamb", .values = {.min_coeff = 20}}); }),
              HasSubstr("min_coeff"));
}

}  // namespace
}  // namespace ds::optimizers
