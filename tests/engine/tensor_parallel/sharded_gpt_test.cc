// A GPT with a tied vocabulary, split over one axis and sharded along the other one.
#include <gtest/gtest.h>

#include <memory>

#include "dsengine/device_mesh.h"
#include "dsengine/fully_shard.h"
#include "dsengine/parallel.h"
#include "tests/engine/tensor_parallel/split_training.h"

namespace ds::engine {
namespace {

Curve train_gpt(const GptRun& run, comm::Communicator& world) {
  const auto net = run.make();
  const std::shared_ptr<comm::Communicator> ranks(std::shared_ptr<void>(), &world);  // the caller's
  const auto mesh = comm::init_device_mesh(ranks, {run.data, run.tensor}, {"dp", "tp"});
  const auto split = parallel::parallelize_module(*net, mesh["tp"], gpt_rules(run.model));
  for (const auto& item : net->named_modules()) {
    if (std::dynamic_pointer_cast<gpt::Block>(item.value())) fully_shard(item.value(), {.mesh = mesh["dp"]});
  }
  const auto sharded = fully_shard(net, {.mesh = mesh["dp"]});
  torch::optim::AdamW optimizer(sharded->parameters(), torch::optim::AdamWOptions(2e-3).weight_decay(0.01));
  Curve curve;
  for (int step = 0; step < run.steps; ++step) {
    const GptBatch batch = gpt_batch(step, mesh.get_local_rank("dp"), run.model);
    const at::Tensor loss = net->forward(batch.tokens, batch.targets);
    loss.backward();
    const at::Tensor mean = loss.detach().to(at::kDouble).view({1}) / run.data;
    mesh["dp"].get_group()->all_reduce(mean).wait();
    curve.losses.push_back(mean.item<double>());
    curve.norms.push_back(sharded->clip_grad_norm_(0.5));
    optimizer.step();
    optimizer.zero_grad();
  }
  EXPECT_TRUE(split.joined_operators().empty());
  return curve;
}

TEST(SplitShardsGpt, LossesAndNormsAreThoseOfTorch) {
  const GptRun run{.tensor = 2, .data = 2, .model = small_gpt(/*tied=*/true)};
  const Curve expected = run.plain();
  test::run_ranks(run.world(),
                  [&](comm::Communicator& world) { expect_same(train_gpt(run, world), expected, 5e-6, 2e-5); });
}

}  // namespace
}  // namespace ds::engine
