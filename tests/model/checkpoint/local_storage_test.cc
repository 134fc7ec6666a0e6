// checkpoint.use_node_local_storage: ranks of a host find in its folder all that they need, and nothing of other hosts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/folder_source.h"
#include "config/plan/plan.h"
#include "core/check.h"
#include "tests/model/checkpoint/checkpoint_run.h"
#include "tests/pipeline/layered_model.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr int64_t kLocalSaved = 3;
constexpr int64_t kLocalEnd = 8;

ordered_json local_config(int stage, int world) {
  ordered_json config = carried_config(stage, world);
  config["checkpoint"]["use_node_local_storage"] = true;
  return config;
}

// Ranks of hosts with so many each, as a launcher says it.
Initialized start_on_hosts(CarriedNet& model, const ordered_json& config, comm::Communicator& communicator,
                           int ranks_per_host) {
  return initialize({.model = model.ptr(),
                     .config = config,
                     .distributed = Distributed{.ranks = borrowed(communicator),
                                                .local_rank = communicator.rank() % ranks_per_host,
                                                .ranks_per_host = ranks_per_host,
                                                .device = at::kCPU}});
}

// What the host of a rank calls "checkpoints".
std::string disk_of(const test::ScratchFolder& folder, int rank, int ranks_per_host) {
  return (folder.path() / cat("host", rank / ranks_per_host)).string();
}

TEST(LocalStorage, EachHostGoesOnFromItsOwnDisk) {
  for (const int stage : {0, 1, 2, 3}) {
    for (const auto& [world, ranks_per_host] : {std::pair(2, 1), std::pair(4, 2)}) {
      SCOPED_TRACE(cat("stage ", stage, ", ", world, " ranks, ", ranks_per_host, " a host"));
      const test::ScratchFolder folder;
      ordered_json config = local_config(stage, world);
      if (stage == 2 && world == 4) config["zero_optimization"]["mics_shard_size"] = 2;
      std::vector<State> ends(static_cast<size_t>(world));
      test::run_ranks(world, [&](comm::Communicator& communicator) {
        const int rank = communicator.rank();
        CarriedNet model;
        const auto engine = start_on_hosts(model, config, communicator, ranks_per_host).engine;
        train_until(*engine, model, kLocalSaved);
        model->seen[0] += rank;  // buffers differ between ranks
        const std::string disk = disk_of(folder, rank, ranks_per_host);
        EXPECT_EQ(engine->save_checkpoint(disk, "", {.client_state = {{"note", 7}}}), disk + "/global_step3");
        ends[static_cast<size_t>(rank)] = train_until(*engine, model, kLocalEnd);
      });
      for (int rank = 0; rank < world; ++rank) {
        const std::string tag = disk_of(folder, rank, ranks_per_host) + "/global_step3";
        EXPECT_TRUE(checkpoint::verify(tag).empty());
        for (const auto& entry : fs::directory_iterator(tag)) {
          const std::string name = entry.path().filename().string();
          const bool own = name.find(cat("-0000", rank, "-of-")) != std::string::npos;
          bool of_host = name == "index.json";
          for (int other = 0; other < world; ++other) {
            const bool same_host = other / ranks_per_host == rank / ranks_per_host;
            of_host = of_host || (same_host && name.find(cat("-0000", other, "-of-")) != std::string::npos);
          }
          EXPECT_TRUE(of_host || own) << name;
        }
      }
      test::run_ranks(world, [&](comm::Communicator& communicator) {
        const int rank = communicator.rank();
        CarriedNet model;
        forget(*model);
        const auto engine = start_on_hosts(model, config, communicator, ranks_per_host).engine;
        const LoadedCheckpoint loaded = engine->load_checkpoint(disk_of(folder, rank, ranks_per_host));
        EXPECT_EQ(loaded.path, disk_of(folder, rank, ranks_per_host) + "/global_step3");
        EXPECT_EQ(loaded.client_state.at("note"), 7);
        EXPECT_EQ(model->seen[0].item<double>(), static_cast<double>(kLocalSaved + rank));
        EXPECT_EQ(largest_difference(train_until(*engine, model, kLocalEnd), ends[static_cast<size_t>(rank)]), 0.0);
      });
    }
  }
}

void save_on_two_hosts(const test::ScratchFolder& folder, int stage, const std::vector<std::string>& tags) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    CarriedNet model;
    const auto engine = start_on_hosts(model, local_config(stage, 2), communicator, 1).engine;
    for (const std::string& tag : tags) {
      train_until(*engine, model, engine->global_steps() + 1);
      engine->save_checkpoint(disk_of(folder, communicator.rank(), 1), tag);
    }
  });
}

TEST(LocalStorage, WhatLiesOnAnotherHostIsAnErrorThatNamesFileAndHost) {
  const test::ScratchFolder folder;
  save_on_two_hosts(folder, 2, {"tag"});
  test::run_ranks(1, [&](comm::Communicator& communicator) {
    CarriedNet model;
    const auto engine = start_on_hosts(model, local_config(2, 1), communicator, 1).engine;
    EXPECT_THAT([&] { engine->load_checkpoint(disk_of(folder, 0, 1)); },
                ThrowsMessage<IoError>(AllOf(HasSubstr("weights-00001-of-00002.safetensors"), HasSubstr("on host "),
                                             HasSubstr("use_node_local_storage"))));
  });
  // All files beside one index are a checkpoint like any other.
  fs::copy(folder.path() / "host1" / "tag", folder.path() / "host0" / "tag",
           fs::copy_options::skip_existing | fs::copy_options::recursive);
  test::run_ranks(1, [&](comm::Communicator& communicator) {
    CarriedNet model;
    const auto engine = start(model.ptr(), carried_config(0, 1), communicator).engine;
    EXPECT_TRUE(engine->load_checkpoint(disk_of(folder, 0, 1)));
    EXPECT_EQ(engine->global_steps(), 1);
  });
}

TEST(LocalStorage, AHostThatLostATagMakesAllGoToTheOneBefore) {
  const test::ScratchFolder folder;
  save_on_two_hosts(folder, 1, {"first", "second"});
  fs::remove_all(folder.path() / "host1" / "second");
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    CarriedNet model;
    const auto engine = start_on_hosts(model, local_config(1, 2), communicator, 1).engine;
    EXPECT_EQ(engine->load_checkpoint(disk_of(folder, communicator.rank(), 1)).tag, "first");
    EXPECT_EQ(engine->global_steps(), 1);
  });
}

TEST(LocalStorage, AFailureOnOneHostLeavesNothingOnAny) {
  const test::ScratchFolder folder;
  std::ofstream(folder.path() / "host1") << "no folder";
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    CarriedNet model;
    const auto engine = start_on_hosts(model, local_config(1, 2), communicator, 1).engine;
    EXPECT_THROW(engine->save_checkpoint(disk_of(folder, communicator.rank(), 1), "tag"), IoError);
  });
  EXPECT_TRUE(!fs::exists(folder.path() / "host0") || fs::is_empty(folder.path() / "host0"));
}

// Two stages that share the embedding, and two data ranks: hosts of two ranks have a stage each, or every rank has one.
std::shared_ptr<Engine> start_stages(const ordered_json& config, comm::Communicator& communicator, int ranks_per_host) {
  const auto model = std::make_shared<pipeline::PipelineModule>(
      pipeline::layers_of(4, /*tied=*/true), pipeline::PipelineOptions{.loss = pipeline::cross_entropy});
  return initialize({.model = model,
                     .config = config,
                     .distributed = Distributed{.ranks = borrowed(communicator),
                                                .local_rank = communicator.rank() % ranks_per_host,
                                                .ranks_per_host = ranks_per_host,
                                                .device = at::kCPU}})
      .engine;
}

std::vector<double> train_stages(Engine& engine, int64_t first, int64_t steps) {
  std::vector<double> losses;
  for (int64_t step = first; step < first + steps; ++step) {
    int64_t next = step * engine.gradient_accumulation_steps();
    const int rank = engine.communicator().rank();
    losses.push_back(engine.train_batch([&] { return pipeline::tokens_of(next++, rank); }).item<double>());
  }
  return losses;
}

TEST(LocalStorage, StagesOfAPipelineGoOnFromTheirOwnDisks) {
  for (const int stage : {0, 1, 3}) {
    for (const int ranks_per_host : {1, 2}) {
      SCOPED_TRACE(cat("stage ", stage, ", ", ranks_per_host, " ranks a host"));
      const test::ScratchFolder folder;
      ordered_json config = {{"train_micro_batch_size_per_gpu", 2},
                             {"gradient_accumulation_steps", 2},
                             {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 1e-3}}}}},
                             {"zero_optimization", {{"stage", stage}}},
                             {"checkpoint", {{"use_node_local_storage", true}}},
                             {"pipeline", {{"stages", 2}}}};
      std::vector<std::vector<double>> wanted(4);
      test::run_ranks(4, [&](comm::Communicator& communicator) {
        const auto rank = static_cast<size_t>(communicator.rank());
        const auto engine = start_stages(config, communicator, ranks_per_host);
        train_stages(*engine, 0, 2);
        engine->save_checkpoint(disk_of(folder, communicator.rank(), ranks_per_host), "tag");
        wanted[rank] = train_stages(*engine, 2, 2);
      });
      test::run_ranks(4, [&](comm::Communicator& communicator) {
        const auto engine = start_stages(config, communicator, ranks_per_host);
        ASSERT_TRUE(engine->load_checkpoint(disk_of(folder, communicator.rank(), ranks_per_host)));
        EXPECT_EQ(train_stages(*engine, 2, 2), wanted[static_cast<size_t>(communicator.rank())]);
      });
      // All files beside one index are a checkpoint like any other: of what two hosts have, one of the copies counts.
      for (int host = 1; host < 4 / ranks_per_host; ++host) {
        fs::copy(folder.path() / cat("host", host) / "tag", folder.path() / "host0" / "tag",
                 fs::copy_options::skip_existing | fs::copy_options::recursive);
      }
      config.erase("checkpoint");
      config["pipeline"]["stages"] = 1;
      test::run_ranks(1, [&](comm::Communicator& communicator) {
        const auto engine = start_stages(config, communicator, 1);
        EXPECT_TRUE(engine->load_checkpoint(disk_of(folder, 0, ranks_per_host)));
        EXPECT_EQ(engine->global_steps(), 2);
      });
    }
  }
}

TEST(LocalStorage, Excludes) {
  ordered_json config = local_config(2, 2);
  config["checkpoint"]["writer"]["decoupled"] = true;
  EXPECT_THAT([&] { config::parse(config, {.dp_world_size = 2}); },
              ThrowsMessage<ConfigError>(HasSubstr("checkpoint.writer.decoupled")));
  const test::ScratchFolder folder;
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    CarriedNet model;
    const auto engine = start_on_hosts(model, local_config(1, 2), communicator, 1).engine;
    EXPECT_THAT([&] { engine->save_checkpoint(folder.path().string(), "tag", {.asynchronous = true}); },
                ThrowsMessage<UsageError>(HasSubstr("use_node_local_storage on 2 hosts")));
  });
}

}  // namespace
}  // namespace ds::engine
