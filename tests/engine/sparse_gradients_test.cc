// sparse_gradients in training: the same losses as without it, and bytes in proportion to the rows.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "config/plan/plan.h"
#include "core/check.h"
#include "dsengine/engine.h"
#include "tests/model/small_run.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr int64_t kVocabulary = 997;
constexpr int64_t kHidden = 12;

struct TableOptions {
  bool sparse = false;  // of the layers: gradients in COO layout
  bool tied = false;    // the words are the last layer, too
};

// Two tables of one width and a bag of another, before layers that all ranks use.
struct TableNetImpl : torch::nn::Module {
  explicit TableNetImpl(const TableOptions& options) : tied(options.tied) {
    const auto table = [&](int64_t rows) { return torch::nn::EmbeddingOptions(rows, kHidden).sparse(options.sparse); };
    words = register_module("words", torch::nn::Embedding(table(kVocabulary)));
    places = register_module("places", torch::nn::Embedding(table(64)));
    tags = register_module(
        "tags",
        torch::nn::EmbeddingBag(torch::nn::EmbeddingBagOptions(600, 5).mode(torch::kSum).sparse(options.sparse)));
    inner = register_module("inner", torch::nn::Linear(kHidden + 5, kHidden));
    outer = register_module("outer", torch::nn::Linear(kHidden, kVocabulary));
    fill(*this);
  }
  // [n] tokens; `reads` false: the tables stay out.
  at::Tensor loss(const at::Tensor& tokens, bool reads) {
    const auto options = words->weight.options().requires_grad(false);
    at::Tensor x = torch::ones({tokens.size(0), kHidden + 5}, options);
    if (reads) {
      const at::Tensor place = words(tokens) + places(torch::arange(tokens.size(0)));
      x = torch::cat({place, tags(torch::arange(tokens.size(0)).unsqueeze(1))}, 1);
    }
    const at::Tensor mixed = torch::tanh(inner(x));
    const at::Tensor scores = tied ? torch::matmul(mixed, words->weight.t()) : outer(mixed);
    return torch::nn::functional::cross_entropy(scores.to(torch::kFloat), (tokens * 7 + 1).remainder(kVocabulary));
  }
  bool tied;
  torch::nn::Embedding words{nullptr}, places{nullptr};
  torch::nn::EmbeddingBag tags{nullptr};
  torch::nn::Linear inner{nullptr}, outer{nullptr};
};
TORCH_MODULE(TableNet);

at::Tensor tokens_of(int64_t micro_batch, int rank, int64_t count) {
  return (torch::arange(count) * 37 + 11 * micro_batch + 5 * rank).remainder(kVocabulary);
}

ordered_json table_config(int stage, bool rows) {
  ordered_json config = small_config(stage, 2);
  config["gradient_clipping"] = 0.5;
  config["zero_optimization"]["reduce_bucket_size"] = 13000;
  if (rows) config["sparse_gradients"] = true;
  return config;
}

struct TableRun {
  std::vector<double> losses;  // of rank 0
  int64_t sent = 0;            // by rank 0
  std::string plan;
};

struct Workload {
  int ranks = 2;
  int64_t tokens = 6;
  int64_t steps = 4;
  bool idle = false;  // rank 1 leaves the tables out, but for the first micro-batch
};

TableRun run_tables(const ordered_json& config, const TableOptions& options, const Workload& work) {
  TableRun run;
  test::run_ranks(work.ranks, [&](comm::Communicator& communicator) {
    TableNet model(options);
    const auto engine = start(model.ptr(), config, communicator).engine;
    const int rank = communicator.rank();
    for (int64_t micro = 0; micro < work.steps * engine->gradient_accumulation_steps(); ++micro) {
      const bool reads = !work.idle || rank != 1 || micro == 0;
      const at::Tensor loss = engine->backward(model->loss(tokens_of(micro, rank, work.tokens), reads));
      engine->step();
      if (rank == 0) run.losses.push_back(loss.item<double>());
    }
    if (rank == 0) {
      run.sent = engine->comm_bytes_sent();
      run.plan = to_table(engine->plan());
    }
    for (const auto& [name, master] : engine->fp32_state_dict()) {
      const at::Tensor first = master.clone();
      communicator.broadcast(first, 0).wait();
      EXPECT_TRUE(first.equal(master)) << name << " on rank " << rank;
    }
  });
  return run;
}

void expect_losses(const TableRun& found, const TableRun& expected, double allowed, const std::string& what) {
  ASSERT_EQ(found.losses.size(), expected.losses.size()) << what;
  for (size_t i = 0; i < found.losses.size(); ++i) {
    EXPECT_LE(std::abs(found.losses[i] - expected.losses[i]), allowed * std::abs(expected.losses[i])) << what << i;
  }
}

class SparseGradients : public ::testing::TestWithParam<std::tuple<int, int>> {};

TEST_P(SparseGradients, LossesAreThoseOfWholeGradients) {
  const auto [ranks, stage] = GetParam();
  const Workload work{.ranks = ranks};
  const TableRun expected = run_tables(table_config(stage, false), {}, work);
  for (const bool sparse : {false, true}) {
    const std::string what = cat(ranks, " ranks, stage ", stage, sparse ? ", COO " : ", dense ");
    // Buckets differ, and with them the order in which squares are added for clipping.
    expect_losses(run_tables(table_config(stage, true), {.sparse = sparse}, work), expected, 1e-6, what);
    if (sparse) expect_losses(run_tables(table_config(stage, false), {.sparse = true}, work), expected, 0, what);
  }
}

INSTANTIATE_TEST_SUITE_P(Stages, SparseGradients,
                         ::testing::Combine(::testing::Values(1, 2, 4), ::testing::Values(0, 1, 2)));

TEST(SparseGradientsOf, TiedTablesAndRanksThatReadNone) {
  for (const int stage : {0, 1, 2}) {
    for (const bool tied : {false, true}) {
      const Workload work{.ranks = 4, .idle = true};
      const TableOptions options{.tied = tied};
      const std::string what = cat("stage ", stage, tied ? ", tied " : " ");
      expect_losses(run_tables(table_config(stage, true), options, work),
                    run_tables(table_config(stage, false), options, work), 1e-6, what);
    }
  }
}

TEST(SparseGradientsOf, SixteenBitsOffloadAndDivisionBefore) {
  const auto with = [](int stage, const ordered_json& more) {
    ordered_json config = table_config(stage, true);
    config.merge_patch(more);
    return config;
  };
  const ordered_json cases[] = {
      with(0, {{"bf16", {{"enabled", true}}}}),
      with(2, {{"bf16", {{"enabled", true}}}, {"communication_data_type", "fp32"}}),
      with(1, {{"fp16", {{"enabled", true}, {"initial_scale_power", 20}, {"hysteresis", 1}}}}),
      with(2, {{"zero_optimization", {{"offload_optimizer", {{"device", "cpu"}}}}}}),
      with(0, {{"gradient_predivide_factor", 2.0}}),
      with(1, {{"prescale_gradients", true}, {"zero_optimization", {{"overlap_comm", false}}}}),
  };
  for (ordered_json config : cases) {
    const Workload work{.steps = 6};
    const TableRun found = run_tables(config, {.sparse = true}, work);
    EXPECT_TRUE(std::isfinite(found.losses.back())) << config.dump();
    config["sparse_gradients"] = false;
    // Sums of two 16-bit numbers are rounded once either way.
    expect_losses(found, run_tables(config, {.sparse = true}, work), 1e-6, config.dump());
  }
}

TEST(SparseGradientsOf, CopiesOfTheModelState) {
  ordered_json config = table_config(2, true);
  config["zero_optimization"]["mics_shard_size"] = 2;
  const Workload work{.ranks = 4};
  const TableRun found = run_tables(config, {}, work);
  config["sparse_gradients"] = false;
  expect_losses(found, run_tables(config, {}, work), 1e-6, "");
}

TEST(SparseGradientsOf, BytesAreInProportionToRows) {
  const int64_t steps = 3;
  const auto sent = [&](int64_t tokens, bool rows, int stage, bool tied = false) {
    ordered_json config = table_config(stage, rows);
    config["gradient_accumulation_steps"] = 1;
    return run_tables(config, {.sparse = true, .tied = tied}, {.ranks = 4, .tokens = tokens, .steps = steps}).sent;
  };
  // Ten rows more of each table, with their numbers, to three ranks.
  EXPECT_EQ(sent(30, true, 0) - sent(20, true, 0), steps * 3 * 10 * (2 * (kHidden * 4 + 4) + (5 * 4 + 4)));
  for (const int stage : {0, 1, 2}) {
    const int64_t whole = sent(20, false, stage);
    EXPECT_EQ(whole, sent(30, false, stage));
    // Of what the table of words takes, less than a tenth is left.
    const int64_t table = steps * kVocabulary * kHidden * 4 * (stage == 0 ? 2 : 1) * 3 / 4;
    EXPECT_LT(sent(20, true, stage), whole - table * 9 / 10) << stage;
    // Where all rows have a gradient the table goes as it is, after the numbers of rows.
    EXPECT_LT(sent(20, true, stage, /*tied=*/true), whole + steps * 3 * 1000) << stage;
  }
}

TEST(SparseGradientsOf, AResumedRunGoesOnBitByBitAndWithoutTheKeyToo) {
  const test::ScratchFolder folder;
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    const auto train_on = [&](Engine& engine, TableNet& model, int64_t begin) {
      for (int64_t micro = begin; micro < begin + 4; ++micro) {
        engine.backward(model->loss(tokens_of(micro, communicator.rank(), 6), true));
        engine.step();
      }
      return copy_of(engine.fp32_state_dict());
    };
    TableNet model(TableOptions{});
    const auto engine = start(model.ptr(), table_config(2, true), communicator).engine;
    train_on(*engine, model, 0);
    engine->save_checkpoint(folder.path().string());
    const State expected = train_on(*engine, model, 4);
    for (const bool rows : {true, false}) {
      TableNet other(TableOptions{});
      const auto resumed = start(other.ptr(), table_config(2, rows), communicator).engine;
      resumed->load_checkpoint(folder.path().string());
      EXPECT_LE(largest_difference(train_on(*resumed, other, 4), expected), rows ? 0 : 1e-6);
    }
  });
}

TEST(SparseGradientsOf, ThePlanAndWhatIsRefused) {
  EXPECT_THAT(run_tables(table_config(1, true), {}, {.steps = 1}).plan, HasSubstr("sparse_gradients: true"));
  EXPECT_THAT(run_tables(table_config(1, true), {}, {.ranks = 1, .steps = 1}).plan,
              HasSubstr("no ranks share gradients"));
  const auto refused = [](ordered_json more, const char* text) {
    ordered_json config = table_config(0, true);
    config.merge_patch(more);
    EXPECT_THAT([&] { config::parse(config, {.dp_world_size = 2}); }, ThrowsMessage<ConfigError>(HasSubstr(text)));
  };
  refused({{"zero_optimization", {{"stage", 3}}}}, "excludes zero_optimization.stage 3");
  refused({{"gradient_compression", {{"method", "int8"}}}}, "excludes gradient_compression.method int8");
  refused({{"zero_optimization", {{"stage", 2}, {"zero_quantized_gradients", true}}}},
          "excludes zero_optimization.zero_quantized_gradients");
  refused({{"optimizer", {{"type", "OneBitAdam"}}}}, "excludes optimizer.type OneBitAdam");
}

}  // namespace
}  // namespace ds::engine
