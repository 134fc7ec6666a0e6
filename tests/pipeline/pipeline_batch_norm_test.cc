// SyncBatchNorm in pipelines: a stage's layers join the batches of its data ranks, each micro-batch by itself.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "tests/pipeline/pipeline_job.h"
#include "tests/support/borrowed.h"

namespace ds::pipeline::pipeline_batch_norm {
namespace {

constexpr int kNormSteps = 4;
constexpr int kMicroBatches = 4;
constexpr double kExact = 1e-8;

struct NormLayerImpl : torch::nn::Module {
  explicit NormLayerImpl(std::string name) {
    linear = register_module("linear", torch::nn::Linear(torch::nn::LinearOptions(6, 6).bias(false)));
    norm = register_module("norm", torch::nn::BatchNorm1d(6));
    to(torch::kDouble);
    fill_by_name(*this, name);
  }
  at::Tensor forward(const at::Tensor& x) { return x + torch::tanh(norm(linear(x))); }
  torch::nn::Linear linear{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(NormLayer);

std::vector<LayerSpec> norm_layers() {
  std::vector<LayerSpec> layers;
  for (int i = 0; i < 8; ++i) {
    const std::string name = cat("h.", i);
    layers.push_back(LayerSpec::of<NormLayer>(name).named(name));
  }
  return layers;
}

at::Tensor squares(const at::Tensor& found, const at::Tensor& wanted) { return (found - wanted).pow(2).mean(); }

MicroBatch samples_of(int64_t micro_batch, int data_rank) {
  const at::Tensor steps = torch::arange(24, torch::kDouble) * 1.3 + static_cast<double>(31 * micro_batch);
  const at::Tensor x = (torch::cos(steps + 7 * data_rank) + torch::sin(steps * steps)).view({4, 6});
  return {.inputs = {x}, .labels = {x.sin() * 2.0}};
}

using Values = std::map<std::string, at::Tensor>;

Values values_of(const torch::nn::Module& module) {
  Values values;
  for (const auto& item : module.named_buffers()) values[item.key()] = item.value().clone();
  return values;
}

struct Trained {
  std::vector<double> losses;
  Values buffers;
};

// One process, whose micro-batches are those of all data ranks together.
Trained trained_plainly(int data_ranks) {
  PipelineModule module(norm_layers(), {.loss = squares});
  module.build({});
  torch::optim::AdamW optimizer(module.parameters(), torch::optim::AdamWOptions(1e-3).weight_decay(0.01));
  Trained result;
  for (int64_t step = 0; step < kNormSteps; ++step) {
    optimizer.zero_grad();
    double sum = 0;
    for (int64_t micro = step * kMicroBatches; micro < (step + 1) * kMicroBatches; ++micro) {
      std::vector<at::Tensor> inputs, labels;
      for (int rank = 0; rank < data_ranks; ++rank) {
        const MicroBatch batch = samples_of(micro, rank);
        inputs.push_back(batch.inputs[0]);
        labels.push_back(batch.labels[0]);
      }
      const at::Tensor loss = squares(module.forward(torch::cat(inputs)), torch::cat(labels)) / kMicroBatches;
      loss.backward();
      sum += loss.item<double>();
    }
    result.losses.push_back(sum);
    torch::nn::utils::clip_grad_norm_(module.parameters(), 0.5);
    optimizer.step();
  }
  result.buffers = values_of(module);
  return result;
}

struct Variant {
  const char* schedule;
  int zero_stage = 1;
  int recomputed = 0;  // layers between checkpoints
};

Trained trained_in_pipeline(const Variant& variant) {
  nlohmann::json config = config_of(2, variant.schedule, variant.zero_stage);
  config["train_micro_batch_size_per_gpu"] = 4;
  config["sync_batchnorm"] = true;
  if (variant.recomputed > 0) config["pipeline"]["activation_checkpoint_interval"] = variant.recomputed;
  Trained result;
  std::mutex mutex;
  test::run_ranks(4, [&](comm::Communicator& world) {
    torch::set_num_threads(1);
    const auto model = std::make_shared<PipelineModule>(norm_layers(), PipelineOptions{.loss = squares});
    const auto ranks = test::borrowed(world);
    const auto engine = engine::initialize({.model = model, .config = config, .communicator = ranks}).engine;
    int64_t next = 0;
    for (int step = 0; step < kNormSteps; ++step) {
      next = int64_t{step} * kMicroBatches;
      const auto loss = engine->train_batch([&] { return samples_of(next++, engine->communicator().rank()); });
      if (world.rank() == 0) result.losses.push_back(loss.item<double>());
    }
    const Values own = values_of(*model);
    EXPECT_FALSE(own.empty());
    const std::lock_guard lock(mutex);
    for (const auto& [name, value] : own) {
      // Data ranks of a stage have the same.
      const auto& kept = result.buffers.emplace(name, value).first->second;
      EXPECT_LT((kept - value).abs().to(torch::kDouble).max().item<double>(), kExact) << name;
    }
  });
  return result;
}

TEST(SyncBatchNormInPipelines, EachMicroBatchIsJoinedOverTheStagesDataRanks) {
  const Trained expected = trained_plainly(2);
  ASSERT_LT(expected.losses.back(), expected.losses.front());
  for (const Variant& variant : {Variant{"1f1b"}, Variant{"1f1b", 3}, Variant{"1f1b", 1, 1}, Variant{"gpipe", 2},
                                 Variant{"zb_h1"}, Variant{"zbv"}}) {
    SCOPED_TRACE(cat(variant.schedule, " stage ", variant.zero_stage, " interval ", variant.recomputed));
    const Trained found = trained_in_pipeline(variant);
    expect_near(found.losses, expected.losses, kExact);
    ASSERT_EQ(found.buffers.size(), expected.buffers.size());
    for (const auto& [name, value] : expected.buffers) {
      ASSERT_TRUE(found.buffers.contains(name)) << name;
      EXPECT_LT((found.buffers.at(name) - value).abs().to(torch::kDouble).max().item<double>(), kExact) << name;
    }
  }
}

}  // namespace
}  // namespace ds::pipeline::pipeline_batch_norm
