// What ranks have to bring alike is named where it is not: the parameter, the key, the shape.
#include <gmock/gmock.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <mutex>

#include "core/check.h"
#include "tests/model/small_run.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::Not;

using Model = torch::nn::Sequential;

// What initialize() says on each of two ranks; `model` and `config` of a rank.
std::vector<std::string> refusals(const std::function<Model(int)>& model,
                                  const std::function<nlohmann::ordered_json(int)>& config) {
  std::vector<std::string> texts(2);
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    const int rank = communicator.rank();
    Model own = model(rank);
    try {
      start(own.ptr(), config(rank), communicator);
    } catch (const CommError& error) {
      texts[static_cast<size_t>(rank)] = error.what();
    }
  });
  return texts;
}

Model layers(int64_t width) { return Model(torch::nn::Linear(4, 8), torch::nn::Linear(8, width)); }

nlohmann::ordered_json config_of(int64_t stage) {
  return {{"train_micro_batch_size_per_gpu", 2},
          {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 0.01}}}}},
          {"zero_optimization", {{"stage", stage}}}};
}

TEST(SetupDifferences, AShapeIsNamed) {
  const auto texts = refusals([](int rank) { return layers(rank == 0 ? 2 : 3); }, [](int) { return config_of(1); });
  EXPECT_THAT(texts,
              Each(AllOf(HasSubstr("the parameters (names, shapes, dtypes) of rank 1 differ from those of rank 0"),
                         HasSubstr("1.weight: Float [2, 8] on rank 0, Float [3, 8] on rank 1"))));
}

TEST(SetupDifferences, AParameterThatIsMissingIsNamed) {
  const auto texts = refusals(
      [](int rank) {
        Model model = layers(2);
        if (rank == 1) model->push_back(torch::nn::Linear(2, 2));
        return model;
      },
      [](int) { return config_of(0); });
  EXPECT_THAT(texts, Each(HasSubstr("after 4 equal ones no further trainable one on rank 0, 2.weight on rank 1")));
}

TEST(SetupDifferences, AKeyIsNamed) {
  const auto texts = refusals([](int) { return layers(2); }, [](int rank) { return config_of(rank + 1); });
  EXPECT_THAT(texts, Each(AllOf(HasSubstr("the ds_config of rank 1 differs from that of rank 0"),
                                HasSubstr(": zero_optimization.stage: 1 on rank 0, 2 on rank 1;"))));
  const auto added = refusals([](int) { return layers(2); },
                              [](int rank) {
                                auto config = config_of(1);
                                if (rank == 1) config["gradient_clipping"] = 0.5;
                                return config;
                              });
  EXPECT_THAT(added, Each(HasSubstr(": gradient_clipping: nothing on rank 0, 0.5 on rank 1;")));
}

// Keys in another order are the same config.
TEST(SetupDifferences, TheOrderOfKeysIsNone) {
  const auto texts =
      refusals([](int) { return layers(2); },
               [](int rank) {
                 nlohmann::ordered_json config = config_of(1);
                 if (rank == 0) return config;
                 nlohmann::ordered_json turned;
                 for (const char* key : {"zero_optimization", "optimizer", "train_micro_batch_size_per_gpu"}) {
                   turned[key] = config[key];
                 }
                 return turned;
               });
  EXPECT_THAT(texts, Each(std::string()));
}

// As in Python: what happened, without the 60 frames of LibTorch that led there.
TEST(Messages, ErrorsOfLibTorchHaveNoStack) {
  test::run_ranks(1, [&](comm::Communicator& communicator) {
    Model model = layers(2);
    const auto engine = start(model.ptr(), config_of(0), communicator).engine;
    try {
      model->forward(torch::zeros({2, 5}));
      ADD_FAILURE() << "did not throw";
    } catch (const c10::Error& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr("mat1 and mat2"), Not(HasSubstr("frame #"))));
    }
  });
}

TEST(Messages, AnEmptyFolderIsSaidToBeEmpty) {
  test::run_ranks(1, [&](comm::Communicator& communicator) {
    Model model = layers(2);
    const auto engine = start(model.ptr(), config_of(0), communicator).engine;
    const auto refusal = [](const auto& call) -> std::string {
      try {
        call();
      } catch (const UsageError& error) {
        return error.what();
      }
      return "";
    };
    EXPECT_THAT(refusal([&] { engine->save_checkpoint(""); }), HasSubstr("save_checkpoint: expected a folder"));
    EXPECT_THAT(refusal([&] { engine->load_checkpoint(""); }), HasSubstr("load_checkpoint: expected a folder"));
    engine->backward(model->forward(torch::ones({2, 4})).sum());
    EXPECT_THAT(refusal([&] { engine->load_checkpoint("somewhere"); }),
                HasSubstr("load_checkpoint() was called between backward() and step()"));
  });
}

}  // namespace
}  // namespace ds::engine
