#include "zero/gather/parameter_gatherer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <vector>

#include "core/check.h"
#include "tests/support/thread_ranks.h"

namespace ds::zero {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr int64_t kWidth = 8;
constexpr int64_t kMatrix = kWidth * kWidth;  // elements of one layer's bucket, for up to 4 ranks

// Layers without bias, the same values on every rank; each layer has a bucket of its own.
class ShardedLayers {
 public:
  ShardedLayers(comm::Communicator& communicator, int layers, GatherLimits limits, bool with_node = false)
      : group_(all_of(communicator)), node_(with_node ? all_of(communicator) : nullptr) {
    torch::NoGradGuard no_grad;
    std::vector<LayoutParameter> shapes;
    for (int i = 0; i < layers; ++i) {
      const at::Tensor weight = torch::cos(torch::arange(kMatrix, torch::kDouble) * (i + 1.3)).view({kWidth, kWidth});
      whole.push_back(weight.to(torch::kFloat).set_requires_grad(true));
      weights.push_back(whole.back().detach().clone().set_requires_grad(true));
      parameters_.push_back({cat("layer", i), weights.back()});
      shapes.push_back({parameters_.back().name, kMatrix});
    }
    for (BucketLayout& layout : lay_out(shapes, {.world_size = communicator.size(), .max_bucket_elements = kMatrix})) {
      const at::Tensor values = flatten(layout, parameters_, at::kFloat);
      buckets_.emplace_back(std::move(layout), parameters_, values, at::kFloat);
    }
    std::vector<ParameterBucket*> all;
    for (ParameterBucket& bucket : buckets_) {
      bucket.shard(communicator.rank());
      all.push_back(&bucket);
    }
    gatherer = std::make_unique<ParameterGatherer>(all, GatherRoutes{*group_, node_.get()}, limits);
  }

  // Layers in the given order, and a loss.
  static at::Tensor loss(const std::vector<at::Tensor>& layers, const std::vector<int>& order) {
    at::Tensor x = torch::ones({2, kWidth});
    for (const int i : order) x = torch::tanh(torch::linear(x, layers[static_cast<size_t>(i)]));
    return x.pow(2).sum();
  }

  // One pass over sharded layers, against whole ones.
  void expect_pass(const std::vector<int>& order) {
    const at::Tensor expected = loss(whole, order);
    expected.backward();
    const at::Tensor found = loss(weights, order);
    EXPECT_TRUE(found.equal(expected));
    gatherer->begin_backward(/*update_follows=*/false);
    found.backward();
    gatherer->end_backward();
    gatherer->end_pass();
    for (size_t i = 0; i < whole.size(); ++i) {
      EXPECT_EQ(weights[i].grad().defined(), whole[i].grad().defined());
      if (whole[i].grad().defined()) EXPECT_TRUE(weights[i].grad().equal(whole[i].grad())) << "layer " << i;
    }
  }

  int64_t gathers() const { return group_->counters().calls[static_cast<size_t>(comm::CollectiveKind::kAllGather)]; }
  int whole_buckets() const {
    int count = 0;
    for (const ParameterBucket& bucket : buckets_) count += bucket.storage().allocated();
    return count;
  }

  std::vector<at::Tensor> whole;
  std::vector<at::Tensor> weights;

 private:
  static std::shared_ptr<comm::Communicator> all_of(comm::Communicator& communicator) {
    std::vector<int> ranks;
    for (int rank = 0; rank < communicator.size(); ++rank) ranks.push_back(rank);
    return communicator.new_group(ranks, "parameters");
  }
  std::shared_ptr<comm::Communicator> group_;
  std::shared_ptr<comm::Communicator> node_;
  std::vector<Parameter> parameters_;
  std::vector<ParameterBucket> buckets_;

 public:
  std::unique_ptr<ParameterGatherer> gatherer;  // refers to the buckets
};

const std::vector<int> kForward = {0, 1, 2, 3, 4};

// Ranks on devices compare it, where nothing compares what they meet in.
TEST(ParameterGatherer, DigestIsThatOfTheOrderOfGathers) {
  test::run_ranks(2, [](comm::Communicator& communicator) {
    const auto digest_of = [&](const std::vector<int>& order) {
      ShardedLayers layers(communicator, 3, {.max_reuse_distance = 0});
      layers.expect_pass(order);
      const uint64_t digest = layers.gatherer->take_gather_digest();
      EXPECT_EQ(layers.gatherer->take_gather_digest(), 0U);
      return digest;
    };
    const uint64_t digest = digest_of({0, 1, 2});
    EXPECT_NE(digest, 0U);
    EXPECT_EQ(digest_of({0, 1, 2}), digest);
    EXPECT_NE(digest_of({1, 0, 2}), digest);
    EXPECT_NE(digest_of({0, 1}), digest);
  });
}

TEST(ParameterGatherer, UnmodifiedCodeSeesWholeParameters) {
  for (const int world : {2, 3, 4}) {
    test::run_ranks(world, [&](comm::Communicator& communicator) {
      ShardedLayers layers(communicator, 5, {.max_reuse_distance = 0});
      EXPECT_EQ(layers.whole_buckets(), 0);
      for (int pass = 0; pass < 3; ++pass) layers.expect_pass(kForward);
      layers.gatherer->end_update();
      EXPECT_EQ(layers.whole_buckets(), 0);
    });
  }
}

TEST(ParameterGatherer, WithoutReuseAPassGathersForForwardAndForBackward) {
  test::run_ranks(2, [](comm::Communicator& communicator) {
    ShardedLayers layers(communicator, 5, {.max_reuse_distance = 0});
    layers.expect_pass(kForward);
    layers.gatherer->end_update();
    const int64_t before = layers.gathers();
    layers.expect_pass(kForward);
    // Layer 4 ends forward and begins backward, layer 3 is what comes next, and backward ends with layer 1: the input
    // of layer 0 wants no gradient.
    EXPECT_EQ(layers.gathers() - before, 5 + 2);
  });
}

TEST(ParameterGatherer, WhatIsUsedAgainSoonStays) {
  test::run_ranks(2, [](comm::Communicator& communicator) {
    ShardedLayers layers(communicator, 5, {});
    layers.expect_pass(kForward);
    layers.gatherer->end_update();
    for (int pass = 0; pass < 3; ++pass) {
      const int64_t before = layers.gathers();
      layers.expect_pass(kForward);
      EXPECT_EQ(layers.gathers() - before, pass == 0 ? 5 : 0) << "nothing changes between micro-batches";
    }
    layers.gatherer->end_update();
    EXPECT_EQ(layers.whole_buckets(), 0);
  });
}

TEST(ParameterGatherer, KeepsToTheLiveLimit) {
  for (const int64_t limit : {kMatrix, 2 * kMatrix, 3 * kMatrix}) {
    test::run_ranks(2, [&](comm::Communicator& communicator) {
      ShardedLayers layers(communicator, 5, {.max_live = limit});
      layers.expect_pass(kForward);
      layers.gatherer->take_peak_elements();
      for (int pass = 0; pass < 2; ++pass) {
        layers.expect_pass(kForward);
        EXPECT_LE(layers.gatherer->take_peak_elements(), limit);
      }
    });
  }
}

TEST(ParameterGatherer, PrefetchesInTheRecordedOrder) {
  for (const bool ahead : {true, false}) {
    test::run_ranks(2, [&](comm::Communicator& communicator) {
      ShardedLayers layers(communicator, 5, {.max_reuse_distance = 0, .prefetch = ahead ? 2 * kMatrix : 0});
      layers.expect_pass(kForward);
      layers.gatherer->end_update();
      const int64_t before = layers.gathers();
      torch::linear(torch::ones({1, kWidth}), layers.weights[0]);
      EXPECT_EQ(layers.gathers() - before, ahead ? 1 + 2 : 1);
    });
  }
}

TEST(ParameterGatherer, AnOrderThatChangesIsFollowedToo) {
  test::run_ranks(3, [](comm::Communicator& communicator) {
    ShardedLayers layers(communicator, 5, {.max_live = 3 * kMatrix, .max_reuse_distance = 0});
    const std::vector<std::vector<int>> orders = {kForward, {4, 3, 2, 1, 0}, {2, 2, 0}, kForward,
                                                  {1},      {0, 1, 0, 1, 0}, kForward,  {3, 1, 4, 1, 0, 2}};
    for (const std::vector<int>& order : orders) layers.expect_pass(order);
  });
}

TEST(ParameterGatherer, RanksThatWantDifferentParametersAreToldWhich) {
  test::run_ranks(2, [](comm::Communicator& communicator) {
    ShardedLayers layers(communicator, 5, {});
    EXPECT_THAT(
        [&] {
          torch::linear(torch::ones({1, kWidth}), layers.weights[communicator.rank() == 0 ? 1 : 3]);
          layers.gatherer->begin_backward(false);
        },
        ThrowsMessage<c10::Error>(AllOf(HasSubstr("bucket 1 (layer1)"), HasSubstr("bucket 3 (layer3)"))));
    EXPECT_THAT([&] { layers.gatherer->begin_backward(false); },
                ThrowsMessage<CommError>(HasSubstr("ranks issued different collectives")));
  });
}

TEST(ParameterGatherer, ARankThatWantsNothingFromItsNodeIsFoundToo) {
  test::run_ranks(2, [](comm::Communicator& communicator) {
    ShardedLayers layers(communicator, 5, {.max_reuse_distance = 0}, /*with_node=*/true);
    layers.expect_pass(kForward);
    EXPECT_GT(layers.gathers(), 0);
    const int64_t before = layers.gathers();
    layers.expect_pass(kForward);
    EXPECT_EQ(layers.gathers(), before);  // all of them in the node
    EXPECT_THAT(
        [&] {
          if (communicator.rank() == 0) torch::linear(torch::ones({1, kWidth}), layers.weights[3]);
          layers.gatherer->begin_backward(false);
        },
        ThrowsMessage<std::exception>(AllOf(HasSubstr("bucket 3 (layer3)"), HasSubstr("start of backward"))));
  });
}

// .data() has a version counter of its own; operators that change a list or their output are seen as well.
TEST(ParameterGatherer, AChangeInPlaceReachesTheSlicesAndIsToldWithTheNameOfTheParameter) {
  const std::vector<std::function<void(const at::Tensor&)>> changes = {
      [](const at::Tensor& weight) { weight.data().clamp_(-0.1, 0.1); },
      [](const at::Tensor& weight) { weight.data().select(0, 3).zero_(); },
      [](const at::Tensor& weight) { at::Tensor(weight.data()).index_put_({0}, 1.0); },
      [](const at::Tensor& weight) { at::_foreach_mul_({weight.data()}, 0.5); },
      [](const at::Tensor& weight) {
        at::Tensor out = weight.data();
        at::add_out(out, at::ones_like(out), 1.0);
      },
      [](const at::Tensor& weight) {
        const torch::NoGradGuard no_grad;
        weight.mul_(0.5);  // whose version tells too
      }};
  for (size_t i = 0; i < changes.size(); ++i) {
    test::run_ranks(2, [&](comm::Communicator& communicator) {
      ShardedLayers layers(communicator, 5, {});
      changes[i](layers.weights[2]);
      {
        const torch::NoGradGuard no_grad;
        changes[i](layers.whole[2]);
      }
      const std::vector<ChangedBucket> changed = layers.gatherer->take_changed();
      ASSERT_EQ(changed.size(), 1) << "change " << i;
      EXPECT_EQ(changed[0].bucket, 2);
      EXPECT_EQ(changed[0].parameter, "layer2");
      EXPECT_TRUE(layers.gatherer->take_changed().empty());
      layers.expect_pass(kForward);
    });
  }
}

TEST(ParameterGatherer, WhatChangesNoElementIsNoError) {
  test::run_ranks(2, [](comm::Communicator& communicator) {
    ShardedLayers layers(communicator, 5, {});
    for (at::Tensor& weight : layers.weights) {
      weight.data().unsqueeze_(0);
      weight.data().t_();
      at::Tensor copy = weight.data() * 2.0;
      copy.add_(weight.data());
      torch::zeros_like(weight).copy_(weight.detach());
      weight.set_requires_grad(false);
      weight.set_requires_grad(true);
    }
    layers.expect_pass(kForward);
  });
}

TEST(ParameterGatherer, AfterItsEndAReadIsAnErrorAndNoFault) {
  test::run_ranks(2, [](comm::Communicator& communicator) {
    ShardedLayers layers(communicator, 2, {});
    layers.gatherer.reset();
    EXPECT_THROW(torch::linear(torch::ones({1, kWidth}), layers.weights[0]), c10::Error);
  });
}

}  // namespace
}  // namespace ds::zero
