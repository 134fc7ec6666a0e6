// A program that makes several engines on many ranks: all of one job, which the ranks join once.
#include <gmock/gmock.h>
#include <torch/torch.h>

#include <memory>
#include <string>

#include "comm/flight/flight_watch.h"
#include "dsengine/init_distributed.h"
#include "tests/comm/meeting/launcher_environment.h"
#include "tests/porting/ported_run.h"
#include "tests/support/process_ranks.h"

namespace ds::engine {
namespace {

std::shared_ptr<Engine> engine_of(SmallNet& model, int stage) {
  return initialize({.model = model.ptr(), .config = small_config(stage, 1)}).engine;
}

void expect_trains(Engine& engine, SmallNet& model) {
  EXPECT_LT(largest_difference(train(engine, model, 3), TorchRun{.world = 2, .steps = 3}.train_adamw()), 2e-6);
}

DS_PROCESS_TEST(JoinedJob, EnginesBesideEachOtherShareTheGroup, 2) {
  const comm::Rendezvous file = ranks.meet();
  test::set_launcher_environment(file);
  SmallNet first;
  SmallNet second;
  const auto one = engine_of(first, 2);
  const auto other = engine_of(second, 3);
  EXPECT_EQ(&one->world(), &other->world());
  expect_trains(*one, first);
  expect_trains(*other, second);
}

DS_PROCESS_TEST(JoinedJob, AnEngineAfterAnotherHasAGroupOfItsOwn, 2) {
  const comm::Rendezvous file = ranks.meet();
  test::set_launcher_environment(file);
  for (int stage = 0; stage <= 3; ++stage) {
    SmallNet model;
    const auto engine = engine_of(model, stage);
    EXPECT_NE(engine->world().watch(), nullptr);
    expect_trains(*engine, model);
  }
}

// One rank still has the first engine.
DS_PROCESS_TEST(JoinedJob, WhereOneRankKeepsAnEngineLongerAllGetANewGroup, 2) {
  const comm::Rendezvous file = ranks.meet();
  test::set_launcher_environment(file);
  SmallNet first;
  SmallNet second;
  auto one = engine_of(first, 1);
  expect_trains(*one, first);
  if (ranks.rank() == 1) one.reset();
  const auto other = engine_of(second, 1);
  expect_trains(*other, second);
}

DS_PROCESS_TEST(JoinedJob, InitDistributedMayComeAgain, 2) {
  const comm::Rendezvous file = ranks.meet();
  test::set_launcher_environment(file);
  const Distributed job = init_distributed();
  const Distributed again = init_distributed();
  EXPECT_EQ(job.ranks, again.ranks);
  SmallNet model;
  const auto engine = engine_of(model, 2);
  EXPECT_EQ(&engine->world(), job.ranks.get());
  expect_trains(*engine, model);
}

}  // namespace
}  // namespace ds::engine
