// Saves beside training: what is written is the state at the save, whatever happens afterwards; failures are told.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/folder_source.h"
#include "checkpoint/tag_folder.h"
#include "core/check.h"
#include "core/text.h"
#include "tests/model/checkpoint/checkpoint_run.h"
#include "tests/model/offloaded/offload_run.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;
using test::run_ranks;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

const SaveOptions kAsynchronous = {.asynchronous = true};

std::string bytes_of_file(const fs::path& file) {
  std::string bytes(fs::file_size(file), '\0');
  std::ifstream(file, std::ios::binary).read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  return bytes;
}

// File by file, byte by byte; the generator may have gone on.
void expect_same_files(const fs::path& one, const fs::path& other) {
  int compared = 0;
  for (const auto& entry : fs::directory_iterator(one)) {
    const std::string name = entry.path().filename();
    ASSERT_TRUE(fs::exists(other / name)) << name;
    if (name.starts_with("ranks-") || name == "index.json") continue;
    EXPECT_TRUE(bytes_of_file(entry.path()) == bytes_of_file(other / name)) << name;
    ++compared;
  }
  EXPECT_GT(compared, 0);
  EXPECT_EQ(std::distance(fs::directory_iterator(one), {}), std::distance(fs::directory_iterator(other), {}));
  const auto a = checkpoint::open_folder(one.string());
  const auto b = checkpoint::open_folder(other.string());
  EXPECT_EQ(a->tensors(), b->tensors());
  auto of_a = checkpoint::to_json(a->state());
  auto of_b = checkpoint::to_json(b->state());
  of_a.erase("run");  // of each training its own
  of_b.erase("run");
  EXPECT_EQ(of_a, of_b);
  EXPECT_TRUE(checkpoint::verify(one.string()).empty());
  EXPECT_TRUE(checkpoint::verify(other.string()).empty());
}

struct AsyncCell {
  const char* name;
  int stage;
  int world;
  ordered_json zero = ordered_json::object();
  ordered_json top = ordered_json::object();

  ordered_json config() const {
    ordered_json all = carried_config(stage, world);
    if (!zero.is_null()) all["zero_optimization"].update(zero);
    if (!top.is_null()) all.update(top);
    return all;
  }
};

std::vector<AsyncCell> async_cells() {
  const ordered_json bf16 = ordered_json::parse(R"({"bf16": {"enabled": true}})");
  return {
      {"Whole", 0, 2},
      {"Stage1", 1, 2},
      {"Stage2", 2, 3, {}, bf16},
      {"Stage3", 3, 2},
      {"Stage3bf16", 3, 2, {}, bf16},
      {"HostOptimizer", 1, 2, {{"offload_optimizer", on_host()}}},
      {"FileOptimizer", 2, 2, {{"offload_optimizer", on_disk()}}},
      {"AllInFiles", 3, 2, {{"offload_optimizer", on_disk()}, {"offload_param", on_disk({{"max_in_cpu", 0}})}}, bf16},
      {"Delayed", 2, 2, {{"offload_optimizer", on_host({{"delayed_update", true}, {"delayed_update_start", 1}})}}},
      {"SuperOffload", 1, 2, {{"offload_optimizer", on_host({{"super_offload", true}})}}},
      {"Copies", 1, 4, {{"mics_shard_size", 2}}},
  };
}

class AsyncSave : public ::testing::TestWithParam<AsyncCell> {};

INSTANTIATE_TEST_SUITE_P(Grid, AsyncSave, ::testing::ValuesIn(async_cells()),
                         [](const auto& cell) { return std::string(cell.param.name); });

TEST_P(AsyncSave, WritesTheStateAtTheSaveThoughTrainingGoesOn) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  std::vector<State> ends(2);
  for (const bool asynchronous : {false, true}) {
    run_ranks(GetParam().world, [&](comm::Communicator& communicator) {
      CarriedNet model;
      const auto engine = start(model.ptr(), GetParam().config(), communicator).engine;
      const std::string prefix = asynchronous ? "async" : "sync";
      for (int64_t step = 1; step <= 6; ++step) {
        train_until(*engine, model, step);
        if (step == 5) continue;  // two steps beside one save
        engine->save_checkpoint(dir, cat(prefix, step), {.asynchronous = asynchronous});
      }
      State end = train_until(*engine, model, 8);
      engine->wait_for_checkpoint();
      engine->wait_for_checkpoint();  // there is none any more
      if (communicator.rank() == 0) ends[asynchronous ? 1 : 0] = end;
    });
  }
  for (const int step : {1, 2, 3, 4, 6}) {
    SCOPED_TRACE(step);
    expect_same_files(fs::path(dir) / cat("sync", step), fs::path(dir) / cat("async", step));
  }
  EXPECT_EQ(largest_difference(ends[0], ends[1]), 0.0);  // training is as without saves beside it
}

// Large enough that the copy is still running when the next step wants to update.
struct WideNetImpl : torch::nn::Module {
  WideNetImpl() {
    weight = register_parameter("weight", torch::full({1 << 20}, 0.5));
    bias = register_parameter("bias", torch::full({1 << 18}, 0.25));
  }
  at::Tensor loss() { return (weight * 1.5).sum() * 1e-3 + (bias * 0.5).sum() * 1e-3; }
  at::Tensor weight, bias;
};
TORCH_MODULE(WideNet);

TEST(AsyncSaveOfALargeModel, TheUpdateWaitsForTheCopy) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  for (const int stage : {0, 2, 3}) {
    for (const bool asynchronous : {false, true}) {
      run_ranks(2, [&](comm::Communicator& communicator) {
        WideNet model;
        ordered_json config = small_config(stage, 1);
        config["zero_optimization"]["reduce_bucket_size"] = 1 << 20;
        const auto engine = start(model.ptr(), config, communicator).engine;
        for (int step = 0; step < 3; ++step) {
          engine->backward(model->loss());
          engine->step();
          engine->save_checkpoint(dir, cat(asynchronous ? "async" : "sync", step), {.asynchronous = asynchronous});
        }
        engine->backward(model->loss());
        engine->step();
      });
    }
    for (int step = 0; step < 3; ++step) {
      SCOPED_TRACE(cat("stage ", stage, " step ", step));
      expect_same_files(fs::path(dir) / cat("sync", step), fs::path(dir) / cat("async", step));
    }
  }
}

// Every call that changes what is copied.
TEST(AsyncSaveBesides, OtherChangesWaitToo) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  for (const int stage : {1, 3}) {
    run_ranks(2, [&](comm::Communicator& communicator) {
      WideNet model;
      ordered_json config = small_config(stage, 1);
      config["zero_optimization"]["reduce_bucket_size"] = 1 << 20;
      const auto engine = start(model.ptr(), config, communicator).engine;
      engine->save_checkpoint(dir, "start");
      engine->save_checkpoint(dir, "gathered", kAsynchronous);
      {
        const auto whole = engine->gathered_parameters({model->weight, model->bias}, /*modifier_rank=*/0);
        const torch::NoGradGuard no_grad;
        model->weight.fill_(9);
        model->bias.fill_(9);
      }
      engine->load_checkpoint(dir, "start");
      engine->save_checkpoint(dir, "moved", kAsynchronous);
      engine->offload_states();
      engine->reload_states();
      engine->save_checkpoint(dir, "loaded", kAsynchronous);
      engine->load_checkpoint(dir, "gathered");
      engine->save_checkpoint(dir, "read", kAsynchronous);
      engine->fp32_state_dict();
      engine->module_state_dict();
    });
    for (const char* tag : {"gathered", "moved", "loaded", "read"}) {
      SCOPED_TRACE(tag);
      expect_same_files(fs::path(dir) / "start", fs::path(dir) / tag);
    }
  }
}

// A frozen parameter that is not divided is the module's own: the program may change it as soon as the call returns.
TEST(AsyncSaveBesides, FrozenParametersMayChangeAtOnce) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  for (const int stage : {1, 3}) {
    run_ranks(2, [&](comm::Communicator& communicator) {
      CarriedNet model;
      const at::Tensor average = model->register_parameter("average", torch::full({1 << 18}, 0.25), false);
      ordered_json config = carried_config(stage, 2);
      config["zero_optimization"]["stage3_param_persistence_threshold"] = 1 << 20;
      const auto engine = start(model.ptr(), config, communicator).engine;
      const torch::NoGradGuard no_grad;
      for (int save = 0; save < 4; ++save) {  // the first copies, later ones may write from the state
        average.fill_(save);
        engine->save_checkpoint(dir, cat("tag", save), kAsynchronous);
        average.fill_(-1);
        engine->wait_for_checkpoint();
      }
    });
    for (int save = 0; save < 4; ++save) {
      const auto saved = checkpoint::open_folder((fs::path(dir) / cat("tag", save)).string());
      EXPECT_TRUE(torch::equal(saved->tensor("weights/average"), torch::full({1 << 18}, static_cast<float>(save))))
          << "stage " << stage << ", save " << save;
    }
  }
}

TEST(AsyncSaveBesides, ThePathAndTheConfig) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    ordered_json config = small_config(1, 1);
    config["checkpoint"] = {{"writer", {{"decoupled", true}}}};
    const auto engine = start(model.ptr(), config, communicator).engine;
    EXPECT_EQ(engine->save_checkpoint(dir), dir + "/global_step0");
    EXPECT_EQ(engine->save_checkpoint(dir, "again"), dir + "/again");
    EXPECT_TRUE(fs::exists(dir + "/global_step0"));  // one in flight at a time
    EXPECT_EQ(engine->save_checkpoint(dir, "again"), dir + "/again");
    engine->wait_for_checkpoint();
    EXPECT_TRUE(fs::exists(dir + "/again"));
  });
  EXPECT_TRUE(checkpoint::verify(dir + "/again").empty());
  EXPECT_TRUE(checkpoint::incomplete_paths(dir, "again").empty());
}

TEST(AsyncSaveBesides, AnEngineThatEndsFinishesIt) {
  for (const int stage : {0, 1, 3}) {
    const test::ScratchFolder folder;
    const std::string dir = folder.path().string();
    run_ranks(3, [&](comm::Communicator& communicator) {
      WideNet model;
      const auto engine = start(model.ptr(), small_config(stage, 1), communicator).engine;
      engine->save_checkpoint(dir, "last", kAsynchronous);
    });
    EXPECT_TRUE(checkpoint::verify(dir + "/last").empty());
    EXPECT_EQ(checkpoint::read_latest(dir), "last");
  }
}

TEST(AsyncSaveBesides, KeepLast) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(2, 1), communicator).engine;
    for (int step = 0; step < 6; ++step) {
      train(*engine, model, 1);
      engine->save_checkpoint(dir, "", {.asynchronous = true, .keep_last = 2});
    }
  });
  std::vector<std::string> tags;
  for (const auto& tag : checkpoint::whole_tags(dir)) tags.push_back(tag.tag);
  EXPECT_EQ(tags, (std::vector<std::string>{"global_step6", "global_step5"}));
  EXPECT_EQ(std::distance(fs::directory_iterator(dir), {}), 3);
}

// --- failures --------------------------------------------------------------------------------------------------------

// A buffer that the files do not hold makes the save of that rank fail, on the thread that writes.
struct OddNet : WideNetImpl {
  OddNet() { odd = register_buffer("odd", torch::zeros({2})); }
  void set_odd(bool is_odd) { odd.set_data(torch::zeros({2}, is_odd ? torch::kComplexFloat : torch::kFloat)); }
  at::Tensor odd;
};

class AsyncFailure : public ::testing::TestWithParam<int> {
 protected:
  int bad_rank() const { return GetParam(); }
  static constexpr int kRanks = 3;
};

INSTANTIATE_TEST_SUITE_P(Rank, AsyncFailure, ::testing::Values(0, 1, 2));

TEST_P(AsyncFailure, IsToldToAllRanksAndOlderCheckpointsStay) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  run_ranks(kRanks, [&](comm::Communicator& communicator) {
    const auto model = std::make_shared<OddNet>();
    const auto engine = start(model, small_config(1, 1), communicator).engine;
    engine->save_checkpoint(dir, "good");
    model->set_odd(communicator.rank() == bad_rank());
    engine->save_checkpoint(dir, "bad", kAsynchronous);
    const auto wait = [&] { engine->wait_for_checkpoint(); };
    if (communicator.rank() == bad_rank()) {
      EXPECT_THAT(wait, ThrowsMessage<IoError>(HasSubstr("bad")));
    } else {
      EXPECT_THAT(wait, ThrowsMessage<IoError>(AnyOf(HasSubstr(cat("rank ", bad_rank())), HasSubstr("bad"))));
    }
    communicator.barrier();
    engine->wait_for_checkpoint();  // told once
    EXPECT_FALSE(fs::exists(checkpoint::tag_path(dir, "bad")));
    EXPECT_TRUE(checkpoint::incomplete_paths(dir, "bad").empty()) << "it would fill the disk";
    EXPECT_EQ(checkpoint::read_latest(dir), "good");
    communicator.barrier();
    model->set_odd(false);
    engine->backward(model->loss());
    engine->step();
    engine->save_checkpoint(dir, "bad", kAsynchronous);  // now it can be written
    engine->wait_for_checkpoint();
    EXPECT_TRUE(fs::exists(checkpoint::tag_path(dir, "bad")));
    EXPECT_TRUE(engine->load_checkpoint(dir, "good"));
  });
  EXPECT_TRUE(checkpoint::verify(dir + "/good").empty());
  EXPECT_TRUE(checkpoint::verify(dir + "/bad").empty());
}

TEST_P(AsyncFailure, TheNextSaveGoesOn) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  run_ranks(kRanks, [&](comm::Communicator& communicator) {
    const auto model = std::make_shared<OddNet>();
    const auto engine = start(model, small_config(2, 1), communicator).engine;
    engine->save_checkpoint(dir, "good", kAsynchronous);
    model->set_odd(communicator.rank() == bad_rank());
    engine->save_checkpoint(dir, "bad", kAsynchronous);
    model->set_odd(false);
    engine->save_checkpoint(dir, "next", kAsynchronous);  // logs it
    engine->wait_for_checkpoint();
    EXPECT_FALSE(fs::exists(checkpoint::tag_path(dir, "bad")));
  });
  EXPECT_TRUE(checkpoint::verify(dir + "/good").empty());
  EXPECT_TRUE(checkpoint::verify(dir + "/next").empty());
}

TEST_P(AsyncFailure, AnEngineThatEndsDoesNotWaitForIt) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  run_ranks(kRanks, [&](comm::Communicator& communicator) {
    const auto model = std::make_shared<OddNet>();
    const auto engine = start(model, small_config(3, 1), communicator).engine;
    engine->save_checkpoint(dir, "good");
    model->set_odd(communicator.rank() == bad_rank());
    engine->save_checkpoint(dir, "bad", kAsynchronous);
  });
  EXPECT_FALSE(fs::exists(checkpoint::tag_path(dir, "bad")));
  EXPECT_TRUE(checkpoint::verify(dir + "/good").empty());
  EXPECT_EQ(checkpoint::read_latest(dir), "good");
}

// Synchronous ones fail on all ranks, and training goes on.
TEST(SyncFailure, IsThrownOnAllRanks) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(1, 1), communicator).engine;
    engine->save_checkpoint(dir, "good");
    communicator.barrier();
    if (communicator.rank() == 0) std::ofstream(fs::path(dir) / "file") << "x";
    communicator.barrier();
    for (const bool asynchronous : {false, true}) {
      EXPECT_THROW(engine->save_checkpoint(dir + "/file", "tag", {.asynchronous = asynchronous}), IoError);
      EXPECT_THROW(engine->save_checkpoint(dir + "/file/deeper", "tag", {.asynchronous = asynchronous}), IoError);
      EXPECT_THROW(engine->save_checkpoint(dir, "file", {.asynchronous = asynchronous}), IoError);
      EXPECT_THROW(engine->save_checkpoint("/proc/self/no", "tag", {.asynchronous = asynchronous}), IoError);
    }
    train(*engine, model, 1);
    engine->save_checkpoint(dir, "next");
    EXPECT_TRUE(engine->load_checkpoint(dir, "good"));
  });
  EXPECT_TRUE(fs::is_regular_file(fs::path(dir) / "file"));
  EXPECT_TRUE(checkpoint::verify(dir + "/next").empty());
}

}  // namespace
}  // namespace ds::engine
