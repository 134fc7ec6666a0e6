// DeepSpeed's universal layout; deepspeed_reads_our_universal.py goes on from it with DeepSpeed itself.
#include "checkpoint/export.h"

#include <torch/csrc/jit/serialization/pickle.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "core/check.h"
#include "tests/checkpoint/source/memory_source.h"
#include "tests/support/scratch_folder.h"

namespace ds::checkpoint {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

c10::IValue value_in(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return torch::jit::pickle_load({std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()});
}

c10::IValue at_key(const c10::IValue& dict, const std::string& key) { return dict.toGenericDict().at(key); }

class UniversalExportTest : public testing::Test {
 protected:
  void SetUp() override {
    source_.add("weights/a.weight", torch::randn({3, 4}));
    source_.add("weights/fixed", torch::randn({2}), /*frozen=*/true);
    source_.add("buffers/count", torch::tensor(7, torch::kLong));
    source_.add("optimizer/exp_avg/a.weight", torch::randn({3, 4}));
    source_.add("optimizer/exp_avg_sq/a.weight", torch::rand({3, 4}));
    TrainingState& state = source_.mutable_state();
    state.global_steps = 12;
    state.global_samples = 96;
    state.lr_iteration = 11;
    state.client_state = {{"note", "x"}, {"list", {1, 2.5, nullptr, true}}};
    state.optimizer = OptimizerState{.type = "AdamW", .step_count = 9, .groups = {{.lr = 0.5, .beta2 = 0.75}, {}}};
  }
  std::string tag() const { return folder_ / "run/step12"; }

  test::ScratchFolder folder_;
  MemorySource source_;
};

TEST_F(UniversalExportTest, HoldsWholeTensorsGroupsAndCounters) {
  export_universal(source_, tag());
  const std::string zero = tag() + "/zero/";
  EXPECT_TRUE(torch::equal(at_key(value_in(zero + "a.weight/fp32.pt"), "param").toTensor(),
                           source_.tensor("weights/a.weight")));
  for (const std::string state : {"exp_avg", "exp_avg_sq"}) {
    EXPECT_TRUE(torch::equal(at_key(value_in(zero + "a.weight/" + state + ".pt"), "param").toTensor(),
                             source_.tensor(state_path(state, "a.weight"))));
  }
  EXPECT_EQ(value_in(zero + "a.weight/step.pt").toInt(), 9);
  EXPECT_FALSE(std::filesystem::exists(zero + "fixed"));
  const c10::IValue optimizer = value_in(zero + "optimizer_state.pt");
  const auto groups = at_key(optimizer, "param_groups").toList();
  ASSERT_EQ(groups.size(), 2U);
  EXPECT_EQ(at_key(groups.get(0), "lr").toDouble(), 0.5);
  EXPECT_EQ(at_key(groups.get(0), "betas").toTupleRef().elements()[1].toDouble(), 0.75);
  for (const std::string name : {"mp_rank_00", "zero_pp_rank_0_mp_rank_00"}) {
    const c10::IValue states = value_in(tag() + "/" + name + "_model_states.pt");
    EXPECT_EQ(at_key(states, "global_steps").toInt(), 12);
    EXPECT_EQ(at_key(states, "note").toStringRef(), "x");
    EXPECT_EQ(at_key(states, "list").toList().get(1).toIValue().toDouble(), 2.5);
    EXPECT_EQ(at_key(at_key(states, "lr_scheduler"), "last_batch_iteration").toInt(), 11);
    EXPECT_EQ(at_key(at_key(states, "module"), "count").toTensor().item<int64_t>(), 7);
    EXPECT_TRUE(torch::equal(at_key(at_key(states, "module"), "fixed").toTensor(), source_.tensor("weights/fixed")));
  }
  std::ifstream latest(folder_ / "run/latest_universal");
  std::string named;
  latest >> named;
  EXPECT_EQ(named, "step12");
}

TEST_F(UniversalExportTest, ReduceLROnPlateauGoesOn) {
  source_.mutable_state().plateau = optimizers::PlateauState{.best = 0.5, .bad_values = 3, .cooldown = 2, .values = 8};
  export_universal(source_, tag());
  const c10::IValue schedule = at_key(value_in(tag() + "/mp_rank_00_model_states.pt"), "lr_scheduler");
  EXPECT_EQ(at_key(schedule, "best").toDouble(), 0.5);  // torch's names
  EXPECT_EQ(at_key(schedule, "num_bad_epochs").toInt(), 3);
  EXPECT_EQ(at_key(schedule, "cooldown_counter").toInt(), 2);
  EXPECT_EQ(at_key(schedule, "last_epoch").toInt(), 8);
}

TEST_F(UniversalExportTest, TorchsAdamCountsInATensor) {
  source_.mutable_state().config = {{"optimizer", {{"params", {{"torch_adam", true}}}}}};
  export_universal(source_, tag());
  EXPECT_EQ(value_in(tag() + "/zero/a.weight/step.pt").toTensor().item<float>(), 9.0F);
}

TEST_F(UniversalExportTest, OtherOptimizersAreRefused) {
  source_.add("optimizer/sum/a.weight", torch::rand({3, 4}));
  EXPECT_THAT([&] { export_universal(source_, tag()); },
              ThrowsMessage<UsageError>(AllOf(HasSubstr("Adam"), HasSubstr("optimizer/sum/a.weight"))));
  MemorySource weights;
  weights.add("weights/a", torch::ones({2}));
  EXPECT_THAT([&] { export_universal(weights, tag()); }, ThrowsMessage<UsageError>(HasSubstr("weights only")));
  weights.mutable_state().optimizer = OptimizerState{.type = "SGD"};
  EXPECT_THAT([&] { export_universal(weights, tag()); }, ThrowsMessage<UsageError>(HasSubstr("exp_avg")));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "run"));
}

// A name is a folder there.
TEST_F(UniversalExportTest, ANameReachesNoOtherFolder) {
  for (const std::string name : {"../../outside", "..", "optimizer_state.pt"}) {
    MemorySource source;
    source.mutable_state().optimizer = OptimizerState{.type = "AdamW"};
    for (const std::string folder : {"weights/", "optimizer/exp_avg/", "optimizer/exp_avg_sq/"}) {
      source.add(folder + name, torch::ones({2}));
    }
    EXPECT_THAT([&] { export_universal(source, tag()); },
                ThrowsMessage<UsageError>(AllOf(HasSubstr("\"" + name + "\""), HasSubstr("folder"))));
  }
  EXPECT_FALSE(std::filesystem::exists(folder_ / "run"));
}

TEST_F(UniversalExportTest, AFailureLeavesNothing) {
  source_.damage("optimizer/exp_avg_sq/a.weight");
  EXPECT_THROW(export_universal(source_, tag()), IoError);
  EXPECT_TRUE(std::filesystem::is_empty(folder_ / "run"));
}

}  // namespace
}  // namespace ds::checkpoint
