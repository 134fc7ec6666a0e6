// Values that a program loads, sets or changes by hand after initialize() are those it trains on with.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include "core/check.h"
#include "tests/porting/ported_run.h"
#include "tests/support/scratch_folder.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

// A model of other values, as torch::save writes it.
std::string saved_model() {
  SmallNet other;
  const torch::NoGradGuard no_grad;
  for (at::Tensor& parameter : other->parameters()) parameter.mul_(0.5).add_(0.01);
  std::ostringstream stream;
  torch::save(other, stream);
  return stream.str();
}

void load_saved(SmallNet& model) {
  std::istringstream stream(saved_model());
  torch::load(model, stream);
}

void set_by_hand(SmallNet& model) {
  const torch::NoGradGuard no_grad;
  model->first->weight.mul_(0.5);
  torch::nn::init::constant_(model->last->bias, 0.25);
}

void set_through_data(SmallNet& model) {
  for (at::Tensor& parameter : model->parameters()) parameter.data().clamp_(-0.1, 0.1);
}

void set_other_memory(SmallNet& model) {
  model->last->weight.set_data(torch::full({3, 11}, 0.125));
  model->norm->bias.set_data(torch::full({11}, 0.5));
}

class ReplacedValues : public ::testing::TestWithParam<int> {};

TEST_P(ReplacedValues, TorchLoad) {
  const PortedRun run{.change = load_saved};
  expect_same(run_on_engine(run, small_config(GetParam(), 1)), run_plainly(run));
}

TEST_P(ReplacedValues, TorchLoadByOneRankInAScope) {
  const PortedRun run{.change = load_saved};
  const auto in_scope = [](Engine& engine, SmallNet& model) {
    const auto whole = engine.gathered_parameters(model->parameters(), /*modifier_rank=*/1);
    if (engine.global_rank() == 1) load_saved(model);
  };
  expect_same(run_on_engine(run, small_config(GetParam(), 1), in_scope), run_plainly(run));
}

TEST_P(ReplacedValues, SetData) {
  const PortedRun run{.change = set_other_memory};
  expect_same(run_on_engine(run, small_config(GetParam(), 1)), run_plainly(run));
}

TEST_P(ReplacedValues, ByHandUnderNoGrad) {
  const PortedRun run{.change = set_by_hand};
  expect_same(run_on_engine(run, small_config(GetParam(), 1)), run_plainly(run));
}

TEST_P(ReplacedValues, ByHandThroughData) {
  const PortedRun run{.change = set_through_data};
  expect_same(run_on_engine(run, small_config(GetParam(), 1)), run_plainly(run));
}

// The first step after the change starts from it, with masters in float32 beside the parameters.
TEST_P(ReplacedValues, ReachMastersOfBf16) {
  for (const auto& change : {load_saved, set_by_hand, set_other_memory}) {
    test::run_ranks(2, [&](comm::Communicator& communicator) {
      SmallNet model;
      const auto engine = start(model.ptr(), with_bf16(small_config(GetParam(), 1)), communicator).engine;
      train(*engine, model, 2);
      SmallNet expected;
      {
        const torch::NoGradGuard no_grad;
        const State values = copy_of(engine->module_state_dict());
        for (auto& item : expected->named_parameters()) item.value().copy_(values.at(item.key()));
      }
      change(expected);
      if (change == set_other_memory) {  // of the model's dtype
        model->last->weight.set_data(torch::full({3, 11}, 0.125, torch::kBFloat16));
        model->norm->bias.set_data(torch::full({11}, 0.5, torch::kBFloat16));
      } else if (change == load_saved) {
        SmallNet other;
        load_saved(other);
        other->to(torch::kBFloat16);
        std::stringstream stream;
        torch::save(other, stream);
        torch::load(model, stream);
      } else {
        change(model);
      }
      const State found = copy_of(engine->fp32_state_dict());
      for (const auto& [name, value] : parameters_of(*expected)) {
        const bool is_master = value.equal(found.at(name));
        const bool is_rounded =
            value.to(torch::kBFloat16).to(torch::kFloat).equal(found.at(name).to(torch::kBFloat16).to(torch::kFloat));
        EXPECT_TRUE(is_master || is_rounded) << name;
      }
      const double before = model->loss(sample(5, communicator.rank())).item<double>();
      train(*engine, model, 1);
      EXPECT_LT(std::abs(model->loss(sample(5, communicator.rank())).item<double>() - before), 2.0);
    });
  }
}

// Puts values into all parameters.
void put_values(SmallNet& model, const std::vector<at::Tensor>& values) {
  const torch::NoGradGuard no_grad;
  for (size_t i = 0; i < values.size(); ++i) model->parameters()[i].copy_(values[i]);
}

std::vector<at::Tensor> scaled_copies(SmallNet& model, double factor) {
  const torch::NoGradGuard no_grad;
  std::vector<at::Tensor> copies;
  for (const at::Tensor& parameter : model->parameters()) copies.push_back(parameter * factor);
  return copies;
}

ordered_json of_precision(const std::string& precision, int stage) {
  ordered_json config = small_config(stage, 1);
  config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = true;
  config[precision] = {{"enabled", true}};
  if (precision == "fp16") config[precision]["initial_scale_power"] = 4;
  return config;
}

// Averaged weights are swapped in, read and saved, and the program's own are put back.
TEST_P(ReplacedValues, MastersComeBackWithTheValuesThatWereSwappedOut) {
  const test::ScratchFolder folder;
  const auto scope = [](Engine& engine, SmallNet& model) {
    const auto whole = engine.gathered_parameters(model->parameters(), /*modifier_rank=*/1);
    put_values(model, scaled_copies(model, 0.5));
  };
  const std::vector<std::function<void(Engine&, SmallNet&)>> reads = {
      [&](Engine& engine, SmallNet&) { engine.save_16bit_model(folder.path().string()); },
      [&](Engine& engine, SmallNet&) { engine.save_checkpoint(folder.path().string(), "averaged"); },
      [](Engine& engine, SmallNet& model) {
        const at::Tensor shown = scaled_copies(model, 1.0)[0].to(torch::kFloat);
        EXPECT_TRUE(engine.safe_get_full_fp32_param(model->parameters()[0]).equal(shown))
            << "what is swapped in counts";
      },
      [](Engine& engine, SmallNet&) { engine.module_state_dict(); }, scope};
  for (const char* precision : {"bf16", "fp16"}) {
    test::run_ranks(2, [&](comm::Communicator& communicator) {
      SmallNet model;
      const auto engine = start(model.ptr(), of_precision(precision, GetParam()), communicator).engine;
      const State masters = train(*engine, model, 3);
      ASSERT_NE(largest_difference(masters, copy_of(engine->module_state_dict())), 0.0) << "masters have more bits";
      const std::vector<at::Tensor> own = scaled_copies(model, 1.0);
      for (const auto& read : reads) {
        put_values(model, scaled_copies(model, 0.75));
        read(*engine, model);
        put_values(model, own);
        EXPECT_EQ(largest_difference(copy_of(engine->fp32_state_dict()), masters), 0.0) << precision;
      }
    });
  }
}

// What is set by name meanwhile is the program's own value from then on.
TEST_P(ReplacedValues, MastersThatAreSetWhileOthersAreSwappedIn) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), of_precision("bf16", GetParam()), communicator).engine;
    State expected = train(*engine, model, 2);
    std::vector<at::Tensor> own = scaled_copies(model, 1.0);
    put_values(model, scaled_copies(model, 0.75));
    engine->module_state_dict();
    const at::Tensor value = torch::full({3}, 1.0 / 3);
    engine->safe_set_full_fp32_param(model->last->bias, value);
    expected["last.bias"] = value;
    own.back() = value.to(torch::kBFloat16);
    put_values(model, scaled_copies(model, 0.75));
    engine->module_state_dict();
    put_values(model, own);
    EXPECT_EQ(largest_difference(copy_of(engine->fp32_state_dict()), expected), 0.0);
  });
}

TEST_P(ReplacedValues, AnotherDtypeIsAnErrorWithTheParametersName) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(GetParam(), 1), communicator).engine;
    train(*engine, model, 1);
    model->to(torch::kDouble);
    const at::Tensor loss = model->loss(sample(1, communicator.rank()));
    EXPECT_THAT([&] { engine->backward(loss); },
                ThrowsMessage<UsageError>(AllOf(HasSubstr("backward(): parameter first.weight"),
                                                HasSubstr("memory was replaced"), HasSubstr("Double"))));
  });
}

TEST_P(ReplacedValues, AnotherDtypeInAScopeIsCast) {
  const PortedRun run{.change = [](SmallNet& model) {
    model->to(torch::kDouble);
    model->to(torch::kFloat);
  }};
  const auto in_scope = [](Engine& engine, SmallNet& model) {
    const auto whole = engine.gathered_parameters(model->parameters(), /*modifier_rank=*/0);
    model->to(torch::kDouble);
  };
  expect_same(run_on_engine(run, small_config(GetParam(), 1), in_scope), run_plainly(run));
}

TEST_P(ReplacedValues, ThatDifferBetweenRanksEndTheStepOfAll) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(GetParam(), 1), communicator).engine;
    train(*engine, model, 1);
    const torch::NoGradGuard no_grad;
    model->last->bias.fill_(0.1 * communicator.rank());
    const torch::AutoGradMode grad(true);
    engine->backward(model->loss(sample(1, communicator.rank())));
    EXPECT_THAT([&] { engine->step(); },
                ThrowsMessage<UsageError>(AllOf(HasSubstr("changed or frozen parameters in different ways"),
                                                HasSubstr("rank 0: step 2, changed last.bias"),
                                                HasSubstr("rank 1: step 2, changed last.bias"))));
    // What each rank has is no longer one model.
    EXPECT_THAT([&] { engine->backward(model->loss(sample(1, communicator.rank()))); },
                ::testing::Throws<UsageError>());
  });
}

TEST(ReplacedValuesAtStage3, TorchSaveOutsideOfAScopeIsAnError) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(3, 1), communicator).engine;
    train(*engine, model, 1);
    std::ostringstream stream;
    EXPECT_THAT(
        [&] { torch::save(model, stream); },
        ThrowsMessage<c10::Error>(AllOf(HasSubstr("parameter first.weight"), HasSubstr("gathered_parameters"))));
    EXPECT_THAT([&] { model->last->weight.data_ptr<float>(); },
                ThrowsMessage<c10::Error>(AllOf(HasSubstr("parameter last.weight"), HasSubstr("gathered_parameters"))));
    std::stringstream whole;
    {
      const auto scope = engine->gathered_parameters(model->parameters());
      torch::save(model, whole);
    }
    SmallNet other;
    torch::load(other, whole);
    EXPECT_EQ(largest_difference(parameters_of(*other), copy_of(engine->module_state_dict())), 0.0);
  });
}

TEST(ReplacedValuesAtStage3, AfterTheEnginesEndParametersSaySo) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    auto engine = start(model.ptr(), small_config(3, 1), communicator).engine;
    train(*engine, model, 1);
    at::Tensor view = model->last->weight.t();
    engine.reset();
    for (const auto& use : std::vector<std::function<void()>>{[&] { model->forward(sample(0, 0)); },
                                                              [&] { model->last->weight.data_ptr<float>(); },
                                                              [&] { torch::relu(view); }}) {
      EXPECT_THAT(use, ThrowsMessage<c10::Error>(HasSubstr("after the end of its engine")));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, ReplacedValues, ::testing::Values(0, 1, 2, 3), stage_name);

}  // namespace
}  // namespace ds::engine
