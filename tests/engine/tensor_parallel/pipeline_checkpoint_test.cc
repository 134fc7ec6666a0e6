// Checkpoints between a pipeline of whole layers and engines whose ranks have parts of them.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "checkpoint/folder_source.h"
#include "checkpoint/source/training_state.h"
#include "core/text.h"
#include "examples/gpt/gpt_layers.h"
#include "tests/engine/tensor_parallel/split_training.h"
#include "tests/support/scratch_folder.h"

namespace ds::engine {
namespace {

constexpr int kSavedSteps = 3;
constexpr int kAllSteps = 8;

struct Layout {
  int pipe = 1;
  int tensor = 1;
  int stage = 0;

  std::string text() const { return cat("pipe ", pipe, " tensor ", tensor, " stage ", stage); }
};

// The same GPT, as one module or as a list of layers.
class LayoutJob {
 public:
  LayoutJob(const Layout& layout, bool tied) : layout_(layout) {
    run_ = {.tensor = layout.tensor, .stage = layout.stage, .accumulation = 2, .model = small_gpt(tied)};
    run_.more["checkpoint"] = {{"durable", false}};
    if (layout.pipe > 1) run_.more["pipeline"] = {{"stages", layout.pipe}};
  }

  // Each rank with its engine.
  template <class Body>
  void on_ranks(Body&& body) const {
    test::run_ranks(layout_.pipe * layout_.tensor, [&](comm::Communicator& world) {
      const std::shared_ptr<comm::Communicator> ranks(std::shared_ptr<void>(), &world);
      if (layout_.pipe > 1) {
        const auto layers =
            gpt::make_layers(run_.model, 3, {layout_.pipe, "1f1b"}, std::make_shared<const gpt::Drops>());
        const auto engine =
            initialize({.model = layers, .config = run_.config(), .communicator = ranks, .seed_generators = false})
                .engine;
        body(*engine, world, [&](int step) { return pipeline_step(*engine, step); });
      } else {
        const auto net = run_.make();
        const auto engine = run_.start(world, net).engine;
        body(*engine, world, [&](int step) { return module_step(*engine, *net, step); });
      }
    });
  }

 private:
  double pipeline_step(Engine& engine, int step) const {
    int64_t next = step * run_.accumulation;
    const at::Tensor loss = engine.train_batch([&] {
      const GptBatch batch = gpt_batch(next++, 0, run_.model);
      return pipeline::MicroBatch{.inputs = {batch.tokens}, .labels = {batch.targets}};
    });
    return loss.item<double>();
  }
  double module_step(Engine& engine, gpt::Gpt& net, int step) const {
    double sum = 0;
    for (int micro = step * run_.accumulation; micro < (step + 1) * run_.accumulation; ++micro) {
      const GptBatch batch = gpt_batch(micro, 0, run_.model);
      sum += engine.backward(net.forward(batch.tokens, batch.targets)).item<double>();
      engine.step();
    }
    return sum;
  }

  Layout layout_;
  GptRun run_;
};

void expect_any_goes_on_in_any(bool tied) {
  const test::ScratchFolder scratch;
  const std::string folder = scratch.path().string();
  const std::vector<Layout> layouts = {
      {.pipe = 2, .stage = 1}, {.tensor = 2, .stage = 0}, {.tensor = 4, .stage = 3}, {.tensor = 1, .stage = 3}};
  for (const Layout& from : layouts) {
    std::vector<double> wanted;
    LayoutJob(from, tied).on_ranks([&](Engine& engine, comm::Communicator& world, auto&& make_step) {
      for (int step = 0; step < kSavedSteps; ++step) make_step(step);
      engine.save_checkpoint(folder, "saved");
      for (int step = kSavedSteps; step < kAllSteps; ++step) {
        const double loss = make_step(step);
        if (world.rank() == 0) wanted.push_back(loss);
      }
    });
    EXPECT_EQ(checkpoint::open_folder(folder + "/saved")->info("weights/h.1.attn.qkv.weight").sizes,
              (std::vector<int64_t>{96, 32}));
    for (const Layout& to : layouts) {
      if (from.pipe == 1 && to.pipe == 1) continue;  // checkpoint_test has those
      SCOPED_TRACE(cat(from.text(), " to ", to.text(), tied ? ", tied" : ""));
      LayoutJob(to, tied).on_ranks([&](Engine& engine, comm::Communicator&, auto&& make_step) {
        engine.load_checkpoint(folder, "saved");
        EXPECT_EQ(engine.global_steps(), kSavedSteps);
        for (int step = kSavedSteps; step < kAllSteps; ++step) {
          EXPECT_NEAR(make_step(step), wanted[static_cast<size_t>(step - kSavedSteps)], 5e-6) << "step " << step;
        }
      });
    }
  }
}

TEST(TensorPipelineCheckpoint, APipelineGoesOnInPartsAndBack) { expect_any_goes_on_in_any(/*tied=*/false); }
TEST(TensorPipelineCheckpoint, AlsoWithATiedVocabulary) { expect_any_goes_on_in_any(/*tied=*/true); }

}  // namespace
}  // namespace ds::engine
