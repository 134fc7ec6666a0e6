// Checkpoints of any layout go on in any other.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "checkpoint/folder_source.h"
#include "core/text.h"
#include "tests/model/checkpoint/checkpoint_run.h"
#include "tests/support/grid.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

constexpr int64_t kSaved = 3;
// The learning rate rises until step 5, and falls.
int64_t last_step() { return test::sample_wanted() ? 7 : 13; }

using Layout = std::pair<int, int>;  // stage, ranks

const std::vector<int> kStages{0, 1, 2, 3};
const std::vector<int> kWorlds{1, 2, 3, 4};

std::vector<Layout> all_layouts() {
  std::vector<Layout> layouts;
  for (const int stage : kStages) {
    for (const int world : kWorlds) layouts.emplace_back(stage, world);
  }
  return layouts;
}

// 256 ways from a layout to a layout. In the sample every layout is saved and every layout loads, and every stage is
// loaded by every stage and number of ranks, as is every number of ranks.
std::vector<std::pair<Layout, Layout>> ways() {
  std::vector<std::pair<Layout, Layout>> result;
  for (const auto& [stage, world, to_stage, to_world] : test::grid_sample(2, kStages, kWorlds, kStages, kWorlds)) {
    result.push_back({{stage, world}, {to_stage, to_world}});
  }
  return result;
}

std::string tag_of(Layout layout) { return cat("stage", layout.first, "_ranks", layout.second); }

// Every layout is trained without a break, and saved on the way.
std::map<Layout, State> save_all(const std::string& folder) {
  std::map<Layout, State> ends;
  for (const Layout& layout : all_layouts()) {
    test::run_ranks(layout.second, [&](comm::Communicator& communicator) {
      CarriedNet model;
      auto [engine, optimizer, loader, schedule] =
          start(model.ptr(), carried_config(layout.first, layout.second), communicator);
      train_until(*engine, model, kSaved);
      engine->save_checkpoint(folder, tag_of(layout), {.client_state = {{"note", tag_of(layout)}}});
      const State end = train_until(*engine, model, last_step());
      if (communicator.rank() == 0) ends[layout] = end;
    });
    EXPECT_EQ(checkpoint::verify(folder + "/" + tag_of(layout)).size(), 0U);
  }
  return ends;
}

// Loads what `from` saved and trains on in layout `to`; returns the state at the end.
State go_on(const std::string& folder, Layout from, Layout to) {
  State end;
  double lr = 0;
  test::run_ranks(to.second, [&](comm::Communicator& communicator) {
    CarriedNet model;
    torch::NoGradGuard no_grad;
    for (at::Tensor& parameter : model->parameters()) parameter.fill_(0.125);  // nothing of the start stays
    torch::AutoGradMode grad(true);
    auto [engine, optimizer, loader, schedule] = start(model.ptr(), carried_config(to.first, to.second), communicator);
    const LoadedCheckpoint loaded = engine->load_checkpoint(folder, tag_of(from));
    EXPECT_EQ(loaded.client_state.at("note"), tag_of(from));
    EXPECT_EQ(engine->global_steps(), kSaved);
    EXPECT_EQ(engine->global_samples(), kSaved * kGlobalBatch);
    EXPECT_EQ(model->seen[0].item<double>(), static_cast<double>(kSaved));
    const State own = train_until(*engine, model, last_step());
    if (communicator.rank() == 0) {
      end = own;
      lr = engine->get_lr()[0];
    }
  });
  EXPECT_GT(lr, 0);
  return end;
}

TEST(Checkpoint, GoesOnFromAnyLayoutInAnyOther) {
  const test::ScratchFolder folder;
  const std::map<Layout, State> ends = save_all(folder.path().string());
  for (const auto& [from, to] : ways()) {
    SCOPED_TRACE(tag_of(from) + " -> " + tag_of(to));
    const double difference = largest_difference(go_on(folder.path().string(), from, to), ends.at(to));
    if (from.second == to.second) {
      EXPECT_EQ(difference, 0.0);
    } else {
      EXPECT_LE(difference, 5e-6);
    }
  }
}

}  // namespace
}  // namespace ds::engine
