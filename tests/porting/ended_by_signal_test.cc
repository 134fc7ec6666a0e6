// A surrogate beside its solver, with the program's Adam and torch's StepLR, that is told to end in the middle: SIGTERM
// reaches one rank, all ranks agree, save and end at the same step, and a new start goes on as if nothing had been.
#include <gmock/gmock.h>
#include <torch/torch.h>

#include <csignal>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "core/text.h"
#include "dsengine/initialize.h"
#include "tests/comm/meeting/launcher_environment.h"
#include "tests/model/small_run.h"
#include "tests/porting/surrogate.h"
#include "tests/support/process_ranks.h"

namespace ds::engine {
namespace {

constexpr int64_t kSteps = 9;
constexpr int64_t kSignalledStep = 5;
constexpr int64_t kFields = 4;  // of a rank

volatile std::sig_atomic_t told_to_end = 0;

void note_signal(int /*number*/) { told_to_end = 1; }

struct Outcome {
  int64_t steps = 0;  // when the program ended
  State weights;
  at::Tensor field;
  double lr = 0;
};

// One start of the program. `signalled`: rank 1 gets SIGTERM in the middle.
Outcome run_program(const Config& zero, const std::string& checkpoints, bool signalled) {
  Surrogate net(kFields);
  const auto adam = std::make_shared<torch::optim::Adam>(net->parameters(), torch::optim::AdamOptions(2e-3));
  const auto schedule = std::make_shared<torch::optim::StepLR>(*adam, 2, 0.5);
  const Config config = {
      {"train_micro_batch_size_per_gpu", kFields}, {"gradient_clipping", 1.0}, {"zero_optimization", zero}};
  const auto engine =
      initialize({.model = net.ptr(), .config = config, .optimizer = adam, .torch_scheduler = schedule}).engine;
  const torch::NoGradGuard outside_of_the_graph;
  net->field.copy_(torch::sin(torch::arange(kFields * kPoints, torch::kDouble) * (1.7 + engine->global_rank()))
                       .view({kFields, kPoints}));
  int64_t step = 0;
  if (const LoadedCheckpoint loaded = engine->load_checkpoint(checkpoints)) {
    step = loaded.client_state.at("step").get<int64_t>();
    net->field.copy_(loaded.rank_state.at("field"));
  }
  for (; step < kSteps; ++step) {
    if (signalled && step == kSignalledStep && engine->global_rank() == 1) EXPECT_EQ(std::raise(SIGTERM), 0);
    if (engine->agree(told_to_end != 0)) {
      engine->save_checkpoint(checkpoints, "",
                              {.client_state = {{"step", step}}, .rank_state = {{"field", net->field}}});
      break;
    }
    const at::Tensor u = net->field.clone();
    const at::Tensor target = solve(u, step);
    {
      const torch::AutoGradMode with_graph(true);
      engine->backward(torch::mse_loss(net->forward(u), target));
    }
    engine->step();
    net->field.copy_(target);
  }
  const auto& options = static_cast<torch::optim::AdamOptions&>(adam->param_groups()[0].options());
  return {step, copy_of(engine->fp32_state_dict()), net->field.clone(), options.lr()};
}

DS_PROCESS_TEST(EndedBySignal, RanksSaveTogetherAndGoOnAsIfNothingHadBeen, 2) {
  const comm::Rendezvous file = ranks.meet();
  test::set_launcher_environment(file);
  ASSERT_NE(std::signal(SIGTERM, note_signal), SIG_ERR);
  const std::string folder = ranks.folder();
  std::filesystem::create_directories(folder + "/nvme");
  const std::vector<Config> layouts = {
      {{"stage", 0}},
      {{"stage", 2}, {"offload_optimizer", {{"device", "nvme"}, {"nvme_path", folder + "/nvme"}}}},
      {{"stage", 3}, {"stage3_param_persistence_threshold", 0}}};
  for (size_t i = 0; i < layouts.size(); ++i) {
    SCOPED_TRACE(layouts[i].dump());
    const Outcome whole = run_program(layouts[i], cat(folder, "/none", i), /*signalled=*/false);
    EXPECT_EQ(whole.steps, kSteps);
    const std::string checkpoints = cat(folder, "/checkpoints", i);
    EXPECT_EQ(run_program(layouts[i], checkpoints, /*signalled=*/true).steps, kSignalledStep);
    told_to_end = 0;
    const Outcome resumed = run_program(layouts[i], checkpoints, /*signalled=*/false);
    EXPECT_EQ(resumed.steps, kSteps);
    EXPECT_EQ(largest_difference(resumed.weights, whole.weights), 0.0);
    EXPECT_TRUE(resumed.field.equal(whole.field));
    EXPECT_EQ(resumed.lr, whole.lr);
    EXPECT_LT(resumed.lr, 2e-3 / 8);
  }
}

}  // namespace
}  // namespace ds::engine
