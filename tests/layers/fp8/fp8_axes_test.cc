// The section fp8 on the stages of a pipeline and on the parts of a tensor axis, beside one rank with all layers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "dsengine/errors.h"
#include "tests/model/small_run.h"
#include "tests/pipeline/pipeline_job.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"
#include "tests/support/thrown.h"

namespace ds::pipeline {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

nlohmann::json fp8_stages(int stages, const std::string& schedule, int zero_stage) {
  nlohmann::json config = config_of(stages, schedule, zero_stage);
  config["fp8"] = {{"enabled", true}, {"emulate", true}, {"amax_history_len", 3}};
  return config;
}

// A stage has the layers, the micro-batches and so the scales that one rank has.
TEST(Fp8Pipeline, TrainsAsOneStage) {
  const std::vector<double> wanted = losses_of({.ranks = 1, .config = fp8_stages(1, "gpipe", 0)});
  const std::vector<double> plain = losses_of({.ranks = 1, .config = config_of(1, "gpipe", 0)});
  EXPECT_GT(std::abs(plain.back() - wanted.back()), 1e-5) << "FP8 is seen in the loss";
  for (const char* schedule : {"gpipe", "1f1b", "interleaved", "zb_h1", "zbv", "dualpipev"}) {
    SCOPED_TRACE(schedule);
    expect_near(losses_of({.config = fp8_stages(2, schedule, 0)}), wanted, 5e-6);
  }
  const std::vector<double> of_two = losses_of({.ranks = 2, .config = fp8_stages(1, "gpipe", 0)});
  for (const int stage : {1, 2, 3}) {
    SCOPED_TRACE(stage);
    expect_near(losses_of({.ranks = 4, .config = fp8_stages(2, "1f1b", stage)}), of_two, 5e-6);
  }
}

// The weights' gradients of FP8 layers wait for the second pass of a zero-bubble schedule.
TEST(Fp8Pipeline, BackwardInTwoPassesHasTheBitsOfOne) {
  nlohmann::json config = fp8_stages(2, "1f1b", 0);
  config["fp8"]["fp8_wgrad"] = true;
  const std::vector<double> whole = losses_of({.config = config});
  config["pipeline"]["schedule"] = "zb_h1";
  EXPECT_EQ(losses_of({.config = config}), whole);
}

TEST(Fp8Pipeline, CheckpointsGoOnWithAnotherNumberOfStages) {
  const test::ScratchFolder folder;
  const auto losses_from = [&](int stages, bool saves) {
    std::vector<double> losses;
    run({.ranks = stages, .config = fp8_stages(stages, "1f1b", 1)}, [&](Rank& rank) {
      for (int step = 0; saves && step < 3; ++step) rank.train_step(step);
      if (saves) {
        rank.engine.save_checkpoint(folder.path().string());
      } else {
        rank.engine.load_checkpoint(folder.path().string());
      }
      for (int step = 3; step < kSteps; ++step) {
        const double loss = rank.train_step(step);
        if (rank.world_rank == 0) losses.push_back(loss);
      }
    });
    return losses;
  };
  const std::vector<double> wanted = losses_from(2, /*saves=*/true);
  expect_near(losses_from(1, /*saves=*/false), wanted, 5e-6);
  expect_near(losses_from(2, /*saves=*/false), wanted, 0);
}

std::string refusal_on_stages(const nlohmann::json& fp8, const std::function<std::vector<LayerSpec>()>& layers = {}) {
  nlohmann::json config = fp8_stages(2, "1f1b", 0);
  config["fp8"].update(fp8.is_null() ? nlohmann::json::object() : fp8);
  std::vector<std::string> texts(2, "none");
  test::run_ranks(2, [&](comm::Communicator& world) {
    const auto model = std::make_shared<PipelineModule>(layers ? layers() : layers_of(4, true),
                                                        PipelineOptions{.loss = cross_entropy});
    texts[static_cast<size_t>(world.rank())] = test::thrown_by<ConfigError>(
        [&] { engine::initialize({.model = model, .config = config, .communicator = test::borrowed(world)}); }, "none");
  });
  EXPECT_EQ(texts[0] == "none", texts[1] == "none") << texts[0] << "\n" << texts[1];
  return texts[0];
}

std::vector<LayerSpec> layers_with(const std::function<LayerSpec()>& first, const std::function<LayerSpec()>& last) {
  std::vector<LayerSpec> layers = layers_of(4, false);
  layers.insert(layers.begin() + 1, first());
  layers.insert(layers.end() - 1, last());
  return layers;
}

TEST(Fp8Pipeline, NamesAreThoseOfAllStagesAndMisfitsAreToldOnAll) {
  EXPECT_EQ(refusal_on_stages({{"exclude", {"h.3.*"}}}), "none") << "a layer of the last stage alone";
  EXPECT_EQ(refusal_on_stages({{"modules", {"h.0.*"}}}), "none") << "no layer of the last stage";
  EXPECT_THAT(refusal_on_stages({{"exclude", {"x.*"}}}), AllOf(HasSubstr("\"x.*\""), HasSubstr("h.0.wide")));
  const auto linear = [](const char* name, int64_t middle) {
    return [name, middle] { return LayerSpec::of<torch::nn::Linear>(kWidth, middle).named(name); };
  };
  EXPECT_THAT(refusal_on_stages({}, [&] { return layers_with(linear("a", 16), linear("b", 24)); }),
              AllOf(HasSubstr("layer b:"), HasSubstr("multiples of 16, found 16 and 24")));
  const auto tied = [] { return LayerSpec::tied<torch::nn::Linear>("same", kWidth, kWidth); };
  const auto shared = [&] { return layers_with(tied, tied); };
  EXPECT_THAT(refusal_on_stages({}, shared), AllOf(HasSubstr("layer same"), HasSubstr("several stages")));
  EXPECT_EQ(refusal_on_stages({{"exclude", {"same"}}}, shared), "none");
}

}  // namespace
}  // namespace ds::pipeline

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using ::testing::HasSubstr;

constexpr int64_t kSide = 128;

struct SplitNetImpl : torch::nn::Module {
  explicit SplitNetImpl(int64_t hidden = 2 * kSide) {
    wide = register_module("wide", torch::nn::Linear(kSide, hidden));
    narrow = register_module("narrow", torch::nn::Linear(torch::nn::LinearOptions(hidden, kSide).bias(false)));
    last = register_module("last", torch::nn::Linear(kSide, 5));
    fill(*this);
  }
  at::Tensor loss(const at::Tensor& x) {
    const at::Tensor typed = x.to(last->weight.scalar_type());
    return (last(torch::tanh(narrow(torch::tanh(wide(typed * 0.1))) * 0.05)) - typed.narrow(1, 0, 5).sin())
        .pow(2)
        .mean();
  }
  torch::nn::Linear wide{nullptr}, narrow{nullptr}, last{nullptr};
};
TORCH_MODULE(SplitNet);

ordered_json split_config(int tensor, int stage, const ordered_json& fp8) {
  ordered_json config = small_config(stage, 2);
  config["fp8"] = {{"enabled", true}, {"emulate", true}, {"exclude", {"last"}}};
  config["fp8"].update(fp8.is_null() ? ordered_json::object() : fp8);
  config["tensor_parallel"]["autotp_size"] = tensor;
  config["log_level"] = "error";
  return config;
}

Initialized start_split(const std::shared_ptr<torch::nn::Module>& model, const ordered_json& config,
                        comm::Communicator& world) {
  using enum parallel::Style;
  const bool splits = config["tensor_parallel"]["autotp_size"] > 1;
  return initialize({.model = model,
                     .config = config,
                     .split = splits ? std::vector<parallel::SplitRule>{{"wide", kColumn}, {"narrow", kRow}}
                                     : std::vector<parallel::SplitRule>(),
                     .communicator = borrowed(world)});
}

std::vector<double> train_split(Engine& engine, SplitNet& model, int64_t first, int64_t steps) {
  std::vector<double> losses;
  for (int64_t micro = 2 * first; micro < 2 * (first + steps); ++micro) {
    const auto phase = static_cast<double>(17 * micro + 5 * engine.communicator().rank());
    const at::Tensor loss =
        model->loss(torch::cos(torch::arange(4 * kSide, torch::kFloat) * 1.3 + phase).view({4, kSide}));
    losses.push_back(engine.backward(loss).item<double>());
    engine.step();
  }
  return losses;
}

// `first`: the bound before the first update. Updates of Adam magnify what a number of FP8 is rounded to.
void expect_close(const std::vector<double>& found, const std::vector<double>& wanted, double bound, double first) {
  ASSERT_EQ(found.size(), wanted.size());
  for (size_t i = 0; i < wanted.size(); ++i) EXPECT_NEAR(found[i], wanted[i], i < 2 ? first : bound) << i;
}

std::vector<double> losses_of_axis(int ranks, const ordered_json& config, const char* dtype = nullptr) {
  std::vector<double> losses;
  test::run_ranks(ranks, [&](comm::Communicator& world) {
    ordered_json own = config;
    if (dtype) own[dtype] = {{"enabled", true}};
    SplitNet model;
    const auto engine = start_split(model.ptr(), own, world).engine;
    const std::vector<double> found = train_split(*engine, model, 0, 4);
    if (world.rank() == 0) losses = found;
  });
  return losses;
}

// Blocks of parts are blocks of the full tensors.
TEST(Fp8TensorAxis, BlocksTrainAsOnOneRank) {
  const ordered_json blocks = {{"granularity", "block"}, {"recipe", "current"}};
  const std::vector<double> wanted = losses_of_axis(1, split_config(1, 0, blocks));
  const std::vector<double> plain = losses_of_axis(1, split_config(1, 0, {{"enabled", false}}));
  EXPECT_GT(std::abs(plain.back() - wanted.back()), 1e-5) << "FP8 is seen in the loss";
  expect_close(losses_of_axis(2, split_config(2, 0, blocks)), wanted, 5e-3, 1e-4);
}

TEST(Fp8TensorAxis, TakesTheScalesOfTheFullTensors) {
  for (const int stage : {0, 1, 2, 3}) {
    SCOPED_TRACE(stage);
    const test::ScratchFolder folder;
    std::vector<double> begin;
    std::vector<double> wanted;
    test::run_ranks(1, [&](comm::Communicator& world) {
      SplitNet model;
      const auto engine = start_split(model.ptr(), split_config(1, stage, {}), world).engine;
      begin = train_split(*engine, model, 0, 3);
      engine->save_checkpoint(folder.path().string(), "whole");
      wanted = train_split(*engine, model, 3, 4);
    });
    test::run_ranks(2, [&](comm::Communicator& world) {
      SplitNet model;
      const auto engine = start_split(model.ptr(), split_config(2, stage, {}), world).engine;
      expect_close(train_split(*engine, model, 0, 3), begin, 5e-3, 1e-4);
      engine->load_checkpoint(folder.path().string(), "whole");
      std::vector<double> found = train_split(*engine, model, 3, 2);
      engine->save_checkpoint(folder.path().string(), "parts");
      const std::vector<double> more = train_split(*engine, model, 5, 2);
      found.insert(found.end(), more.begin(), more.end());
      expect_close(found, wanted, 5e-3, 1e-4);
    });
    test::run_ranks(1, [&](comm::Communicator& world) {
      SplitNet model;
      const auto engine = start_split(model.ptr(), split_config(1, stage, {}), world).engine;
      engine->load_checkpoint(folder.path().string(), "parts");
      expect_close(train_split(*engine, model, 5, 2), {wanted.begin() + 4, wanted.end()}, 5e-3, 5e-3);
    });
  }
}

TEST(Fp8TensorAxis, TrainsWithDataRanksAndInSixteenBits) {
  for (const char* dtype : {"bf16", "fp16"}) {
    const std::vector<double> wanted = losses_of_axis(2, split_config(1, 1, {}), dtype);
    expect_close(losses_of_axis(4, split_config(2, 1, {}), dtype), wanted, 0.15 * wanted.front(),
                 0.02 * wanted.front());
  }
}

TEST(Fp8TensorAxis, NamesPartsThatDoNotFitAndOverlappedSums) {
  const auto refusal = [](int64_t hidden, const ordered_json& more) {
    std::string text = "none";
    test::run_ranks(2, [&](comm::Communicator& world) {
      SplitNet model(hidden);
      ordered_json config = split_config(2, 0, {});
      if (!more.is_null()) config.merge_patch(more);
      const std::string own = test::thrown_by<ConfigError>([&] { start_split(model.ptr(), config, world); }, "none");
      if (world.rank() == 0) text = own;
    });
    return text;
  };
  EXPECT_THAT(refusal(48, {}),
              HasSubstr("multiples of 16 in the part of each rank of the tensor axis, found 128 and 24"));
  EXPECT_THAT(refusal(256, {{"tensor_parallel", {{"tp_overlap_comm", true}}}}),
              HasSubstr("tensor_parallel.tp_overlap_comm: true excludes fp8"));
}

// Operands are cast as autocast says, and then to FP8.
TEST(Fp8Autocast, TheSectionsTrainAsAPlainLoopUnderAutocast) {
  const auto losses_with = [](const ordered_json& fp8, const ordered_json& precision) {
    std::vector<double> losses;
    test::run_ranks(1, [&](comm::Communicator& world) {
      ordered_json config = split_config(1, 2, fp8);
      config.update(precision);
      SplitNet model;
      const auto engine = start_split(model.ptr(), config, world).engine;
      losses = train_split(*engine, model, 0, 4);
    });
    return losses;
  };
  const ordered_json autocast = {{"torch_autocast", {{"enabled", true}, {"dtype", "bfloat16"}}}};
  const std::vector<double> on_fp8 = losses_with({}, autocast);
  EXPECT_NE(on_fp8, losses_with({{"enabled", false}}, autocast)) << "FP8 is seen in the loss";
  EXPECT_NE(on_fp8, losses_with({}, ordered_json::object())) << "autocast is seen in the loss";
  expect_close(on_fp8, losses_with({}, ordered_json::object()), 0.4 * on_fp8.front(), 0.02 * on_fp8.front());
  const ordered_json half = {{"fp16", {{"enabled", true}, {"auto_cast", false}}}};
  ordered_json cast = half;
  cast["fp16"]["auto_cast"] = true;
  EXPECT_EQ(losses_with({}, cast), losses_with({}, half)) << "the model casts its input itself";
}

}  // namespace
}  // namespace ds::engine
