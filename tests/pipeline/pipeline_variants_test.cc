// Pipelines together with what a config switches on: precisions, offload, optimizers, groups.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tests/pipeline/pipeline_job.h"
#include "tests/support/grid.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thrown.h"

namespace ds::pipeline {
namespace {

using testing::AllOf;
using testing::Each;
using testing::HasSubstr;

// The same training on one stage, with something changed in the config.
using Change = std::function<void(nlohmann::json&)>;
struct Variant {
  std::string name;
  int zero_stage = 1;
  Change change;
  double tolerance = 5e-6;
  int data_ranks = 2;
};

const std::vector<Variant>& variants() {
  static const std::vector<Variant> kAll = {
      {"Bfloat16", 1, [](nlohmann::json& c) { c["bf16"]["enabled"] = true; }, 2e-3},
      {"Bfloat16Stage3", 3, [](nlohmann::json& c) { c["bf16"]["enabled"] = true; }, 2e-3},
      {"Float16", 2,
       [](nlohmann::json& c) {
         c["fp16"] = {{"enabled", true}, {"initial_scale_power", 8}};
       },
       2e-3},
      {"OffloadOptimizer", 1,
       [](nlohmann::json& c) {
         c["zero_optimization"]["offload_optimizer"] = {{"device", "cpu"}};
       }},
      {"OffloadOptimizerStage2", 2,
       [](nlohmann::json& c) {
         c["zero_optimization"]["offload_optimizer"] = {{"device", "cpu"}};
       }},
      {"OffloadAllStage3", 3,
       [](nlohmann::json& c) {
         c["zero_optimization"]["offload_optimizer"] = {{"device", "cpu"}};
         c["zero_optimization"]["offload_param"] = {{"device", "cpu"}};
       }},
      {"DelayedUpdate", 1,
       [](nlohmann::json& c) {
         c["zero_optimization"]["offload_optimizer"] = {{"device", "cpu"}, {"delayed_update", true}};
       }},
      {"ActivationCheckpoints", 1, [](nlohmann::json& c) { c["pipeline"]["activation_checkpoint_interval"] = 1; }},
      {"SumOfGradients", 1, [](nlohmann::json& c) { c["gradient_allreduce_op"] = "sum"; }},
      {"ClippedByValue", 0,
       [](nlohmann::json& c) {
         c.erase("gradient_clipping");
         c["gradient_clip_by_value"] = 1e-3;
       }},
      {"CopiesOnGroups", 2, [](nlohmann::json& c) { c["zero_optimization"]["mics_shard_size"] = 2; }, 5e-6, 4},
      {"SecondarySlices", 3, [](nlohmann::json& c) { c["zero_optimization"]["zero_hpz_partition_size"] = 2; }, 5e-6, 4},
      {"CompressedGradients", 2,
       [](nlohmann::json& c) {
         c["gradient_compression"] = {{"method", "int8"}};
       },
       2e-3},
      {"Muon", 1,
       [](nlohmann::json& c) {
         c["optimizer"] = {{"type", "Muon"}, {"params", {{"lr", 1e-3}}}};
       }},
      {"Lamb", 1,
       [](nlohmann::json& c) {
         c["optimizer"] = {{"type", "Lamb"}, {"params", {{"lr", 1e-2}}}};
         c["zero_allow_untested_optimizer"] = true;
       }},
  };
  return kAll;
}

class PipelineVariants : public testing::TestWithParam<size_t> {};

TEST_P(PipelineVariants, TrainAsOnOneStage) {
  const Variant& variant = variants()[GetParam()];
  nlohmann::json alone = config_of(1, "1f1b", variant.zero_stage);
  variant.change(alone);
  const std::vector<double> wanted = losses_of({.ranks = variant.data_ranks, .config = alone});
  ASSERT_LT(wanted.back(), wanted.front());
  // A sample takes one schedule of each variant, in turn.
  std::vector<std::string> schedules = {"1f1b", "zb_h1", "zbv"};
  if (test::sample_wanted()) schedules = {schedules[GetParam() % schedules.size()]};
  for (const std::string& schedule : schedules) {
    SCOPED_TRACE(schedule);
    nlohmann::json config = config_of(2, schedule, variant.zero_stage);
    variant.change(config);
    expect_near(losses_of({.ranks = 2 * variant.data_ranks, .config = config}), wanted, variant.tolerance);
  }
}

std::string name_of_variant(const testing::TestParamInfo<size_t>& index) { return variants()[index.param].name; }

INSTANTIATE_TEST_SUITE_P(Config, PipelineVariants, testing::Range(size_t{0}, variants().size()), name_of_variant);

// --- optimizers of the program ---------------------------------------------------------------------------------------

// The values of config_of().
std::shared_ptr<torch::optim::Optimizer> adamw_over(const std::vector<at::Tensor>& parameters) {
  return std::make_shared<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(1e-3).weight_decay(0.01));
}

// Two groups, of which stages without the embedding have an empty one.
std::shared_ptr<torch::optim::Optimizer> grouped_adamw(torch::nn::Module& model) {
  std::vector<at::Tensor> embedding, others;
  for (const auto& item : model.named_parameters()) {
    (item.key().starts_with("embed") ? embedding : others).push_back(item.value());
  }
  const auto of = [](double lr) {
    return std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(lr).weight_decay(0.01));
  };
  return std::make_shared<torch::optim::AdamW>(
      std::vector<torch::optim::OptimizerParamGroup>{{std::move(others), of(1e-3)}, {std::move(embedding), of(4e-3)}});
}

using MakeOptimizer = std::function<std::shared_ptr<torch::optim::Optimizer>(torch::nn::Module&)>;

struct ClientJob {
  int pipe = 2;
  int data = 1;
  int zero_stage = 0;
  MakeOptimizer make;  // none: the config's
  bool tied = true;
  nlohmann::json more = nlohmann::json::object();
};

Job job_of(const ClientJob& client) {
  Job job{.ranks = client.pipe * client.data,
          .config = config_of(client.pipe, "1f1b", client.zero_stage),
          .tied = client.tied,
          .make_optimizer = client.make};
  job.config.merge_patch(client.more);
  return job;
}

std::vector<double> client_losses(const ClientJob& job) { return losses_of(job_of(job)); }

std::shared_ptr<torch::optim::Optimizer> plain_adamw(torch::nn::Module& model) {
  return adamw_over(model.parameters());
}

TEST(PipelineClientOptimizer, OfEachStageStepsAsThatOfTheWholeModel) {
  const std::vector<std::pair<bool, bool>> models = {{false, false}, {false, true}, {true, false}, {true, true}};
  for (const auto& [of, stage] : test::grid_sample(1, models, std::vector{0, 1, 2, 3})) {
    const auto [grouped, tied] = of;
    SCOPED_TRACE(testing::Message() << "stage " << stage << ", grouped " << grouped << ", tied " << tied);
    const MakeOptimizer make = grouped ? grouped_adamw : plain_adamw;
    const std::vector<double> wanted = client_losses({.pipe = 1, .data = 2, .make = make, .tied = tied});
    expect_near(client_losses({.data = 2, .zero_stage = stage, .make = make, .tied = tied}), wanted, 5e-6);
  }
}

TEST(PipelineClientOptimizer, StepsAsThatOfTheConfig) {
  expect_near(client_losses({.make = plain_adamw}), client_losses({}), 5e-6);
  const nlohmann::json half = {{"bf16", {{"enabled", true}}}};
  const nlohmann::json scaled = {{"fp16", {{"enabled", true}, {"initial_scale_power", 8}}}};
  const nlohmann::json host = {{"zero_optimization", {{"offload_optimizer", {{"device", "cpu"}}}}}};
  const auto expect_alike = [](int stage, const nlohmann::json& more, double bound) {
    SCOPED_TRACE(more.dump());
    expect_near(client_losses({.data = 2, .zero_stage = stage, .make = plain_adamw, .more = more}),
                client_losses({.data = 2, .zero_stage = stage, .more = more}), bound);
  };
  // Masters that differ in the last bit may round to two weights.
  expect_alike(1, half, 5e-3);
  expect_alike(3, scaled, 1e-3);
  expect_alike(2, host, 5e-6);
}

TEST(PipelineClientOptimizer, MayHaveParametersOfModulesThatOtherStagesUse) {
  const auto train = [](int pipe) {
    std::vector<double> losses;
    test::run_ranks(pipe, [&](comm::Communicator& world) {
      torch::set_num_threads(1);
      std::vector<LayerSpec> layers;
      std::vector<at::Tensor> parameters;
      const auto add = [&](const auto& module, const std::string& name) {
        layers.push_back(LayerSpec::module(module).named(name));
        for (const at::Tensor& parameter : module->parameters()) parameters.push_back(parameter);
      };
      add(TokenEmbedding("embed"), "embed");
      for (int i = 0; i < 2; ++i) add(Mixer(std::to_string(i)), "h." + std::to_string(i));
      add(Head("head"), "head");
      auto parts =
          engine::initialize({.model = std::make_shared<PipelineModule>(layers, PipelineOptions{.loss = cross_entropy}),
                              .config = config_of(pipe, "1f1b", 1),
                              .optimizer = adamw_over(parameters),
                              .communicator = test::borrowed(world)});
      Rank rank{*parts.engine, world.rank()};
      for (int step = 0; step < kSteps; ++step) {
        const double loss = rank.train_step(step);
        if (world.rank() == 0) losses.push_back(loss);
      }
    });
    return losses;
  };
  expect_near(train(2), train(1), 5e-6);
}

TEST(PipelineClientOptimizer, GoesOnInOtherStagesAndFromTheConfigsOptimizer) {
  const std::vector<double> wanted = client_losses({.pipe = 1});
  const MakeOptimizer make = plain_adamw;
  for (const auto& [from, to] : {std::pair(make, MakeOptimizer()), {MakeOptimizer(), make}, {make, make}}) {
    const test::ScratchFolder folder;
    run(job_of({.pipe = 2, .zero_stage = 1, .make = from}), [&](Rank& rank) {
      for (int step = 0; step < kSteps / 2; ++step) rank.train_step(step);
      rank.engine.save_checkpoint(folder.path().string());
    });
    std::vector<double> losses;
    run(job_of({.pipe = 4, .zero_stage = 2, .make = to}), [&](Rank& rank) {
      rank.engine.load_checkpoint(folder.path().string());
      for (int step = kSteps / 2; step < kSteps; ++step) {
        const double loss = rank.train_step(step);
        if (rank.world_rank == 0) losses.push_back(loss);
      }
    });
    expect_near(losses, {wanted.begin() + kSteps / 2, wanted.end()}, 5e-6);
  }
}

// What each of two stages says of options that `edit` makes wrong.
std::vector<std::string> refusals(const std::function<void(engine::InitializeOptions& options, int rank)>& edit) {
  std::vector<std::string> texts(2);
  test::run_ranks(2, [&](comm::Communicator& world) {
    const auto model = std::make_shared<PipelineModule>(layers_of(4, true), PipelineOptions{.loss = cross_entropy});
    engine::InitializeOptions options{
        .model = model, .config = config_of(2, "1f1b", 1), .communicator = test::borrowed(world)};
    edit(options, world.rank());
    texts[static_cast<size_t>(world.rank())] = test::thrown_by([&] { engine::initialize(options); });
  });
  return texts;
}

TEST(PipelineClientOptimizer, IsRefusedByNameWhereItCannotStepOnStages) {
  const auto made_by = [](const MakeOptimizer& make) {
    return refusals([&](engine::InitializeOptions& options, int /*rank*/) { options.make_optimizer = make; });
  };
  EXPECT_THAT(made_by([](torch::nn::Module& model) {
                return std::make_shared<torch::optim::LBFGS>(model.parameters(), torch::optim::LBFGSOptions());
              }),
              Each(HasSubstr("LBFGS computes the loss several times")));
  EXPECT_THAT(made_by([](torch::nn::Module& /*model*/) { return nullptr; }),
              Each(HasSubstr("expected an optimizer, found null")));
  EXPECT_THAT(made_by([](torch::nn::Module& /*model*/) { return adamw_over({}); }),
              Each(HasSubstr(".make_optimizer: expected parameters of the model, found none on any rank in ")));
  EXPECT_THAT(refusals([](engine::InitializeOptions& options, int /*rank*/) {
                options.optimizer = adamw_over(options.model->parameters());
              }),
              Each(AllOf(HasSubstr(".optimizer: expected parameters of the model, found none in "),
                         HasSubstr("built by initialize: give a function"))));
  EXPECT_THAT(refusals([](engine::InitializeOptions& options, int /*rank*/) {
                options.make_optimizer = plain_adamw;
                options.optimizer = adamw_over({torch::ones({2}, torch::requires_grad())});
              }),
              Each(HasSubstr("expected neither .optimizer nor .torch_scheduler with it, found .optimizer")));
  EXPECT_THAT(refusals([](engine::InitializeOptions& options, int /*rank*/) {
                options.optimizer = adamw_over({torch::ones({2}, torch::requires_grad())});
              }),
              Each(HasSubstr("found a tensor of shape [2] in its group 0 that is none")));
}

TEST(PipelineClientOptimizer, StagesThatMakeDifferentOnesAreTold) {
  const std::vector<std::string> rates = refusals([](engine::InitializeOptions& options, int rank) {
    options.make_optimizer = [rank](torch::nn::Module& model) {
      return std::make_shared<torch::optim::AdamW>(model.parameters(), torch::optim::AdamWOptions(rank == 0 ? 1 : 2));
    };
  });
  EXPECT_THAT(rates, Each(HasSubstr("lr of parameter group 0")));
  const std::vector<std::string> failed = refusals([](engine::InitializeOptions& options, int rank) {
    options.make_optimizer = [rank](torch::nn::Module& model) {
      if (rank == 1) throw std::runtime_error("no memory for it");
      return plain_adamw(model);
    };
  });
  EXPECT_THAT(failed[0], HasSubstr(".make_optimizer: rank 1 has failed"));
  EXPECT_THAT(failed[1], HasSubstr("no memory for it"));
}

}  // namespace
}  // namespace ds::pipeline
