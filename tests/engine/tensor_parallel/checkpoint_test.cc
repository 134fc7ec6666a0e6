// Checkpoints of engines whose ranks have parts of parameters: any degree and stage goes on in any other, and what is
// shown or written whole is what one rank would.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "checkpoint/export.h"
#include "checkpoint/folder_source.h"
#include "checkpoint/source/training_state.h"
#include "core/text.h"
#include "tests/engine/tensor_parallel/split_training.h"
#include "tests/support/file_text.h"
#include "tests/support/grid.h"
#include "tests/support/scratch_folder.h"

namespace ds::engine {
namespace {

using testing::HasSubstr;

constexpr int kSaved = 3;
constexpr int kEnd = 8;

// Uneven everywhere: 51 entries over 2 and 4.
GptRun layout(int tensor, int stage, int data = 1, bool tied = true) {
  GptRun run{.tensor = tensor, .data = data, .stage = stage, .steps = kEnd};
  run.model = small_gpt(tied);
  run.model.vocab = 51;
  run.more["checkpoint"] = {{"durable", false}};
  return run;
}

std::string tag_of(const GptRun& run) { return cat("t", run.tensor, "d", run.data, "s", run.stage); }

using Losses = std::vector<double>;

// Steps `from` to `to`.
Losses train(Engine& engine, gpt::Gpt& net, const GptRun& run, int from, int to) {
  Losses losses;
  for (int step = from; step < to; ++step) {
    const GptBatch batch = gpt_batch(step, engine.communicator().rank(), run.model);
    const at::Tensor loss = engine.backward(net.forward(batch.tokens, batch.targets)).to(at::kDouble).view({1});
    engine.step();
    if (run.data > 1) engine.communicator().all_reduce(loss).wait();
    losses.push_back(loss.item<double>() / run.data);
  }
  return losses;
}

void forget(torch::nn::Module& module) {
  const torch::NoGradGuard no_grad;
  for (at::Tensor& parameter : module.parameters()) parameter.fill_(0.125);
}

using Action = std::function<void(Engine& engine, gpt::Gpt& net, comm::Communicator& world)>;

void on_ranks(const GptRun& run, const Action& action, const std::function<void(gpt::Gpt&)>& prepare = {}) {
  test::run_ranks(run.world(), [&](comm::Communicator& world) {
    const auto net = run.make();
    if (prepare) prepare(*net);
    const auto [engine, optimizer, loader, schedule] = run.start(world, net);
    action(*engine, *net, world);
  });
}

// Weights and states of two checkpoints, as whole tensors.
void expect_same_tensors(const std::string& one, const std::string& other) {
  const auto a = checkpoint::open_folder(one);
  const auto b = checkpoint::open_folder(other);
  int compared = 0;
  for (const auto& [path, info] : a->tensors()) {
    if (path.starts_with("ranks/")) continue;
    ASSERT_TRUE(b->contains(path)) << path;
    EXPECT_EQ(info, b->info(path)) << path;
    EXPECT_TRUE(torch::equal(a->tensor(path), b->tensor(path))) << path;
    ++compared;
  }
  EXPECT_GT(compared, 50);  // 28 parameters with a state or two
  for (const auto& [path, info] : b->tensors()) EXPECT_TRUE(path.starts_with("ranks/") || a->contains(path)) << path;
  EXPECT_EQ(a->aliases(), b->aliases());
  EXPECT_EQ(a->state().optimizer->step_count, b->state().optimizer->step_count);
}

// Trains without a break and saves on the way. By tag, the losses after the save.
Losses save(const GptRun& run, const std::string& folder, const SaveOptions& options = {}) {
  Losses losses;
  on_ranks(run, [&](Engine& engine, gpt::Gpt& net, comm::Communicator& world) {
    train(engine, net, run, 0, kSaved);
    engine.save_checkpoint(folder, tag_of(run), options);
    const Losses rest = train(engine, net, run, kSaved, kEnd);
    engine.wait_for_checkpoint();
    if (world.rank() == 0) losses = rest;
  });
  return losses;
}

// Loads `tag`, saves it again as `again`, and goes on.
Losses go_on(const GptRun& run, const std::string& folder, const std::string& tag, const std::string& again) {
  Losses losses;
  on_ranks(run, [&](Engine& engine, gpt::Gpt& net, comm::Communicator& world) {
    engine.load_checkpoint(folder, tag);
    EXPECT_EQ(engine.global_steps(), kSaved);
    engine.save_checkpoint(folder, again);
    const Losses rest = train(engine, net, run, kSaved, kEnd);
    if (world.rank() == 0) losses = rest;
  });
  expect_same_tensors(folder + "/" + tag, folder + "/" + again);
  return losses;
}

TEST(TensorCheckpoint, AnyDegreeAndStageGoesOnInAnyOther) {
  const test::ScratchFolder scratch;
  const std::string folder = scratch.path().string();
  std::vector<GptRun> layouts;
  for (const int tensor : {1, 2, 4}) {
    for (const int stage : {0, 3}) layouts.push_back(layout(tensor, stage));
  }
  std::vector<Losses> unbroken;
  for (const GptRun& run : layouts) {
    unbroken.push_back(save(run, folder));
    EXPECT_TRUE(checkpoint::verify(folder + "/" + tag_of(run)).empty());
    const auto source = checkpoint::open_folder(folder + "/" + tag_of(run));
    EXPECT_EQ(source->state().tensor_ranks, run.tensor);
    EXPECT_EQ(source->info("weights/wte.weight").sizes, (std::vector<int64_t>{51, 32}));
    const std::string index = test::file_text(folder + "/" + tag_of(run) + "/index.json");
    EXPECT_EQ(index.find("\"version\":2") != std::string::npos, run.tensor > 1);
  }
  const std::vector<size_t> degrees = {0, 1, 2};
  const std::vector<size_t> stages = {0, 1};
  for (const auto& [from_degree, from_stage, to_degree, to_stage] :
       test::grid_sample(2, degrees, stages, degrees, stages)) {
    const size_t from = 2 * from_degree + from_stage;
    const GptRun& to = layouts[2 * to_degree + to_stage];
    SCOPED_TRACE(cat(tag_of(layouts[from]), " to ", tag_of(to)));
    const Losses found = go_on(to, folder, tag_of(layouts[from]), "again");
    const bool equal = tag_of(layouts[from]) == tag_of(to);
    for (size_t i = 0; i < found.size(); ++i) {
      EXPECT_NEAR(found[i], unbroken[from][i], equal ? 0 : 5e-6) << "step " << i;
    }
    if (HasFailure()) return;
  }
}

// Data-parallel ranks share each part; untied, so that the scores are a split parameter of their own.
TEST(TensorCheckpoint, WithDataParallelRanks) {
  const test::ScratchFolder scratch;
  const std::string folder = scratch.path().string();
  for (const int stage : {0, 1, 2, 3}) {
    const GptRun two = layout(2, stage, 2, /*tied=*/false);
    const Losses unbroken = save(two, folder);
    EXPECT_EQ(go_on(two, folder, tag_of(two), "again"), unbroken) << stage;
    const Losses other = go_on(layout(1, 3 - stage, 2, /*tied=*/false), folder, tag_of(two), "again");
    for (size_t i = 0; i < other.size(); ++i) EXPECT_NEAR(other[i], unbroken[i], 5e-6) << stage;
  }
}

// Masters in float32 beside 16-bit weights, accumulated beside training.
TEST(TensorCheckpoint, MastersOfBfloat16) {
  const test::ScratchFolder scratch;
  const std::string folder = scratch.path().string();
  for (const int stage : {1, 3}) {
    GptRun two = layout(2, stage);
    two.more["bf16"] = {{"enabled", true}};
    SaveOptions options;
    options.asynchronous = true;
    const Losses unbroken = save(two, folder, options);
    EXPECT_EQ(go_on(two, folder, tag_of(two), "again"), unbroken);
    GptRun four = layout(4, 4 - stage);
    four.more = two.more;
    go_on(four, folder, tag_of(two), "again");
  }
}

// Masters and states in bfloat16, which files have as they are.
TEST(TensorCheckpoint, MastersThatAreBfloat16Themselves) {
  const test::ScratchFolder scratch;
  const std::string folder = scratch.path().string();
  for (const int stage : {1, 3}) {
    GptRun two = layout(2, stage);
    two.more["bf16"] = {{"enabled", true}, {"bf16_master_weights_and_grads", true}, {"bf16_optimizer_states", true}};
    const Losses unbroken = save(two, folder);
    const auto source = checkpoint::open_folder(folder + "/" + tag_of(two));
    EXPECT_EQ(source->info("weights/wte.weight").dtype, at::kBFloat16);
    EXPECT_EQ(go_on(two, folder, tag_of(two), "again"), unbroken);
    for (const GptRun& other : {layout(4, 4 - stage), layout(1, stage, 2)}) {
      GptRun run = other;
      run.more = two.more;
      go_on(run, folder, tag_of(two), "again");
    }
  }
}

// Each host keeps the parts of its own ranks: two hosts whose tensor axes lie inside, and one axis over both. What all
// ranks of an axis have, trained and frozen, is on both.
TEST(TensorCheckpoint, OnTheDisksOfHosts) {
  for (const auto& [tensor, data] : {std::pair(2, 2), std::pair(4, 1)}) {
    for (const int stage : {0, 1, 3}) {
      SCOPED_TRACE(cat("tensor ", tensor, ", stage ", stage));
      const test::ScratchFolder scratch;
      GptRun run = layout(tensor, stage, data);
      run.more["checkpoint"]["use_node_local_storage"] = true;
      const auto on_hosts = [&](const Action& action) {
        test::run_ranks(run.world(), [&](comm::Communicator& world) {
          constexpr int kRanksPerHost = 2;
          const auto net = run.make();
          net->named_parameters()["h.0.ln1.weight"].set_requires_grad(false);
          const auto engine = initialize({.model = net,
                                          .config = run.config(),
                                          .split = gpt_rules(run.model),
                                          .distributed = Distributed{.ranks = {std::shared_ptr<void>(), &world},
                                                                     .local_rank = world.rank() % kRanksPerHost,
                                                                     .ranks_per_host = kRanksPerHost,
                                                                     .device = at::kCPU},
                                          .seed_generators = false})
                                  .engine;
          action(*engine, *net, world);
        });
      };
      const auto disk = [&](int rank) { return scratch / cat("host", rank / 2); };
      std::vector<Losses> unbroken(static_cast<size_t>(run.world()));
      on_hosts([&](Engine& engine, gpt::Gpt& net, comm::Communicator& world) {
        train(engine, net, run, 0, kSaved);
        engine.save_checkpoint(disk(world.rank()), "tag");
        unbroken[static_cast<size_t>(world.rank())] = train(engine, net, run, kSaved, kEnd);
      });
      on_hosts([&](Engine& engine, gpt::Gpt& net, comm::Communicator& world) {
        engine.load_checkpoint(disk(world.rank()), "tag");
        EXPECT_EQ(train(engine, net, run, kSaved, kEnd), unbroken[static_cast<size_t>(world.rank())]);
      });
    }
  }
}

// What ranks remember of compression comes back in the same layout; what is for all ranks also in another.
TEST(TensorCheckpoint, CompressedOptimizers) {
  const test::ScratchFolder scratch;
  const std::string folder = scratch.path().string();
  for (const std::string type : {"OneBitAdam", "ZeroOneAdam"}) {
    GptRun two = layout(2, 0, 2);
    two.more["gradient_clipping"] = 0;
    two.more["optimizer"] = {{"type", type}, {"params", {{"lr", 1e-3}}}};
    two.more["optimizer"]["params"][type == "OneBitAdam" ? "freeze_step" : "var_freeze_step"] = 2;
    const Losses unbroken = save(two, folder);
    EXPECT_EQ(go_on(two, folder, tag_of(two), "again"), unbroken) << type;
    GptRun one = layout(1, 0, 2);
    one.more = two.more;
    go_on(one, folder, tag_of(two), "again");
  }
}

// States of optimizers that look at whole tensors are those of elements all the same.
TEST(TensorCheckpoint, OptimizersOfWholeTensors) {
  const test::ScratchFolder scratch;
  const std::string folder = scratch.path().string();
  for (const std::string type : {"Lamb", "Muon"}) {
    GptRun two = layout(2, 2, 2);
    two.model.vocab = 50;  // Muon: even parts
    two.more["optimizer"] = {{"type", type}, {"params", {{"lr", 1e-3}}}};
    two.more["zero_allow_untested_optimizer"] = true;
    const Losses unbroken = save(two, folder);
    EXPECT_EQ(go_on(two, folder, tag_of(two), "again"), unbroken) << type;
    GptRun one = layout(1, 1, 2);
    one.more = two.more;
    one.model = two.model;
    go_on(one, folder, tag_of(two), "again");
  }
}

// State on the host, and copies of it (MiCS), whose ranks share a part.
TEST(TensorCheckpoint, OffloadedStateAndCopies) {
  const test::ScratchFolder scratch;
  const std::string folder = scratch.path().string();
  GptRun offloaded = layout(2, 2, 2);
  offloaded.more["zero_optimization"]["offload_optimizer"] = {{"device", "cpu"}};
  GptRun copies = layout(2, 3, 2);
  copies.more["zero_optimization"]["mics_shard_size"] = 1;
  for (const GptRun& run : {offloaded, copies}) {
    const Losses unbroken = save(run, folder);
    EXPECT_EQ(go_on(run, folder, tag_of(run), "again"), unbroken);
    const Losses other = go_on(layout(4, 0, 2), folder, tag_of(run), "again");
    for (size_t i = 0; i < other.size(); ++i) EXPECT_NEAR(other[i], unbroken[i], 5e-6);
  }
}

// A whole parameter and a split one that are not trained.
TEST(TensorCheckpoint, FrozenParameters) {
  const test::ScratchFolder scratch;
  const std::string folder = scratch.path().string();
  const auto freeze = [](gpt::Gpt& net) {
    for (auto& item : net.named_parameters()) {
      if (item.key() == "wpe.weight" || item.key() == "h.0.mlp.fc.weight") item.value().set_requires_grad(false);
    }
  };
  for (const int stage : {0, 3}) {
    const GptRun two = layout(2, stage);
    on_ranks(
        two,
        [&](Engine& engine, gpt::Gpt& net, comm::Communicator&) {
          train(engine, net, two, 0, kSaved);
          engine.save_checkpoint(folder, "frozen");
        },
        freeze);
    const auto source = checkpoint::open_folder(folder + "/frozen");
    EXPECT_TRUE(source->info("weights/h.0.mlp.fc.weight").frozen);
    const auto plain = two.make();
    EXPECT_TRUE(
        torch::equal(source->tensor("weights/h.0.mlp.fc.weight"), plain->named_parameters()["h.0.mlp.fc.weight"]));
    for (const int tensor : {1, 4}) {
      const GptRun other = layout(tensor, 3 - stage);
      on_ranks(
          other,
          [&](Engine& engine, gpt::Gpt&, comm::Communicator&) {
            engine.load_checkpoint(folder, "frozen");
            engine.save_checkpoint(folder, "frozen_again");
          },
          [&](gpt::Gpt& net) {
            forget(net);
            freeze(net);
          });
      const auto again = checkpoint::open_folder(folder + "/frozen_again");
      for (const auto& [path, info] : source->tensors()) {
        if (!path.starts_with("ranks/")) EXPECT_TRUE(torch::equal(again->tensor(path), source->tensor(path))) << path;
      }
    }
  }
}

// What is shown, and the files for other programs.
TEST(TensorCheckpoint, WholesAreThoseOfOneRank) {
  const test::ScratchFolder scratch;
  const std::string folder = scratch.path().string();
  save(layout(4, 0), folder);
  const std::string tag = tag_of(layout(4, 0));
  const auto source = checkpoint::open_folder(folder + "/" + tag);
  for (GptRun run : {layout(1, 0), layout(2, 0), layout(2, 3), layout(2, 3, 2)}) {
    run.more["zero_optimization"] = {{"stage3_gather_16bit_weights_on_model_save", true}};
    on_ranks(run, [&](Engine& engine, gpt::Gpt&, comm::Communicator& world) {
      engine.load_checkpoint(folder, tag);
      engine.save_16bit_model(folder, tag_of(run) + ".safetensors");
      const auto module = engine.module_state_dict();
      const auto masters = engine.fp32_state_dict();
      if (world.rank() != 0) return;
      EXPECT_EQ(module.size(), masters.size());
      for (const auto* list : {&module, &masters}) {
        for (const auto& [name, values] : *list) {
          const auto alias = source->aliases().find(name);
          const std::string stored = alias == source->aliases().end() ? name : alias->second;
          EXPECT_TRUE(torch::equal(values, source->tensor(checkpoint::weight_path(stored)))) << name;
        }
      }
    });
    EXPECT_EQ(test::file_text(scratch / (tag_of(run) + ".safetensors")),
              test::file_text(scratch / "t1d1s0.safetensors"));
  }
  // What ds-tool checkpoint convert does.
  checkpoint::export_weights(*source, folder + "/plain");
  const auto plain = checkpoint::open_weights(folder + "/plain");
  for (const auto& [path, info] : source->tensors()) {
    if (!path.starts_with("weights/")) continue;
    EXPECT_TRUE(torch::equal(plain->tensor(path), source->tensor(path))) << path;
  }
}

TEST(TensorCheckpoint, AFileThatIsMissingIsNamed) {
  const test::ScratchFolder scratch;
  const std::string folder = scratch.path().string();
  const GptRun two = layout(2, 0);
  save(two, folder);
  std::filesystem::remove(scratch.path() / tag_of(two) / "optimizer-00001-of-00002.safetensors");
  on_ranks(two, [&](Engine& engine, gpt::Gpt&, comm::Communicator&) {
    try {
      engine.load_checkpoint(folder, tag_of(two));
      ADD_FAILURE() << "it was loaded";
    } catch (const IoError& error) {
      EXPECT_THAT(error.what(), HasSubstr("optimizer-00001-of-00002.safetensors"));
    }
  });
}

// Another vocabulary is another model, whatever the parts.
TEST(TensorCheckpoint, WhatDoesNotFitIsRefused) {
  const test::ScratchFolder scratch;
  const std::string folder = scratch.path().string();
  save(layout(2, 0), folder);
  GptRun other = layout(4, 0);
  other.model.vocab = 52;
  on_ranks(other, [&](Engine& engine, gpt::Gpt&, comm::Communicator&) {
    EXPECT_THROW(engine.load_checkpoint(folder, tag_of(layout(2, 0))), UsageError);
  });
}

}  // namespace
}  // namespace ds::engine
