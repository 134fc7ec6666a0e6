// Row-wise tables: training as plain torch's with sparse gradients, in memory and bytes of the rows that are read.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "config/plan/plan.h"
#include "core/check.h"
#include "dsengine/engine.h"
#include "profiling/tensor_memory.h"
#include "tests/engine/row_net.h"
#include "tests/model/small_run.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr int kSteps = 5;
constexpr int kMicroBatches = kRowMicroBatches;
constexpr double kClip = kRowClip;

// Clips as torch.nn.utils.clip_grad_norm_ does; LibTorch's does not take gradients whose rows come more than once.
void clip_gradients(torch::nn::Module& module) {
  const torch::NoGradGuard no_grad;
  double squares = 0;
  for (at::Tensor& parameter : module.parameters()) {
    at::Tensor& gradient = parameter.mutable_grad();
    if (!gradient.defined()) continue;
    if (gradient.is_sparse()) gradient = gradient.coalesce();
    const at::Tensor values = gradient.is_sparse() ? gradient._values() : gradient;
    squares += values.to(torch::kDouble).pow(2).sum().item<double>();
  }
  const double factor = std::min(1.0, kClip / (std::sqrt(squares) + 1e-6));
  for (at::Tensor& parameter : module.parameters()) {
    const at::Tensor gradient = parameter.grad();
    if (gradient.defined()) (gradient.is_sparse() ? gradient._values() : gradient).mul_(factor);
  }
}

std::shared_ptr<torch::optim::Optimizer> plain_optimizer(const std::string& type, const RowNet& model) {
  using namespace torch::optim;
  if (type == "SGD") return std::make_shared<SGD>(model->parameters(), SGDOptions(0.05));
  if (type == "Adagrad") return std::make_shared<Adagrad>(model->parameters(), AdagradOptions(0.05));
  return nullptr;
}

// Whether a rank reads the words in a micro-batch: the last rank does so in every other one.
bool reads_words(int64_t micro_batch, int rank, int ranks) {
  return ranks == 1 || rank + 1 < ranks || micro_batch % 2 == 0;
}

// Returns the weights that plain torch trains on the batches of so many ranks.
State plain_state(const std::string& type, int ranks) {
  RowNet model;
  const auto optimizer = plain_optimizer(type, model);
  LazyAdam lazy;
  for (int64_t step = 0; step < kSteps; ++step) {
    model->zero_grad();
    for (int64_t micro = step * kMicroBatches; micro < (step + 1) * kMicroBatches; ++micro) {
      for (int rank = 0; rank < ranks; ++rank) {
        (model->loss(micro, rank, reads_words(micro, rank, ranks)) / (1.0 * kMicroBatches * ranks)).backward();
      }
    }
    clip_gradients(*model);
    if (optimizer) {
      optimizer->step();
    } else {
      lazy.step(*model);
    }
  }
  return parameters_of(*model);
}

void train_rows(Engine& engine, RowNet& model, int64_t first_step, int64_t steps) {
  const int rank = engine.global_rank();
  const auto ranks = static_cast<int>(engine.world_size());
  for (int64_t micro = first_step * kMicroBatches; micro < (first_step + steps) * kMicroBatches; ++micro) {
    engine.backward(model->loss(micro, rank, reads_words(micro, rank, ranks)));
    engine.step();
  }
}

class RowWise : public ::testing::TestWithParam<std::tuple<int, int>> {};

INSTANTIATE_TEST_SUITE_P(Stages, RowWise,
                         ::testing::Combine(::testing::Values(1, 2, 4), ::testing::Values(0, 1, 2, 3)));

TEST_P(RowWise, TrainsAsPlainTorchWithSparseGradients) {
  const auto [ranks, stage] = GetParam();
  for (const std::string type : {"SGD", "Adagrad", "SparseAdam", "client SGD", "client Adagrad"}) {
    const bool client = type.starts_with("client ");
    const std::string name = client ? type.substr(7) : type;
    const State expected = plain_state(name, ranks);
    test::run_ranks(ranks, [&, stage = stage](comm::Communicator& communicator) {
      RowNet model(RowNetOptions{.meets = stage == 3});
      ordered_json config = row_config(stage, name);
      if (client) config.erase("optimizer");
      const auto optimizer = client ? plain_optimizer(name, model) : nullptr;
      const auto engine =
          initialize(
              {.model = model.ptr(), .config = config, .optimizer = optimizer, .communicator = borrowed(communicator)})
              .engine;
      EXPECT_THAT(to_table(engine->plan()), HasSubstr("words.weight, tags.weight: row-wise"));
      train_rows(*engine, model, 0, kSteps);
      EXPECT_LE(largest_difference(copy_of(engine->fp32_state_dict()), expected), 2e-6) << type;
      engine->synchronize_parameters();
      const auto whole = engine->gathered_parameters(model->parameters());
      for (const auto& [key, value] : parameters_of(*model)) {
        const at::Tensor first = value.clone();
        communicator.broadcast(first, 0).wait();
        EXPECT_TRUE(first.equal(value)) << type << ", " << key << " on rank " << communicator.rank();
      }
    });
  }
}

TEST(RowWiseTables, NoStepAllocatesOrSendsATable) {
  constexpr int64_t kRows = 100'000;  // 2.4 MB, and as much of state
  for (const int ranks : {1, 2}) {
    for (const std::string type : {"Adagrad", "SparseAdam", "client Adagrad"}) {
      for (const int stage : {0, 1, 2, 3}) {
        test::run_ranks(ranks, [&](comm::Communicator& communicator) {
          RowNet model(RowNetOptions{.rows = kRows, .meets = stage == 3});
          const bool client = type.starts_with("client ");
          ordered_json config = row_config(stage, client ? "Adagrad" : type);
          if (client) config.erase("optimizer");
          const auto engine = initialize({.model = model.ptr(),
                                          .config = config,
                                          .optimizer = client ? plain_optimizer("Adagrad", model) : nullptr,
                                          .communicator = borrowed(communicator)})
                                  .engine;
          EXPECT_LT(engine->plan().bytes->gradients, 100'000);
          const int64_t owners = stage == 3 ? ranks : 1;
          EXPECT_LT(engine->plan().bytes->parameters, kRows * 6 * 4 / owners + 20'000);
          train_rows(*engine, model, 0, 2);
          engine->reset_comm_counters();
          profiling::TensorMemory memory;
          train_rows(*engine, model, 2, 1);
          engine->synchronize_parameters();
          EXPECT_LT(memory.take_peak_bytes(), 100'000) << type << ", stage " << stage << ", " << ranks << " ranks";
          EXPECT_LT(engine->comm_bytes_sent(), 30'000) << type << ", stage " << stage << ", " << ranks << " ranks";
        });
      }
    }
  }
}

// All ranks read the same, so that runs of any number of ranks are one.
State go_on(Engine& engine, RowNet& model, int64_t first_step, int64_t steps) {
  for (int64_t micro = first_step * kMicroBatches; micro < (first_step + steps) * kMicroBatches; ++micro) {
    engine.backward(model->loss(micro, 0));
    engine.step();
  }
  return copy_of(engine.fp32_state_dict());
}

struct Layout {
  int ranks;
  int stage;
  bool sparse;
};

TEST(RowWiseTables, CheckpointsLoadIntoAnyNumberOfRanksAndDenseTables) {
  const Layout layouts[] = {{2, 2, true},  {1, 0, true}, {4, 1, true}, {2, 3, false},
                            {1, 0, false}, {2, 3, true}, {4, 3, true}};
  for (const Layout& from : {layouts[0], layouts[3], layouts[5]}) {
    const test::ScratchFolder folder;
    State expected;
    test::run_ranks(from.ranks, [&](comm::Communicator& communicator) {
      RowNet model(RowNetOptions{.sparse = from.sparse});
      const auto engine = start(model.ptr(), row_config(from.stage, "Adagrad"), communicator).engine;
      go_on(*engine, model, 0, 2);
      engine->save_checkpoint(folder.path().string());
      const State found = go_on(*engine, model, 2, 2);
      if (communicator.rank() == 0) expected = found;
    });
    for (const Layout& to : layouts) {
      test::run_ranks(to.ranks, [&](comm::Communicator& communicator) {
        RowNet model(RowNetOptions{.sparse = to.sparse});
        const auto engine = start(model.ptr(), row_config(to.stage, "Adagrad"), communicator).engine;
        engine->load_checkpoint(folder.path().string());
        const bool same = to.ranks == from.ranks && to.stage == from.stage && to.sparse == from.sparse;
        EXPECT_LE(largest_difference(go_on(*engine, model, 2, 2), expected), same ? 0 : 1e-6)
            << from.stage << " -> " << to.ranks << " ranks, stage " << to.stage;
      });
    }
  }
}

TEST(RowWiseTables, ThePlanSaysWhichTablesAreDenseAndWhy) {
  const auto plan_of = [](const ordered_json& more, const RowNetOptions& options, int ranks = 1) {
    std::string plan;
    test::run_ranks(ranks, [&](comm::Communicator& communicator) {
      RowNet model(options);
      ordered_json config = row_config(0, "SGD");
      config.merge_patch(more);
      const auto engine = start(model.ptr(), config, communicator).engine;
      if (communicator.rank() == 0) plan = to_table(engine->plan());
    });
    return plan;
  };
  const auto expect_dense = [&](const ordered_json& more, const char* reason, int ranks = 1) {
    const std::string plan = plan_of(more, {}, ranks);
    EXPECT_THAT(plan, AllOf(HasSubstr("words.weight, tags.weight: dense"), HasSubstr(reason)));
    EXPECT_EQ(plan.find("row-wise"), std::string::npos) << plan;
  };
  expect_dense({{"optimizer", {{"type", "AdamW"}}}}, "AdamW moves rows that have no gradient");
  expect_dense({{"optimizer", {{"params", {{"momentum", 0.9}}}}}}, "momentum 0.9 moves rows");
  expect_dense({{"optimizer", {{"params", {{"weight_decay", 0.1}}}}}}, "weight_decay 0.1 moves rows");
  expect_dense({{"zero_optimization", {{"stage", 3}, {"offload_param", {{"device", "cpu"}}}}}}, "offload_param keeps");
  expect_dense({{"zero_optimization", {{"stage", 3}, {"zero_hpz_partition_size", 2}}}}, "zero_hpz_partition_size keeps",
               4);
  expect_dense({{"zero_optimization", {{"stage", 3}, {"zero_quantized_weights", true}}}},
               "zero_quantized_weights sends", 2);
  expect_dense({{"zero_optimization", {{"stage", 3}, {"mics_shard_size", 2}}}}, "mics_shard_size keeps", 4);
  expect_dense({{"bf16", {{"enabled", true}}}}, "all float32");
  expect_dense({{"fp16", {{"enabled", true}}}, {"zero_optimization", {{"stage", 3}}}}, "all float32", 2);
  expect_dense({{"zero_force_ds_cpu_optimizer", false},
                {"zero_optimization", {{"stage", 1}, {"offload_optimizer", {{"device", "cpu"}}}}}},
               "offload_optimizer updates whole slices");
  EXPECT_THAT(
      plan_of(ordered_json::object(), {.tied = true}),
      AllOf(HasSubstr("words_again: dense"), HasSubstr("tied to words.weight"), HasSubstr("tags.weight: row-wise")));
  EXPECT_THAT(plan_of(ordered_json::object(), {.max_norm = 1.0}),
              AllOf(HasSubstr("words.weight: dense"), HasSubstr("max_norm changes rows in forward")));
  EXPECT_EQ(plan_of(ordered_json::object(), {.sparse = false}).find("sparse tables"), std::string::npos);
  EXPECT_THAT(
      [&] {
        plan_of({{"optimizer", {{"type", "SparseAdam"}}}, {"bf16", {{"enabled", true}}}}, {});
      },
      ThrowsMessage<test::RankFailure>(AllOf(HasSubstr("SparseAdam"), HasSubstr("words.weight"))));
  EXPECT_THAT(
      [&] {
        plan_of({{"optimizer", {{"type", "SparseAdam"}, {"params", {{"weight_decay", 0.1}}}}}}, {});
      },
      ThrowsMessage<test::RankFailure>(AllOf(HasSubstr("weight_decay"), HasSubstr("expected 0, found 0.1"))));
}

TEST(RowWiseTables, GiveAndTakeDenseGradients) {
  for (const int stage : {0, 2, 3}) {
    test::run_ranks(2, [&](comm::Communicator& communicator) {
      RowNet model;
      RowNet plain;
      ordered_json config = row_config(stage, "SGD");
      config["gradient_accumulation_steps"] = 1;
      const auto engine = start(model.ptr(), config, communicator).engine;
      const at::Tensor before = engine->safe_get_full_fp32_param(model->words->weight).clone();
      engine->backward(model->loss(0, communicator.rank()));
      for (int rank = 0; rank < 2; ++rank) (plain->loss(0, rank) / 2.0).backward();
      const at::Tensor expected = plain->words->weight.grad().to_dense();
      EXPECT_TRUE(torch::allclose(engine->safe_get_full_grad(model->words->weight), expected, 1e-5, 1e-7));
      if (stage == 0) {
        EXPECT_THAT([&] { model->words->weight.grad().data_ptr(); },
                    ThrowsMessage<c10::Error>(HasSubstr("it is kept as the rows of a sparse table")));
      }
      at::Tensor other = torch::zeros_like(before);
      other[7] = 2.0;  // a row that nobody has read
      engine->safe_set_full_grad(model->words->weight, other);
      EXPECT_TRUE(engine->safe_get_full_grad(model->words->weight).equal(other));
      engine->step();
      const at::Tensor moved =
          (engine->safe_get_full_fp32_param(model->words->weight) - before).ne(0).any(1).nonzero().reshape({-1});
      EXPECT_TRUE(moved.equal(torch::tensor({7}, torch::kLong))) << moved;
    });
  }
}

TEST(RowWiseTables, NonFiniteRowsAreNamedAndSkipped) {
  for (const int stage : {0, 2, 3}) {
    test::run_ranks(2, [&](comm::Communicator& communicator) {
      RowNet model;
      ordered_json config = row_config(stage, "Adagrad");
      config["gradient_accumulation_steps"] = 1;
      config["non_finite_gradients"] = "error";
      const auto engine = start(model.ptr(), config, communicator).engine;
      const State before = copy_of(engine->fp32_state_dict());
      const at::Tensor word = model->words(torch::tensor({3, 200}, torch::kLong));
      const at::Tensor factor =
          torch::tensor({1.0F, communicator.rank() == 1 ? std::numeric_limits<float>::infinity() : 1.0F});
      engine->backward((word.sum(1) * factor).sum() + model->loss(0, 0) * 0);
      EXPECT_THAT([&] { engine->step(); }, ThrowsMessage<NonFiniteError>(HasSubstr("words.weight, element 1200")));
      EXPECT_EQ(largest_difference(copy_of(engine->fp32_state_dict()), before), 0);
    });
  }
}

TEST(RowWiseTables, FrozenTablesStayAndDenseGradientsArriveWhole) {
  test::run_ranks(2, [](comm::Communicator& communicator) {
    const auto weights = [&](bool sparse, bool frozen) {
      RowNet model(RowNetOptions{.sparse = sparse});
      ordered_json config = row_config(1, "Adagrad");
      config["gradient_accumulation_steps"] = 1;
      const auto engine = start(model.ptr(), config, communicator).engine;
      for (int64_t micro = 0; micro < 3; ++micro) {
        if (micro == 1) model->words->weight.set_requires_grad(!frozen);
        const at::Tensor norm = frozen ? at::Tensor() : model->words->weight.pow(2).sum();
        const at::Tensor loss = model->loss(micro, communicator.rank());
        engine->backward(norm.defined() ? loss + norm * 0.01 : loss);
        engine->step();
      }
      return copy_of(engine->fp32_state_dict());
    };
    for (const bool frozen : {false, true}) {
      EXPECT_LE(largest_difference(weights(true, frozen), weights(false, frozen)), 1e-6) << frozen;
    }
  });
}

TEST(RowWiseTables, OptionsThatMoveOtherRowsAreRefusedAtTheStep) {
  test::run_ranks(1, [](comm::Communicator& communicator) {
    RowNet model;
    const auto initialized = start(model.ptr(), row_config(0, "SGD"), communicator);
    initialized.optimizer->groups()[0].weight_decay = 0.1;
    EXPECT_THAT([&] { train_rows(*initialized.engine, model, 0, 1); },
                ThrowsMessage<UsageError>(AllOf(HasSubstr("weight_decay 0"), HasSubstr("row-wise tables"))));
  });
}

}  // namespace
}  // namespace ds::engine
