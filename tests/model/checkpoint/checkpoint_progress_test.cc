// What a checkpoint carries beside weights and states: schedule, data, random generators, buffers.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/folder_source.h"
#include "tests/model/checkpoint/checkpoint_run.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using test::run_ranks;

TEST(CheckpointSchedule, ComesBackOrBeginsAgain) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  run_ranks(1, [&](comm::Communicator& communicator) {
    CarriedNet model;
    const auto engine = start(model.ptr(), carried_config(1, 1), communicator).engine;
    std::vector<double> rates;
    for (int step = 0; step < 6; ++step) {
      one_step(*engine, model);
      rates.push_back(engine->get_lr()[0]);
      if (step == 2) engine->save_checkpoint(dir, "tag");
    }
    engine->load_checkpoint(dir, "tag");
    EXPECT_EQ(engine->get_lr()[0], rates[2]);
    one_step(*engine, model);
    EXPECT_EQ(engine->get_lr()[0], rates[3]);

    CarriedNet other;
    const auto fresh = start(other.ptr(), carried_config(1, 1), communicator).engine;
    const double first = fresh->get_lr()[0];
    fresh->load_checkpoint(dir, "tag", {.load_lr_scheduler_states = false});
    EXPECT_EQ(fresh->global_steps(), 3);
    EXPECT_EQ(fresh->lr_scheduler()->last_batch_iteration(), -1);
    EXPECT_EQ(fresh->get_lr()[0], first);
    one_step(*fresh, other);
    EXPECT_EQ(fresh->get_lr()[0], rates[0]);
  });
}

struct Numbers {
  torch::data::Example<> get(size_t index) const {
    return {torch::full({6}, static_cast<double>(index)), torch::zeros({1})};
  }
  size_t size() const { return 60; }
};

// Samples of the next batches, over all ranks, in the order of the global position.
std::vector<int64_t> seen_in(DataLoader& loader, int batches, comm::Communicator& communicator) {
  std::vector<int64_t> all;
  auto next = loader.begin();
  for (int batch = 0; batch < batches; ++batch) {
    if (batch > 0) ++next;
    if (next == loader.end()) next = loader.begin();
    const at::Tensor own = next->data.select(1, 0).to(torch::kLong).contiguous();
    std::vector<at::Tensor> parts;
    for (int rank = 0; rank < communicator.size(); ++rank) {
      at::Tensor part = own.clone();
      if (communicator.size() > 1) communicator.broadcast(part, rank, "samples").wait();
      parts.push_back(part);
    }
    const at::Tensor dealt = torch::stack(parts, 1).view({-1});  // position p goes to rank p mod W
    for (int64_t i = 0; i < dealt.numel(); ++i) all.push_back(dealt[i].item<int64_t>());
  }
  return all;
}

TEST(CheckpointData, GoesOnAtTheSameSample) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  const auto with_data = [](SmallNet& model, comm::Communicator& communicator, int64_t batch) {
    ordered_json config = small_config(1, 1);
    config["train_micro_batch_size_per_gpu"] = batch;
    return initialize(
        {.model = model.ptr(), .config = config, .training_data = Numbers{}, .communicator = borrowed(communicator)});
  };
  std::vector<int64_t> wanted;
  run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto parts = with_data(model, communicator, 3);
    seen_in(*parts.loader, 14, communicator);  // 84: in the second epoch
    parts.engine->save_checkpoint(dir, "tag");
    const std::vector<int64_t> own = seen_in(*parts.loader, 6, communicator);
    if (communicator.rank() == 0) wanted = own;
  });
  EXPECT_EQ(wanted.size(), 36U);
  EXPECT_EQ(std::set<int64_t>(wanted.begin(), wanted.end()).size(), 36U);  // the rest of the epoch
  for (const auto& [world, batch] : std::vector<std::pair<int, int64_t>>{{2, 3}, {1, 6}, {3, 2}, {1, 4}, {4, 3}}) {
    run_ranks(world, [&, world = world, batch = batch](comm::Communicator& communicator) {
      SmallNet model;
      const auto parts = with_data(model, communicator, batch);
      parts.engine->load_checkpoint(dir, "tag");
      EXPECT_EQ(parts.loader->epoch(), 1);
      const auto own = seen_in(*parts.loader, static_cast<int>(36 / (world * batch)), communicator);
      EXPECT_EQ(own, wanted) << world << " ranks, batches of " << batch;
    });
  }
}

// Not torch::manual_seed(), whose inline code ThreadSanitizer would then see and LibTorch's half of it not.
void seed_generator(uint64_t seed) {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  generator.set_current_seed(seed);
}

struct DropoutNet : SmallNetImpl {
  at::Tensor noisy_loss(const at::Tensor& x) { return loss(torch::dropout(x, 0.5, /*train=*/true)); }
};

TEST(CheckpointGenerators, DropoutGoesOnBitExactly) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  run_ranks(1, [&](comm::Communicator& communicator) {
    const auto steps = [](Engine& engine, DropoutNet& model) {
      for (int64_t step = 0; step < 3; ++step) {
        engine.backward(model.noisy_loss(sample(step, 0)));
        engine.step();
      }
      return copy_of(engine.fp32_state_dict());
    };
    seed_generator(5);
    const auto model = std::make_shared<DropoutNet>();
    const auto engine = start(model, small_config(1, 1), communicator).engine;
    steps(*engine, *model);
    engine->save_checkpoint(dir, "tag");
    const State end = steps(*engine, *model);
    for (const bool module_only : {false, true}) {
      seed_generator(99);
      const auto other = std::make_shared<DropoutNet>();
      const auto loaded = start(other, small_config(1, 1), communicator).engine;
      const at::Tensor generator = at::detail::getDefaultCPUGenerator().get_state();
      loaded->load_checkpoint(dir, "tag", {.load_module_only = module_only});
      EXPECT_EQ(torch::equal(generator, at::detail::getDefaultCPUGenerator().get_state()), module_only);
      EXPECT_EQ(largest_difference(steps(*loaded, *other), end) == 0.0, !module_only);
    }
  });
}

TEST(CheckpointBuffers, OwnOnesComeBackToTheSameNumberOfRanks) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  const auto with_buffers = [](int64_t value) {
    SmallNet model;
    model->register_buffer("own", torch::full({2}, value, torch::kLong));
    model->register_buffer("common", torch::full({}, 7.5, torch::kDouble));
    model->register_module("norm2",
                           torch::nn::BatchNorm1d(torch::nn::BatchNorm1dOptions(2).track_running_stats(false)));
    return model;
  };
  run_ranks(3, [&](comm::Communicator& communicator) {
    SmallNet model = with_buffers(0);
    const auto engine = start(model.ptr(), small_config(1, 1), communicator).engine;
    model->named_buffers()["own"].fill_(communicator.rank() == 1 ? 100 : 5);
    engine->save_checkpoint(dir, "tag");
  });
  const auto source = checkpoint::open_folder(dir + "/tag");
  EXPECT_TRUE(source->contains("ranks/1/buffers/own"));
  EXPECT_FALSE(source->contains("ranks/2/buffers/own"));
  EXPECT_FALSE(source->contains("ranks/1/buffers/common"));
  for (const int world : {3, 2}) {
    run_ranks(world, [&](comm::Communicator& communicator) {
      SmallNet model = with_buffers(-1);
      const auto engine = start(model.ptr(), small_config(2, 1), communicator).engine;
      engine->load_checkpoint(dir, "tag");
      EXPECT_EQ(model->named_buffers()["own"][0].item<int64_t>(), communicator.rank() == 1 && world == 3 ? 100 : 5);
      EXPECT_EQ(model->named_buffers()["common"].item<double>(), 7.5);
    });
  }
}

}  // namespace
}  // namespace ds::engine
