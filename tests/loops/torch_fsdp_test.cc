// The loops of torch_fsdp.py against what Python's torch FSDP2, autocast and GradScaler made of them (torch_fsdp.json).
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "dsengine/device_mesh.h"
#include "dsengine/distributed_data_parallel.h"
#include "dsengine/fully_shard.h"
#include "dsengine/grad_scaler.h"
#include "tests/loops/replicas.h"
#include "tests/loops/torch_values.h"
#include "tests/support/autocast_scope.h"

namespace ds::torch_fsdp {
namespace {

using test::batch_of;
using test::loss_of;
using test::Toy;

constexpr int kSteps = 50;

// How the model is spread over the ranks, under its name in the file.
struct Spread {
  std::string recorded;
  int ranks;
  std::optional<bool> reshards;  // empty: replicas
};

struct Precision {
  std::string recorded;
  std::optional<at::ScalarType> autocast;
  double tolerance;
};

struct Case {
  Spread spread;
  Precision precision;
  std::string optimizer;
};

class TorchLoops : public ::testing::TestWithParam<Case> {};

std::vector<Case> cases() {
  const std::vector<Spread> spreads = {
      {"replicas", 2, std::nullopt},    {"2 shards", 2, false}, {"2 shards", 2, true},
      {"4 shards", 4, false},           {"4 shards", 4, true},  {"2 copies of 2 shards", 4, false},
      {"2 copies of 2 shards", 4, true}};
  const std::vector<Precision> precisions = {
      {"float32", std::nullopt, 5e-6}, {"bfloat16", at::kBFloat16, 5e-3}, {"float16", at::kHalf, 5e-3}};
  std::vector<Case> all;
  for (const Spread& spread : spreads) {
    for (const Precision& precision : precisions) {
      if (spread.recorded == "replicas" && !precision.autocast) continue;  // in torch_ddp_test
      if (spread.recorded == "4 shards" && precision.autocast) continue;   // not recorded
      for (const auto& [optimizer, make] : test::optimizers()) all.push_back({spread, precision, optimizer});
    }
  }
  return all;
}

std::string name_of(const ::testing::TestParamInfo<Case>& cell) {
  const Spread& spread = cell.param.spread;
  std::string name = spread.recorded == "replicas" ? "Replicas" : spread.recorded == "4 shards" ? "Four" : "Two";
  if (spread.recorded.starts_with("2 copies")) name = "Hybrid";
  if (spread.reshards) name += *spread.reshards ? "Reshard" : "Stay";
  return name + cell.param.precision.recorded + cell.param.optimizer;
}

INSTANTIATE_TEST_SUITE_P(Grid, TorchLoops, ::testing::ValuesIn(cases()), name_of);

// A module on the ranks, and what an optimizer of it works on.
struct Spreading {
  Spreading(Toy& model, const Spread& spread, comm::Communicator& group) {
    if (!spread.reshards) {
      replicas = std::make_unique<DistributedDataParallel<Toy>>(model, test::small_buckets(group));
      return;
    }
    FullyShardOptions options = {.reshard_after_forward = spread.reshards};
    if (spread.recorded.starts_with("2 copies")) {
      options.mesh = comm::init_device_mesh(test::shared(group), {2, 2}, {"replicate", "shard"});
    } else {
      options.process_group = test::shared(group);
    }
    for (torch::nn::Linear& layer : model->layers()) fully_shard(layer, options);
    shards = fully_shard(model, options);
  }
  std::vector<at::Tensor> trained(Toy& model) const { return shards ? shards->parameters() : model->parameters(); }
  std::vector<at::Tensor> values(Toy& model) const {
    if (!shards) return test::values_of(*model);
    std::vector<at::Tensor> whole;
    for (auto& [name, value] : shards->full_state_dict()) whole.push_back(value);
    return whole;
  }

  std::unique_ptr<DistributedDataParallel<Toy>> replicas;
  std::shared_ptr<FullySharded> shards;
};

struct Scaling {
  double scale = 0;
  int skipped = 0;
};

Scaling train(Toy& model, torch::optim::Optimizer& optimizer, const Precision& precision, int rank) {
  engine::GradScaler scaler(
      {.init_scale = 16777216.0, .growth_interval = 8, .enabled = precision.autocast == at::kHalf});
  Scaling result;
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    at::Tensor loss;
    {
      const test::AutocastScope autocast(precision.autocast);
      loss = loss_of(model->forward(batch_of(rank, step)));
    }
    scaler.scale(loss).backward();
    scaler.step(optimizer);
    const double before = scaler.get_scale();
    scaler.update();
    if (scaler.get_scale() < before) ++result.skipped;
  }
  result.scale = scaler.get_scale();
  return result;
}

TEST_P(TorchLoops, FiftySteps) {
  static const nlohmann::json kAll = test::recorded("torch_fsdp");
  const auto& [spread, precision, name] = GetParam();
  const nlohmann::json& wanted = kAll.at(spread.recorded).at(precision.recorded).at(name);
  const std::string optimizer_name = name;
  test::run_ranks(spread.ranks, [&, &spread = spread, &precision = precision](comm::Communicator& group) {
    Toy model;
    const Spreading spreading(model, spread, group);
    const auto optimizer = test::optimizers().at(optimizer_name)(spreading.trained(model));
    const Scaling scaling = train(model, *optimizer, precision, group.rank());
    const nlohmann::json& values = precision.autocast ? wanted.at("values") : wanted;
    test::expect_as_torch(spreading.values(model), values, precision.tolerance, optimizer_name);
    if (!precision.autocast) return;
    EXPECT_EQ(scaling.scale, wanted.at("scale").get<double>());
    EXPECT_EQ(scaling.skipped, wanted.at("skipped").get<int>());
  });
}

}  // namespace
}  // namespace ds::torch_fsdp
