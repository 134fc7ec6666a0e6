// Tables whose rows are sharded (stage 3): each way to read them, and what is none. Training, memory, gradients and
// checkpoints of all stages: row_wise_test.cc.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <optional>

#include "config/plan/plan.h"
#include "core/check.h"
#include "dsengine/activation_checkpoint.h"
#include "dsengine/ema.h"
#include "dsengine/engine.h"
#include "dsengine/zero.h"
#include "profiling/tensor_memory.h"
#include "tests/engine/row_net.h"
#include "tests/model/small_run.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

// Tables that are read in each way: twice in a step, with padding, inside of a recomputed region, and by bags.
struct ReadsNetImpl : torch::nn::Module {
  explicit ReadsNetImpl(bool sparse = true) {
    using namespace torch::nn;
    words = register_module("words", Embedding(EmbeddingOptions(37, 4).sparse(sparse).padding_idx(2)));
    sums = register_module("sums", EmbeddingBag(EmbeddingBagOptions(41, 4).mode(torch::kSum).sparse(sparse)));
    largest = register_module("largest", EmbeddingBag(EmbeddingBagOptions(29, 4).mode(torch::kMax).sparse(false)));
    means = register_module("means", EmbeddingBag(EmbeddingBagOptions(31, 4).mode(torch::kMean).sparse(sparse)));
    last = register_module("last", Linear(4, 3));
    fill(*this);
  }
  at::Tensor output(int64_t micro_batch, int rank) {
    const at::Tensor numbers = (torch::arange(6) * 5 + 7 * micro_batch + 3 * rank).remainder(23);
    const at::Tensor padded = torch::cat({numbers, torch::tensor({2, 2}, torch::kLong)});
    const at::Tensor offsets = torch::tensor({0, 3, 3, 7}, torch::kLong);
    const at::Tensor factors = torch::sin(torch::arange(8).to(torch::kFloat));
    at::Tensor x = words(padded).narrow(0, 0, 4) +
                   recompute::checkpoint(
                       [this, numbers](const at::Tensor& scale) {
                         return torch::tanh(words(numbers.narrow(0, 2, 4).to(torch::kInt))) * scale;
                       },
                       torch::ones({4, 1}, torch::requires_grad()));
    x = x + sums(padded, offsets, factors) + means(padded, offsets) + largest(padded, offsets);
    return last(torch::tanh(x));
  }
  at::Tensor loss(int64_t micro_batch, int rank) { return (output(micro_batch, rank) - 0.3).pow(2).mean(); }
  torch::nn::Embedding words{nullptr};
  torch::nn::EmbeddingBag sums{nullptr}, largest{nullptr}, means{nullptr};
  torch::nn::Linear last{nullptr};
};
TORCH_MODULE(ReadsNet);

TEST(ShardedTables, EveryReadAtStage3GivesWhatAWholeTableDoes) {
  for (const std::string type : {"SGD", "SparseAdam"}) {
    ReadsNet plain;
    torch::optim::SGD sgd(plain->parameters(), torch::optim::SGDOptions(0.05));
    LazyAdam lazy;
    for (int64_t step = 0; step < 3; ++step) {
      plain->zero_grad();
      for (const int rank : {0, 1}) (plain->loss(step, rank) / 2.0).backward();
      if (type == "SGD") {
        sgd.step();
      } else {
        for (at::Tensor& parameter : plain->parameters()) {
          if (parameter.grad().is_sparse()) parameter.mutable_grad() = parameter.grad().coalesce();
        }
        lazy.step(*plain);
      }
    }
    const torch::NoGradGuard no_grad;
    const at::Tensor expected = plain->output(5, 0);
    test::run_ranks(2, [&](comm::Communicator& communicator) {
      ReadsNet model;
      ordered_json config = small_config(3, 1);
      config["zero_allow_untested_optimizer"] = true;
      config["optimizer"] = {{"type", type}, {"params", {{"lr", 0.05}}}};
      const auto engine = start(model.ptr(), config, communicator).engine;
      EXPECT_THAT(to_table(engine->plan()), HasSubstr("words.weight, sums.weight, means.weight: row-wise, sharded"));
      for (int64_t step = 0; step < 3; ++step) {
        engine->backward(model->loss(step, communicator.rank()));
        engine->step();
      }
      EXPECT_LE(largest_difference(copy_of(engine->fp32_state_dict()), parameters_of(*plain)), 1e-6) << type;
      EXPECT_LE(largest_difference(copy_of(engine->module_state_dict()), parameters_of(*plain)), 1e-6) << type;
      model->eval();
      {
        const torch::NoGradGuard evaluates;
        EXPECT_TRUE(torch::allclose(model->output(5, 0), expected, 1e-5, 1e-6));
      }
      const auto whole = engine->gathered_parameters(model->parameters());
      EXPECT_TRUE(model->words->weight.detach().allclose(plain->words->weight.detach(), 1e-5, 1e-6));
      EXPECT_TRUE(torch::allclose(model->words(torch::tensor({communicator.rank() + 7}, torch::kLong)),
                                  plain->words(torch::tensor({communicator.rank() + 7}, torch::kLong)), 1e-5, 1e-6));
    });
  }
}

TEST(ShardedTables, InferenceModeReadsRowsAtStage3) {
  test::run_ranks(2, [](comm::Communicator& communicator) {
    RowNet model;
    const RowNet plain;
    const auto engine = start(model.ptr(), row_config(3, "SGD"), communicator).engine;
    const c10::InferenceMode inference;
    const at::Tensor rows = torch::tensor({4, 4, 200 - 3 * communicator.rank()}, torch::kLong);
    EXPECT_TRUE(model->words->forward(rows).equal(plain->words->weight.index_select(0, rows)));
  });
}

TEST(ShardedTables, WhatIsNoReadOfALayerIsAnErrorAtStage3) {
  const auto expect_error = [](const char* text, const auto& does) {
    EXPECT_THAT(
        [&] {
          test::run_ranks(2, [&](comm::Communicator& communicator) {
            RowNet model;
            const auto engine = start(model.ptr(), row_config(3, "SGD"), communicator).engine;
            does(*engine, model, communicator.rank());
          });
        },
        ThrowsMessage<test::RankFailure>(HasSubstr(text)));
  };
  const auto numbers = [](int64_t number) { return torch::tensor({number}, torch::kLong); };
  const char* const weight = "words.weight is a table whose rows are sharded over the ranks";
  expect_error(weight, [](Engine&, RowNet& model, int) {
    torch::matmul(torch::ones({1, 6}), model->words->weight.t());
  });
  expect_error(weight, [&](Engine&, RowNet& model, int) { model->words->weight.index_select(0, numbers(3)); });
  expect_error(weight, [](Engine&, RowNet& model, int) { model->words->weight.data_ptr(); });
  expect_error("expected indices in [0, 211), found 211", [&](Engine&, RowNet& model, int rank) {
    if (rank == 0) {
      model->words(numbers(211));
    } else {
      EXPECT_THAT([&] { model->words(numbers(5)); }, ThrowsMessage<UsageError>(HasSubstr("rank 0 has asked for one")));
    }
  });
  expect_error("ranks issued different collectives", [&](Engine& engine, RowNet& model, int rank) {
    at::Tensor loss = model->loss(0, rank);
    if (rank == 1) loss = loss + model->words(numbers(3)).sum();
    engine.backward(loss);
    engine.step();
  });
}

TEST(ShardedTables, AreWholeInScopesAndInViewsThatWereMadeThere) {
  test::run_ranks(2, [](comm::Communicator& communicator) {
    const auto weights = [&](bool sparse) {
      RowNet model(RowNetOptions{.sparse = sparse});
      ordered_json config = row_config(3, "Adagrad");
      config["gradient_accumulation_steps"] = 1;
      const auto engine = start(model.ptr(), config, communicator).engine;
      at::Tensor view;
      for (int64_t micro = 0; micro < 4; ++micro) {
        at::Tensor loss;
        {
          const auto whole = engine->gathered_parameters({model->words->weight});
          view = model->words->weight.detach();
          // The gradient of the norm reads the weight. One rank looks rows up that the other does not.
          loss = model->words->weight.pow(2).sum() * 0.01 + model->loss(micro, communicator.rank());
          if (communicator.rank() == 1) loss = loss + model->words(torch::tensor({1, 1, 7}, torch::kLong)).sum() * 0.1;
          engine->backward(loss);
        }
        engine->step();
        // Gathers the table once more, for the next forward, too.
        if (micro == 1) engine->backward(model->loss(9, communicator.rank()) * view.sum());
        if (micro == 1) engine->step();
      }
      return copy_of(engine->fp32_state_dict());
    };
    EXPECT_LE(largest_difference(weights(true), weights(false)), 1e-6);
  });
}

// The program's module has the whole table, or zero::Init has sharded it: initialize() adds the slice of each rank.
TEST(ShardedTables, AreMadeWithoutAWholeTable) {
  constexpr int64_t kRows = 100'000;
  constexpr int64_t kTableBytes = kRows * 6 * 4;
  for (const bool sliced : {false, true}) {
    SCOPED_TRACE(sliced ? "zero::Init" : "module");
    test::run_ranks(4, [&](comm::Communicator& communicator) {
      const RowNetOptions options{.rows = kRows};
      std::optional<zero::Init> init;
      if (sliced) init.emplace(borrowed(communicator), zero::InitOptions{.max_live = 0, .smallest = 1000});
      RowNet model(options);
      profiling::TensorMemory memory;
      const auto engine = initialize({.model = model.ptr(),
                                      .config = row_config(3, "SGD"),
                                      .init = sliced ? &*init : nullptr,
                                      .communicator = sliced ? nullptr : borrowed(communicator)})
                              .engine;
      EXPECT_LT(memory.take_peak_bytes(), kTableBytes / 2) << "a slice is a quarter";
      const RowNet plain(options);
      const auto whole = engine->gathered_parameters(model->parameters());
      EXPECT_TRUE(model->words->weight.equal(plain->words->weight));
      EXPECT_TRUE(model->tags->weight.equal(plain->tags->weight));
    });
  }
}

// All ranks read the same rows, and compare with a table that is whole.
TEST(ShardedTables, AreSlicedWhileTheyAreBuiltAndAveraged) {
  test::run_ranks(2, [](comm::Communicator& communicator) {
    constexpr EmaOptions kAverage = {.decay = 0.5};
    const auto train = [](Engine& engine, RowNet& model) {
      for (int64_t micro = 0; micro < 3 * kRowMicroBatches; ++micro) {
        engine.backward(model->loss(micro, 0));
        engine.step();
      }
    };
    RowNet whole;
    const auto expected = initialize({.model = whole.ptr(),
                                      .config = row_config(1, "Adagrad"),
                                      .ema = kAverage,
                                      .communicator = borrowed(communicator)})
                              .engine;
    train(*expected, whole);
    zero::Init init(borrowed(communicator), {.max_live = 0, .smallest = 32});
    RowNet model;
    const auto engine =
        initialize({.model = model.ptr(), .config = row_config(3, "Adagrad"), .ema = kAverage, .init = &init}).engine;
    train(*engine, model);
    EXPECT_LE(largest_difference(copy_of(engine->fp32_state_dict()), copy_of(expected->fp32_state_dict())), 1e-6);
    const State averages = copy_of(ema_state_dict(expected));
    EXPECT_LE(largest_difference(copy_of(ema_state_dict(engine)), averages), 1e-6);
    const at::Tensor rows = torch::tensor({9, 30, 9, 180}, torch::kLong);
    {
      const EmaScope averaged(engine);
      EXPECT_TRUE(model->words(rows).allclose(averages.at("words.weight").index_select(0, rows), 1e-5, 1e-6));
    }
    expected->synchronize_parameters();
    EXPECT_TRUE(model->words(rows).allclose(whole->words->weight.index_select(0, rows), 1e-5, 1e-6));
  });
}

}  // namespace
}  // namespace ds::engine
