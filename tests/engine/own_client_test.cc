// Optimizers that are classes of the program: which can work on slices, and how those that cannot are refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/check.h"
#include "optim/elementwise_probe.h"
#include "tests/model/client_run.h"
#include "tests/support/own_optimizers.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using optimizers::probe_elementwise;
using test::run_ranks;
using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::optim::AdamParamState;

template <class Optimizer>
std::string problem_of() {
  Optimizer optimizer({torch::ones({2, 3})}, OwnOptions(0.1));
  return probe_elementwise(optimizer).problem;
}

TEST(ElementwiseProbe, FindsWhatCannotWorkOnSlices) {
  EXPECT_EQ(problem_of<SignMomentum>(), "");
  EXPECT_THAT(problem_of<NormScaled>(), HasSubstr("cut in two"));
  EXPECT_THAT(problem_of<RowScaled>(), HasSubstr("matrix"));
  EXPECT_THAT(problem_of<CountsItself>(), HasSubstr("beside state()"));
  EXPECT_THAT(problem_of<DrawsNoise>(), HasSubstr("random"));
  EXPECT_THAT(problem_of<DoesNothing>(), HasSubstr("changes nothing"));
  EXPECT_THAT(problem_of<Throws>(), HasSubstr("wants a matrix"));
  EXPECT_THAT(problem_of<KeepsSliced>(), HasSubstr("clone() makes one of another class"));
  EXPECT_THAT(problem_of<Doubles<AdamParamState>>(), HasSubstr("exp_avg in Double for a parameter of Float"));
}

TEST(ElementwiseProbe, FindsWhatBeginsWithManyElementsOrLargeGradients) {
  EXPECT_THAT(problem_of<ClipsLargeNorms>(), AllOf(HasSubstr("23040 elements is cut in two"), HasSubstr("gradients")));
  EXPECT_THAT(problem_of<FactorsLargeMatrices>(), HasSubstr("160 x 144"));
  EXPECT_THAT(problem_of<RoundsInBlocks>(), HasSubstr("23040 elements is cut in two"));
}

template <class Optimizer>
bool is_known() {
  Optimizer optimizer({torch::ones({2, 3})}, OwnOptions(0.1));
  const auto probe = probe_elementwise(optimizer);
  EXPECT_EQ(probe.problem, "");
  return probe.states.at(0).is_known;
}

TEST(ElementwiseProbe, KnowsStatesThatAreWhatTheyWrite) {
  EXPECT_TRUE(is_known<OwnMomentum>());
  EXPECT_FALSE(is_known<SilentMomentum>());
  EXPECT_FALSE(is_known<Forgets>()) << "a number that is not written";
  EXPECT_FALSE(is_known<Doubles<OwnState>>()) << "float64 for float32";
}

TEST(ElementwiseProbe, AgreesWithWhatIsKnownOfTorchs) {
  const std::vector<at::Tensor> one = {torch::ones({2, 3})};
  torch::optim::SGD sgd(one, torch::optim::SGDOptions(0.1).momentum(0.9));
  torch::optim::Adam adam(one, torch::optim::AdamOptions(0.0).amsgrad(true));
  torch::optim::RMSprop rmsprop(one, torch::optim::RMSpropOptions(0.1).centered(true));
  for (torch::optim::Optimizer* const optimizer :
       std::initializer_list<torch::optim::Optimizer*>{&sgd, &adam, &rmsprop}) {
    const auto known = optimizers::states_of_torch(*optimizer);
    const auto probe = probe_elementwise(*optimizer);
    EXPECT_EQ(probe.problem, "");
    ASSERT_EQ(probe.states.size(), known->size());
    EXPECT_EQ(probe.states[0].names, (*known)[0].names);
  }
}

TEST(ElementwiseProbe, LeavesParametersAndStatesAsTheyWere) {
  const at::Tensor parameter = torch::ones({2, 3});
  SignMomentum optimizer({parameter}, OwnOptions(0.0));
  parameter.mutable_grad() = torch::ones({2, 3});
  optimizer.step();
  EXPECT_EQ(probe_elementwise(optimizer).problem, "");
  ASSERT_EQ(optimizer.state().size(), 1U);
  EXPECT_EQ(static_cast<AdamParamState&>(*optimizer.state()[parameter.unsafeGetTensorImpl()]).step(), 1);
  ASSERT_EQ(optimizer.param_groups().size(), 1U);
  EXPECT_TRUE(optimizer.parameters()[0].is_same(parameter));
  EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 0.0);
  EXPECT_TRUE(parameter.equal(torch::ones({2, 3})));
}

template <class Optimizer>
MakeOptimizer make_own(double lr) {
  return [lr](const SmallNet& model) { return std::make_shared<Optimizer>(model->parameters(), OwnOptions(lr)); };
}

class OwnClients : public ::testing::TestWithParam<MakeOptimizer> {};
INSTANTIATE_TEST_SUITE_P(Classes, OwnClients,
                         ::testing::Values(make_own<SignMomentum>(0.01), make_own<OwnMomentum>(0.02)));

TEST_P(OwnClients, WorkAtEveryStage) {
  const MakeOptimizer make = GetParam();
  const ClientRun run;
  const std::vector<double> expected = plain_losses(run, make);
  for (int stage = 0; stage < 4; ++stage) {
    run_ranks(2, [&](comm::Communicator& communicator) {
      SmallNet model;
      const auto optimizer = make(model);
      const auto engine = start_client(model, client_config(stage), optimizer, communicator).engine;
      EXPECT_LT(trained_difference(run, *engine, model, *optimizer, expected), 5e-6) << stage;
    });
  }
}

TEST_P(OwnClients, HaveTheirStatesInCheckpoints) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  const MakeOptimizer make = GetParam();
  const ClientRun run = {.steps = 12};
  const std::vector<double> expected = plain_losses(run, make);
  run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto optimizer = make(model);
    const auto engine = start_client(model, client_config(3), optimizer, communicator).engine;
    train(*engine, model, 5);
    engine->save_checkpoint(dir);
    EXPECT_LT(trained_difference(run, *engine, model, *optimizer, expected, 5), 5e-6);  // saving changes nothing
  });
  for (const int stage : {1, 3}) {
    run_ranks(2, [&](comm::Communicator& communicator) {
      SmallNet model;
      const auto optimizer = make(model);
      const auto engine = start_client(model, client_config(stage), optimizer, communicator).engine;
      train(*engine, model, 2);
      engine->load_checkpoint(dir);
      EXPECT_LT(trained_difference(run, *engine, model, *optimizer, expected, 5), 5e-6);
    });
  }
}

// A parameter that is frozen for a while stays, and so does what the optimizer keeps of it.
TEST_P(OwnClients, LeaveFrozenParametersAlone) {
  run_ranks(1, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start_client(model, client_config(2), GetParam()(model), communicator).engine;
    train(*engine, model, 3);
    const at::Tensor& frozen = model->norm->weight;
    const State before = copy_of(engine->fp32_state_dict());
    frozen.set_requires_grad(false);
    const State after = train(*engine, model, 3);
    EXPECT_TRUE(after.at("norm.weight").equal(before.at("norm.weight")));
    EXPECT_FALSE(after.at("last.weight").equal(before.at("last.weight")));
    frozen.set_requires_grad(true);
    EXPECT_FALSE(train(*engine, model, 1).at("norm.weight").equal(before.at("norm.weight")));
  });
}

TEST(OwnClient, WhoseStatesNobodyKnowsTrainsButIsNotSaved) {
  const test::ScratchFolder folder;
  const MakeOptimizer make = make_own<SilentMomentum>(0.02);
  const ClientRun run = {.steps = 12};
  const std::vector<double> expected = plain_losses(run, make);
  run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto optimizer = make(model);
    const auto engine = start_client(model, client_config(2), optimizer, communicator).engine;
    EXPECT_LT(trained_difference(run, *engine, model, *optimizer, expected), 5e-6);
    EXPECT_THAT([&] { engine->save_checkpoint(folder.path().string()); },
                ThrowsMessage<UsageError>(AllOf(HasSubstr("SilentMomentum"), HasSubstr("AdamParamState"))));
  });
}

TEST(OwnClient, WritesItsStatesWhenSomebodyAsksForThemOnly) {
  run_ranks(1, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start_client(model, client_config(2), make_own<OwnMomentum>(0.02)(model), communicator).engine;
    train(*engine, model, 2);
    const test::ScratchFolder folder;
    engine->save_checkpoint(folder.path().string());
    train(*engine, model, 1);  // what was asked for stays current over one step
    const int before = OwnState::times_written;
    train(*engine, model, 3);
    EXPECT_EQ(OwnState::times_written, before);
  });
}

TEST(OwnClient, WhoseCloneIsAnothersIsRefused) {
  run_ranks(1, [&](comm::Communicator& communicator) {
    SmallNet model;
    EXPECT_THAT([&] { start_client(model, client_config(1), make_own<KeepsSliced>(0.01)(model), communicator); },
                ThrowsMessage<ConfigError>(AllOf(HasSubstr("KeepsSliced"), HasSubstr("OptimizerCloneableParamState"))));
  });
}

TEST(OwnClient, OfWholeParametersIsRefusedWhereThereAreSlices) {
  run_ranks(1, [&](comm::Communicator& communicator) {
    const auto begin = [&](const nlohmann::ordered_json& config) {
      SmallNet model;
      start_client(model, config, make_own<NormScaled>(0.01)(model), communicator);
    };
    const auto refused = ThrowsMessage<ConfigError>(
        AllOf(HasSubstr("NormScaled"), HasSubstr("cut in two"), HasSubstr("zero_optimization.stage 0")));
    EXPECT_THAT([&] { begin(client_config(1)); }, refused);
    EXPECT_THAT([&] { begin(client_config(3)); }, refused);
    auto bf16 = client_config(0);
    bf16["bf16"] = {{"enabled", true}};
    EXPECT_THAT([&] { begin(bf16); }, refused);
    SmallNet model, plain;
    const auto engine = start_client(model, client_config(0), make_own<NormScaled>(0.01)(model), communicator).engine;
    const auto own = make_own<NormScaled>(0.01)(plain);
    EXPECT_LT(largest_difference(train(*engine, model, 5), TorchRun{.steps = 5}.train(plain, *own)), 2e-6);
  });
}

}  // namespace
}  // namespace ds::engine
