// Converted layers in modules: evaluation, recomputation, what is not converted, misuse.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "dsengine/activation_checkpoint.h"
#include "dsengine/errors.h"
#include "dsengine/module_checkpointing.h"
#include "layers/batch_norm/converted_layers.h"
#include "tests/layers/batch_norm/joined_batch.h"

namespace ds {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

struct TwoNormsImpl : torch::nn::Module {
  TwoNormsImpl() {
    body = register_module("body",
                           torch::nn::Sequential(torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 4, 3).bias(false)),
                                                 torch::nn::BatchNorm2d(4), torch::nn::ReLU(), torch::nn::Flatten()));
    head = register_module("head", torch::nn::BatchNorm1d(torch::nn::BatchNormOptions(16).affine(false)));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({16})));
  }
  at::Tensor forward(const at::Tensor& x) { return norm(head(body->forward(x))); }
  torch::nn::Sequential body{nullptr};
  torch::nn::BatchNorm1d head{nullptr};
  torch::nn::LayerNorm norm{nullptr};
};
TORCH_MODULE(TwoNorms);

// Parameters of the same values on all ranks.
TwoNorms same_model() {
  TwoNorms model;
  const at::NoGradGuard no_graph;
  int seed = 7;
  for (at::Tensor& parameter : model->parameters()) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(seed++));
    parameter.copy_(torch::randn(parameter.sizes(), generator, torch::kFloat));
  }
  return model;
}

at::Tensor images(int seed, int64_t count) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(seed));
  return torch::randn({count, 3, 4, 4}, generator, torch::kFloat);
}

TEST(ConvertSyncBatchNorm, NamesTheLayersOfAModule) {
  test::run_ranks(2, [](comm::Communicator& ranks) {
    TwoNorms model;
    EXPECT_THAT(convert_sync_batchnorm(*model, ranks), ElementsAre("body.1", "head"));
    torch::nn::Linear none(2, 2);
    EXPECT_THAT(convert_sync_batchnorm(*none, ranks), IsEmpty());
  });
}

TEST(ConvertSyncBatchNorm, EvaluationExchangesNothing) {
  test::run_ranks(2, [](comm::Communicator& ranks) {
    TwoNorms model = same_model();
    TwoNorms plain = same_model();
    convert_sync_batchnorm(*model, ranks);
    model->eval();
    plain->eval();
    if (ranks.rank() == 0) {  // the other does not come
      const at::Tensor found = model->forward(images(1, 3));
      EXPECT_TRUE(found.equal(plain->forward(images(1, 3))));
      const torch::InferenceMode inference;
      EXPECT_TRUE(model->forward(images(1, 3)).equal(found));
    }
  });
}

TEST(ConvertSyncBatchNorm, WithoutRunningStatisticsEvaluationIsTheRanksOwn) {
  test::run_ranks(2, [](comm::Communicator& ranks) {
    torch::nn::BatchNorm2d norm(torch::nn::BatchNormOptions(3).track_running_stats(false));
    convert_sync_batchnorm(*norm, ranks);
    norm->eval();
    const at::Tensor x = images(ranks.rank() + 1, 2);
    if (ranks.rank() == 0)
      EXPECT_TRUE(norm->forward(x).equal(torch::batch_norm(x, {}, {}, {}, {}, true, 0.1, 1e-5, true)));
  });
}

TEST(ConvertSyncBatchNorm, LayersThatAreNotConvertedStayAsTheyAre) {
  test::run_ranks(2, [](comm::Communicator& ranks) {
    TwoNorms converted = same_model();
    convert_sync_batchnorm(*converted, ranks);
    TwoNorms plain = same_model();
    const at::Tensor x = images(ranks.rank() + 1, 3);
    const at::Tensor mean = plain->body[0]->as<torch::nn::Conv2d>()->forward(x).mean({0, 2, 3});
    plain->forward(x).sum().backward();
    EXPECT_TRUE(plain->body[1]->as<torch::nn::BatchNorm2d>()->running_mean.allclose(mean * 0.1, 1e-5, 1e-6));
  });
}

// Ranks with parts of a batch, in 16 bits by autocast, under recomputation, or plainly, beside one with all of it.
void expect_trained_as_joined(const std::function<at::Tensor(TwoNorms&, const at::Tensor&)>& forward,
                              double tolerance) {
  TwoNorms whole = same_model();
  for (int step = 1; step <= 3; ++step) whole->forward(images(step, 5)).square().sum().backward();
  test::run_ranks(2, [&](comm::Communicator& ranks) {
    TwoNorms model = same_model();
    convert_sync_batchnorm(*model, ranks);
    for (int step = 1; step <= 3; ++step) {
      const at::Tensor all = images(step, 5);
      const at::Tensor own = ranks.rank() == 0 ? all.narrow(0, 0, 2) : all.narrow(0, 2, 3);
      forward(model, own).to(at::kFloat).square().sum().backward();
    }
    const auto expected = whole->named_parameters();
    for (const auto& item : model->named_parameters()) {
      at::Tensor sum = item.value().grad().clone();
      ranks.all_reduce(sum).wait();
      EXPECT_LE(test::difference(sum, expected[item.key()].grad()), tolerance) << item.key();
    }
    const auto buffers = whole->named_buffers();
    for (const auto& item : model->named_buffers()) {
      EXPECT_LE(test::difference(item.value(), buffers[item.key()]), tolerance) << item.key();
    }
  });
}

TEST(ConvertSyncBatchNorm, TrainsAsOneProcessWithTheJoinedBatch) {
  expect_trained_as_joined([](TwoNorms& model, const at::Tensor& x) { return model->forward(x); }, 2e-5);
}

TEST(ConvertSyncBatchNorm, RecomputationCountsABatchOnce) {
  expect_trained_as_joined(
      [](TwoNorms& model, const at::Tensor& x) {
        return recompute::checkpoint([model](const at::Tensor& y) mutable { return model->forward(y); }, x);
      },
      2e-5);
}

TEST(ConvertSyncBatchNorm, AModuleWhoseActivationsAreDroppedCountsABatchOnce) {
  for (const Recompute way : {Recompute::kEverything, Recompute::kPointwise}) {
    expect_trained_as_joined(
        [way](TwoNorms& model, const at::Tensor& x) {
          apply_activation_checkpointing(*model,
                                         [](const std::string& name, const torch::nn::Module&) { return name.empty(); },
                                         {.recompute = way});
          return model->forward(x);
        },
        2e-5);
  }
}

TEST(ConvertSyncBatchNorm, NestedRecomputationCountsABatchOnce) {
  expect_trained_as_joined(
      [](TwoNorms& model, const at::Tensor& x) {
        return recompute::checkpoint(
            [model](const at::Tensor& y) mutable {
              const at::Tensor inner =
                  recompute::checkpoint([model](const at::Tensor& z) mutable { return model->body->forward(z); }, y);
              return model->norm(model->head(inner));
            },
            x);
      },
      2e-5);
}

TEST(ConvertSyncBatchNorm, ALayerWithoutTensorsIsRefusedByName) {
  test::run_ranks(1, [](comm::Communicator& ranks) {
    torch::nn::Sequential model(
        torch::nn::BatchNorm1d(2),
        torch::nn::BatchNorm2d(torch::nn::BatchNormOptions(3).affine(false).track_running_stats(false)));
    try {
      convert_sync_batchnorm(*model, ranks);
      FAIL() << "no error";
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), HasSubstr("layer 1: expected a weight or running statistics"));
    }
  });
}

TEST(ConvertSyncBatchNorm, TrainingBeforeTheRanksAreKnownIsNamed) {
  torch::nn::BatchNorm2d norm(3);
  convert_sync_batchnorm(*norm);
  try {
    norm->forward(images(1, 2));
    FAIL() << "no error";
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), HasSubstr("converted without a group"));
  }
  norm->eval();
  EXPECT_EQ(norm->forward(images(1, 2)).size(0), 2);
}

TEST(ConvertSyncBatchNorm, OneValueOnAllRanksTogetherIsRefused) {
  test::run_ranks(2, [](comm::Communicator& ranks) {
    torch::nn::BatchNorm1d norm(3);
    convert_sync_batchnorm(*norm, ranks);
    const at::Tensor x = torch::ones({ranks.rank() == 0 ? 1 : 0, 3});
    try {
      torch::batch_norm(x, norm->weight, norm->bias, norm->running_mean, norm->running_var, true, 0.1, 1e-5, true);
      ADD_FAILURE() << "no error";
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), HasSubstr("expected more than 1 value per channel on all ranks together, found 1"));
    }
    EXPECT_TRUE(norm->running_mean.equal(torch::zeros({3})));
  });
}

TEST(ConvertSyncBatchNorm, ARankThatSkipsALayerIsNamed) {
  try {
    test::run_ranks(2, [](comm::Communicator& ranks) {
      TwoNorms model = same_model();
      convert_sync_batchnorm(*model, ranks);
      if (ranks.rank() == 1) {
        model->head->forward(torch::ones({2, 16}));
      } else {
        model->forward(images(1, 2));
      }
    });
    FAIL() << "no error";
  } catch (const test::RankFailure& failure) {
    EXPECT_THAT(failure.what(), HasSubstr("sync batch norm, statistics of body.1"));
    EXPECT_THAT(failure.what(), HasSubstr("sync batch norm, statistics of head"));
  }
}

// LibTorch computes it, to the bit, once computed and once computed again.
TEST(ConvertSyncBatchNorm, ARankAloneIsLibTorchs) {
  test::run_ranks(1, [](comm::Communicator& ranks) {
    for (const bool again : {false, true}) {
      TwoNorms model = same_model(), plain = same_model();
      convert_sync_batchnorm(*model, ranks);
      for (int step = 1; step <= 3; ++step) {
        const at::Tensor x = images(step, 4).requires_grad_(true);
        const auto forward = [&](const at::Tensor& y) { return model->forward(y); };
        const at::Tensor found = again ? recompute::checkpoint(forward, x) : forward(x);
        const at::Tensor expected = plain->forward(x);
        EXPECT_TRUE(found.equal(expected));
        found.square().sum().backward();
        expected.square().sum().backward();
      }
      const auto parameters = plain->named_parameters();
      for (const auto& item : model->named_parameters()) {
        EXPECT_TRUE(item.value().grad().equal(parameters[item.key()].grad())) << item.key();
      }
      const auto buffers = plain->named_buffers();
      for (const auto& item : model->named_buffers()) {
        EXPECT_TRUE(item.value().equal(buffers[item.key()])) << item.key();
      }
    }
  });
}

TEST(ConvertSyncBatchNorm, AnotherEngineTakesTheLayersOfOneThatHasEnded) {
  test::run_ranks(2, [](comm::Communicator& ranks) {
    TwoNorms model = same_model();
    convert_sync_batchnorm(*model);
    auto first = norm::give_ranks(norm::layers_without_ranks(*model), ranks);
    ASSERT_NE(first, nullptr);
    EXPECT_EQ(norm::give_ranks(norm::layers_without_ranks(*model), ranks), nullptr) << "the first one has them";
    first.reset();
    EXPECT_THROW(model->forward(images(1, 2)), UsageError);
    const auto second = norm::give_ranks(norm::layers_without_ranks(*model), ranks);
    ASSERT_NE(second, nullptr);
    model->forward(images(1, 2)).sum().backward();
    convert_sync_batchnorm(*model, ranks);  // the program's, which layers keep
    EXPECT_EQ(norm::give_ranks(norm::layers_without_ranks(*model), ranks), nullptr);
  });
}

TEST(ConvertSyncBatchNorm, ATensorThatItsModuleHasReplacedIsNoLayers) {
  torch::nn::BatchNorm2d layer(3);
  convert_sync_batchnorm(*layer);
  const at::Tensor old = layer->weight;
  EXPECT_NE(norm::find_converted(old, {}), nullptr);
  layer->weight = torch::ones({3}, torch::requires_grad());
  EXPECT_EQ(norm::find_converted(old, {}), nullptr);
  EXPECT_NE(norm::find_converted(layer->weight, layer->running_mean), nullptr) << "by its running mean";
}

TEST(ConvertSyncBatchNorm, DoubleBackwardIsRefused) {
  test::run_ranks(2, [](comm::Communicator& ranks) {
    torch::nn::BatchNorm2d norm(3);
    convert_sync_batchnorm(*norm, ranks);
    const at::Tensor x = images(1, 2).requires_grad_(true);
    const at::Tensor loss = norm->forward(x).pow(3).sum();
    EXPECT_THROW(torch::autograd::grad({loss}, {x}, {}, true, true), UsageError);
  });
}

}  // namespace
}  // namespace ds
