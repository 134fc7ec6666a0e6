// Pipelines whose layers are split over a tensor axis, against plain torch in one process.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/check.h"
#include "dsengine/parallel.h"
#include "tests/pipeline/layered_model.h"
#include "tests/support/borrowed.h"
#include "tests/support/grid.h"
#include "tests/support/thread_ranks.h"

namespace ds::pipeline {
namespace {

using testing::AllOf;
using testing::HasSubstr;

struct TableImpl : torch::nn::Module {
  TableImpl(const std::string& name, at::ScalarType dtype) {
    weight = register_parameter("weight", torch::zeros({kVocabulary, kWidth}));
    fill_by_name(*this, name);
    to(dtype);
  }
  at::Tensor forward(const at::Tensor& tokens) { return torch::embedding(weight, tokens); }
  at::Tensor weight;
};
TORCH_MODULE(Table);

at::Tensor scores(TableImpl& table, const at::Tensor& x) { return torch::matmul(x, table.weight.t()); }

// The two halves of a layer: between them the activation is split over the tensor axis.
struct WideImpl : torch::nn::Module {
  WideImpl(const std::string& name, at::ScalarType dtype, double drops) : drops_(drops) {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    wide = register_module("wide", torch::nn::Linear(kWidth, 2 * kWidth));
    fill_by_name(*this, name);
    to(dtype);
  }
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x) {
    return {x, torch::dropout(torch::gelu(wide(norm(x))), drops_, is_training())};
  }
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear wide{nullptr};
  double drops_;
};
TORCH_MODULE(Wide);

struct NarrowImpl : torch::nn::Module {
  NarrowImpl(const std::string& name, at::ScalarType dtype) {
    narrow = register_module("narrow", torch::nn::Linear(2 * kWidth, kWidth));
    fill_by_name(*this, name);
    to(dtype);
  }
  at::Tensor forward(const at::Tensor& x, const at::Tensor& y) { return x + narrow(y); }
  torch::nn::Linear narrow{nullptr};
};
TORCH_MODULE(Narrow);

std::vector<LayerSpec> halves_of(int depth, bool tied, at::ScalarType dtype = at::kFloat, double drops = 0) {
  std::vector<LayerSpec> layers;
  const std::string table = "embed";
  layers.push_back(tied ? LayerSpec::tied<Table>("embed", table, dtype)
                        : LayerSpec::of<Table>(table, dtype).named("embed"));
  for (int i = 0; i < depth; ++i) {
    const std::string name = "h." + std::to_string(i);
    layers.push_back(LayerSpec::of<Wide>(name, dtype, drops).named(name + ".up"));
    layers.push_back(LayerSpec::of<Narrow>(name, dtype).named(name + ".down"));
  }
  layers.push_back(
      tied ? LayerSpec::tied_with<Table>("embed", scores, table, dtype)
           : LayerSpec::made_by([=] { return std::make_shared<TableImpl>("head", dtype); }, scores).named("head"));
  return layers;
}

// The vocabulary's 13 entries are uneven over the ranks.
std::vector<parallel::SplitRule> rules(bool tied) {
  using enum parallel::Style;
  return {{".*up\\.wide", kColumn}, {".*down\\.narrow", kRow}, {tied ? "embed" : "embed|head", kVocabulary}};
}

// Tokens [2, 8].
MicroBatch text_of(int64_t micro_batch, int data_rank) {
  const at::Tensor steps = torch::arange(16) * 7 + 11 * micro_batch + 5 * data_rank;
  const at::Tensor tokens = (steps * steps + 3 * steps).remainder(kVocabulary).view({2, 8});
  return {.inputs = {tokens}, .labels = {(tokens * 5 + 2).remainder(kVocabulary)}};
}

constexpr int kMicroBatches = 4;

struct SplitJob {
  int pipe = 2;
  int tensor = 2;
  int data = 1;
  int stage = 0;
  std::string schedule = "1f1b";
  bool tied = false;
  int interval = 0;  // of activation checkpoints
  bool sequence = false;
  at::ScalarType dtype = at::kFloat;
  int depth = 3;
  int steps = 5;
  nlohmann::json more = nlohmann::json::object();

  int world() const { return pipe * tensor * data; }
  nlohmann::json config() const {
    nlohmann::json result = {{"train_micro_batch_size_per_gpu", 2},
                             {"gradient_accumulation_steps", kMicroBatches},
                             {"gradient_clipping", 0.5},
                             {"log_level", "error"},
                             {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 2e-3}, {"weight_decay", 0.01}}}}},
                             {"zero_optimization", {{"stage", stage}, {"stage3_param_persistence_threshold", 20}}},
                             {"tensor_parallel", {{"autotp_size", tensor}, {"sequence_parallel", sequence}}},
                             {"pipeline",
                              {{"stages", pipe},
                               {"schedule", schedule},
                               {"partition", "uniform"},
                               {"activation_checkpoint_interval", interval}}}};
    result.merge_patch(more);
    return result;
  }
  std::shared_ptr<PipelineModule> make() const {
    return std::make_shared<PipelineModule>(halves_of(depth, tied, dtype), PipelineOptions{.loss = cross_entropy});
  }
};

Curve plainly(const SplitJob& job) {
  const auto module = job.make();
  module->build({});
  torch::optim::AdamW optimizer(module->parameters(), torch::optim::AdamWOptions(2e-3).weight_decay(0.01));
  Curve curve;
  for (int64_t step = 0; step < job.steps; ++step) {
    optimizer.zero_grad();
    double sum = 0;
    for (int64_t micro = step * kMicroBatches; micro < (step + 1) * kMicroBatches; ++micro) {
      for (int rank = 0; rank < job.data; ++rank) {
        const MicroBatch batch = text_of(micro, rank);
        const at::Tensor loss =
            cross_entropy(module->forward(batch.inputs[0]), batch.labels[0]) / (kMicroBatches * job.data);
        loss.backward();
        sum += loss.item<double>();
      }
    }
    curve.losses.push_back(sum);
    curve.norms.push_back(torch::nn::utils::clip_grad_norm_(module->parameters(), 0.5));
    optimizer.step();
  }
  return curve;
}

using Body = std::function<void(engine::Engine& engine, comm::Communicator& world)>;

void run_split(const SplitJob& job, const Body& body) {
  test::run_ranks(job.world(), [&](comm::Communicator& world) {
    torch::set_num_threads(1);
    const auto parts = engine::initialize(
        {.model = job.make(), .config = job.config(), .split = rules(job.tied), .communicator = test::borrowed(world)});
    body(*parts.engine, world);
  });
}

// Returns what rank 0 reports; all ranks report the same losses.
Curve train_split(const SplitJob& job) {
  Curve curve;
  std::vector<std::vector<double>> losses(static_cast<size_t>(job.world()));
  run_split(job, [&](engine::Engine& engine, comm::Communicator& world) {
    EXPECT_EQ(engine.mp_world_size(), job.tensor);
    EXPECT_EQ(engine.dp_world_size(), job.data);
    EXPECT_EQ(engine.pipe_parallel_size(), job.pipe);
    std::vector<double>& own = losses[static_cast<size_t>(world.rank())];
    for (int64_t step = 0; step < job.steps; ++step) {
      int64_t next = step * kMicroBatches;
      own.push_back(engine.train_batch([&] { return text_of(next++, engine.communicator().rank()); }).item<double>());
      if (world.rank() == 0) curve.norms.push_back(engine.get_global_grad_norm().value_or(-1));
    }
    EXPECT_TRUE(engine.joined_operators().empty());
  });
  for (const auto& of_rank : losses) EXPECT_EQ(of_rank, losses[0]);
  curve.losses = losses[0];
  return curve;
}

void expect_same(const Curve& found, const Curve& wanted, double losses, double norms) {
  ASSERT_EQ(found.losses.size(), wanted.losses.size());
  for (size_t i = 0; i < wanted.losses.size(); ++i) {
    EXPECT_NEAR(found.losses[i], wanted.losses[i], losses) << "loss of step " << i;
    EXPECT_NEAR(found.norms[i], wanted.norms[i], norms * std::max(1.0, wanted.norms[i])) << "norm of step " << i;
  }
}

TEST(PipelineTensor, TrainsAsOneProcess) {
  std::map<std::pair<int, bool>, Curve> wanted;
  for (const int data : {1, 2}) {
    for (const bool tied : {false, true}) wanted[{data, tied}] = plainly({.data = data, .tied = tied});
  }
  ASSERT_LT((wanted[{1, false}].losses.back()), (wanted[{1, false}].losses.front()));
  const std::vector<std::string> schedules = {"gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zbv", "dualpipev"};
  for (const auto& [schedule, stage, data, tied, interval, sequence] :
       test::grid_sample(2, schedules, std::vector{0, 1, 2, 3}, std::vector{1, 2}, std::vector{false, true},
                         std::vector{0, 2}, std::vector{false, true})) {
    SCOPED_TRACE(testing::Message() << schedule << ", stage " << stage << ", data " << data << ", tied " << tied
                                    << ", recomputed " << interval << ", sequence " << sequence);
    const SplitJob job{
        .data = data, .stage = stage, .schedule = schedule, .tied = tied, .interval = interval, .sequence = sequence};
    expect_same(train_split(job), wanted.at({data, tied}), 5e-6, 2e-5);
  }
}

TEST(PipelineTensor, Float64AgreesToTheLastDigits) {
  for (const bool tied : {false, true}) {
    for (const bool sequence : {false, true}) {
      const SplitJob job{.schedule = tied ? "zbv" : "1f1b", .tied = tied, .sequence = sequence, .dtype = at::kDouble};
      expect_same(train_split(job), plainly(job), 1e-11, 1e-11);
    }
  }
}

TEST(PipelineTensor, FourStagesAndFourRanksOfAnAxisTrainAsOneProcess) {
  const Curve wanted = plainly({.tied = true});
  expect_same(train_split({.pipe = 4, .stage = 1, .tied = true}), wanted, 5e-6, 2e-5);
  expect_same(train_split({.tensor = 4, .stage = 3, .schedule = "zb_h1", .tied = true}), wanted, 5e-6, 2e-5);
}

}  // namespace
}  // namespace ds::pipeline
