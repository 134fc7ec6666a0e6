// What a save and a load take beside the state itself.
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "comm/backends/factory.h"
#include "core/memory/host_memory.h"
#include "dsengine/engine.h"
#include "tests/memory/large_net.h"
#include "tests/support/process_ranks.h"

namespace ds::engine {
namespace {

using testing::ProcessRank;

constexpr int64_t kSavedWidth = 1024;
constexpr int64_t kSavedDepth = 24;  // 25 M parameters, of 100 MB of float32; with states 300 MB
constexpr int64_t kSavedMiB = int64_t{1} << 20;

int64_t own_pages(const char* field) {
  return status_bytes(field) - status_bytes("RssFile") - status_bytes("RssShmem");
}

// The most pages that `action` adds to those of this process.
template <class Action>
int64_t growth_in(const Action& action) {
  std::ofstream("/proc/self/clear_refs") << 5;  // the peak begins anew
  const int64_t before = own_pages("VmRSS");
  action();
  return own_pages("VmHWM") - before;
}

nlohmann::ordered_json saved_config(int stage) {
  return {{"train_micro_batch_size_per_gpu", 2},
          {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 1e-5}}}}},
          {"zero_optimization", {{"stage", stage}, {"stage3_param_persistence_threshold", 0}}}};
}

// Saves at `from` and loads at `to`, with states that have pages already.
void save_and_load(const ProcessRank& ranks, int from, int to) {
  at::set_num_threads(1);
  return_freed_host_memory();
  setenv("MALLOC_MMAP_THRESHOLD_", "262144", /*overwrite=*/1);
  const auto communicator = comm::make_communicator(ranks.meet(), at::kCPU);
  const std::string folder = ranks.folder() + "/saved";
  const at::Tensor x = large_input(kSavedWidth, ranks.rank());
  double loss = 0;
  for (const int stage : {from, to}) {
    LargeNet model(kSavedWidth, kSavedDepth);
    auto [engine, optimizer, loader, schedule] =
        initialize({.model = model.ptr(), .config = saved_config(stage), .communicator = communicator});
    engine->backward(model->loss(x));
    engine->step();
    if (stage == from) {
      EXPECT_LE(growth_in([&, &e = *engine] { e.save_checkpoint(folder, "first"); }), 8 * kSavedMiB);
      loss = model->loss(x).item<double>();
    }
    if (stage == to) {
      EXPECT_LE(growth_in([&, &e = *engine] { e.load_checkpoint(folder, "first"); }), 8 * kSavedMiB);
      EXPECT_NEAR(model->loss(x).item<double>(), loss, 1e-6);
    }
  }
}

DS_PROCESS_TEST(CheckpointMemory, Stage2IntoStage3, 2, std::chrono::seconds(120)) { save_and_load(ranks, 2, 3); }
DS_PROCESS_TEST(CheckpointMemory, Stage3IntoStage0, 2, std::chrono::seconds(120)) { save_and_load(ranks, 3, 0); }
DS_PROCESS_TEST(CheckpointMemory, Stage1IntoStage1, 3, std::chrono::seconds(120)) { save_and_load(ranks, 1, 1); }

}  // namespace
}  // namespace ds::engine
