// A step whose gradient is infinite or NaN: what it says of itself.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "core/text.h"
#include "engine/report/batch_notes.h"
#include "engine/report/non_finite.h"
#include "tests/engine/report/non_finite_run.h"
#include "tests/model/small_run.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using test::run_ranks;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(NonFiniteReport, AStepThatIsAppliedWarnsLessAndLessOften) {
  for (const bool half : {true, false}) {
    ordered_json config = small_config(1, 1);
    config["locate_non_finite"] = true;
    if (half) config["bf16"] = {{"enabled", true}, {"check_grad_overflow", false}};
    if (!half) config["non_finite_gradients"] = "continue";
    ::testing::internal::CaptureStderr();
    ::testing::internal::CaptureStdout();
    run_ranks(2, [&](comm::Communicator& communicator) {
      SmallNet model;
      const auto engine = start(model.ptr(), config, communicator).engine;
      for (int64_t step = 0; step < 5; ++step) one_bad_step(*engine, model, step, step == 0, Poison::kLoss);
      EXPECT_TRUE(engine->was_step_applied());
      EXPECT_EQ(engine->global_steps(), 5);
    });
    const std::string log = ::testing::internal::GetCapturedStdout() + ::testing::internal::GetCapturedStderr();
    EXPECT_THAT(log, AllOf(HasSubstr("step 1: the gradient is not finite: first in parameter first.weight, element 0"),
                           HasSubstr("rank 1's loss of micro-batch 0 is nan; the first that rank 1's autograd made"),
                           HasSubstr(half ? "applied all the same, because bf16.check_grad_overflow is false"
                                          : "applied all the same, because non_finite_gradients is \"continue\"")));
    EXPECT_THAT(log, AllOf(HasSubstr("step 2: "), HasSubstr("(4 steps in a row)"), Not(HasSubstr("step 3: "))));
  }
}

// A parameter of 64 elements whose gradient is what the test wants.
struct Slope : torch::nn::Module {
  Slope() { weight = register_parameter("weight", torch::zeros({64})); }
  at::Tensor loss(double slope) const { return (weight * slope).sum(); }
  at::Tensor weight;
};

TEST(NonFiniteReport, SumsThatOverflowAreToldFromBadGradients) {
  run_ranks(2, [&](comm::Communicator& communicator) {
    ordered_json config = small_config(0, 1);
    config["gradient_allreduce_op"] = "sum";
    config["locate_non_finite"] = true;
    const auto model = std::make_shared<Slope>();
    const auto engine = start(model, config, communicator).engine;
    engine->backward(model->loss(-3e38));
    EXPECT_THAT(bad_step_error([&] { engine->step(); }),
                AllOf(HasSubstr("element 0, which is -inf; all losses are finite; what autograd made on each rank is "
                                "finite, so it overflowed when it was added or reduced")));
    engine->backward(model->loss(1e38));
    EXPECT_THAT(bad_step_error([&] { engine->step(); }),
                HasSubstr("its norm is inf although all its elements are finite"));
    engine->backward(model->loss(1));
    engine->step();
    EXPECT_TRUE(engine->was_step_applied());
  });
}

TEST(NonFiniteReport, TheFirstOfSeveralMicroBatchesIsNamed) {
  run_ranks(2, [&](comm::Communicator& communicator) {
    ordered_json config = small_config(2, 4);
    config["locate_non_finite"] = true;
    SmallNet model;
    const auto engine = start(model.ptr(), config, communicator).engine;
    const int rank = communicator.rank();
    const auto step = [&] {
      for (int64_t micro = 0; micro < 4; ++micro) {
        engine->name_batch(cat("text of rank ", rank, " at ", 10 * micro));
        const bool bad = micro >= 2 - rank && micro < 3;  // rank 0: 2, rank 1: 1 and 2
        engine->backward(model->loss(sample(micro, rank)) * (bad ? kNan : 1.0));
        engine->step();
      }
    };
    EXPECT_THAT(bad_step_error(step),
                AllOf(HasSubstr("rank 0's loss of micro-batch 2 (text of rank 0 at 20) is nan; rank 1's loss of "
                                "micro-batch 1 (text of rank 1 at 10) is nan (1 more after it)"),
                      HasSubstr("; the first that rank 1's autograd made is that of parameter last."),
                      HasSubstr("in micro-batch 1; the first that rank 0's autograd made")));
    // What is known of the accumulation went with it.
    engine->backward(model->loss(sample(0, rank)) * kNan);
    engine->zero_grad();
    for (int64_t micro = 0; micro < 4; ++micro) {
      engine->backward(model->loss(sample(micro, rank)) + masked_root(model, micro == 3));
      if (micro < 3) engine->step();
    }
    EXPECT_THAT(bad_step_error([&] { engine->step(); }),
                AllOf(HasSubstr("first in parameter norm.bias"), HasSubstr("all losses are finite"),
                      HasSubstr("in micro-batch 3;"), Not(HasSubstr("text of"))));
  });
}

// Sample i is a row of i, and one of NaN.
struct OneBadSample {
  explicit OneBadSample(size_t bad) : bad_(bad) {}
  torch::data::Example<> get(size_t index) const {
    const at::Tensor row = torch::full({6}, static_cast<double>(index), torch::kFloat);
    return {index == bad_ ? row * kNan : row, torch::full({}, static_cast<int64_t>(index))};
  }
  size_t size() const { return 24; }

 private:
  size_t bad_;
};

std::string numbers_in(const at::Tensor& target) {
  std::string text = "samples ";
  for (int64_t i = 0; i < target.numel(); ++i) text += cat(i == 0 ? "" : ", ", target[i].item<int64_t>());
  return text + " of the training data";
}

TEST(NonFiniteReport, SamplesOfTheEnginesLoaderAreNamed) {
  std::vector<std::string> errors(2);
  std::string wanted;
  run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const Initialized parts = initialize({.model = model.ptr(),
                                          .config = small_config(1, 3),
                                          .training_data = OneBadSample(13),
                                          .communicator = borrowed(communicator)});
    Engine& engine = *parts.engine;
    const int rank = communicator.rank();
    errors[static_cast<size_t>(rank)] = bad_step_error([&] {
      int64_t micro = 0;
      for (Batch& batch : *parts.loader) {
        const bool bad = (batch.target == 13).any().item<bool>();
        if (bad) wanted = cat("rank ", rank, "'s loss of micro-batch ", micro, " (", numbers_in(batch.target), ") is ");
        engine.backward(model->loss(batch.data));
        engine.step();
        ++micro;
      }
    });
  });
  EXPECT_EQ(errors[0], errors[1]);
  ASSERT_NE(wanted, "");
  EXPECT_THAT(errors[0], HasSubstr(wanted));
}

TEST(BatchNotes, ABatchIsNamedWhereItIsKnown) {
  DataLoader loader(OneBadSample(13), {.micro_batch_size = 2, .shuffle = false});
  auto next = loader.begin();
  BatchNotes notes;
  notes.begin(0, &loader);
  EXPECT_EQ(notes.name_of(0), "samples 0, 1 of the training data");
  notes.begin(0, &loader);  // a second loss of it
  notes.begin(1, &loader);  // data of the program's own
  EXPECT_EQ(notes.name_of(0), "samples 0, 1 of the training data");
  EXPECT_EQ(notes.name_of(1), "");
  notes.name_next("mine");
  ++next;
  notes.begin(2, &loader);
  EXPECT_EQ(notes.name_of(2), "mine");
  ++next;
  ++next;
  notes.begin(3, &loader);  // one of two
  EXPECT_EQ(notes.name_of(3), "");
  ++next;
  notes.forget(/*dropped=*/true);
  ++next;
  notes.begin(0, &loader);  // the first of the two was given up
  EXPECT_EQ(notes.name_of(0), "samples 10, 11 of the training data");
  EXPECT_EQ(notes.name_of(2), "");
}

TEST(NonFiniteText, ManyRanksAreCounted) {
  std::vector<NonFiniteFacts> ranks(9);
  for (size_t rank = 1; rank < 8; ++rank) ranks[rank].loss = {static_cast<int64_t>(rank), "", "inf", 0};
  ranks[2].element = {0, 5, 3, "b", "inf"};
  ranks[6].element = {0, 4, 9, "a", "-inf"};
  const std::string text = describe_non_finite({.norm = kNan}, ranks);
  EXPECT_EQ(
      text,
      "the gradient is not finite: first in parameter a, element 9, which is -inf; rank 1's loss of micro-batch 1 "
      "is inf; rank 2's loss of micro-batch 2 is inf; rank 3's loss of micro-batch 3 is inf; rank 4's loss of "
      "micro-batch 4 is inf; likewise on 3 more ranks");
}

TEST(NonFiniteText, TheRankOfAPipelineWhoseBackwardComesFirstIsNamedFirst) {
  std::vector<NonFiniteFacts> ranks(3);
  ranks[0].local = {1, "", "a", 2};
  ranks[1].local = {1, "x", "b", 1};
  ranks[2].local = {-1, "", "c", 0};
  EXPECT_THAT(describe_non_finite({.norm = kNan, .located = true}, ranks),
              HasSubstr("rank 2's autograd made is that of parameter c; the first that rank 1's autograd made is that "
                        "of parameter b in micro-batch 1 (x); the first that rank 0's autograd made"));
}

TEST(NonFiniteText, FactsGoThroughTextEvenWhereNamesAreNoUtf8) {
  NonFiniteFacts facts;
  EXPECT_FALSE(non_finite_facts(to_text(facts)).element);
  facts.element = {2, 5, 1234567890123, "h.3.\"mlp\".weight", "nan"};
  facts.loss = {3, "file \xff\xfe, line 7", "-inf", 2};
  facts.local = {-1, "", "w", 1};
  const NonFiniteFacts read = non_finite_facts(to_text(facts));
  EXPECT_EQ(read.element->name, facts.element->name);
  EXPECT_EQ(read.element->offset, facts.element->offset);
  EXPECT_EQ(read.element->stage, 2);
  EXPECT_THAT(read.loss->batch, AllOf(HasSubstr("file "), HasSubstr(", line 7")));
  EXPECT_EQ(read.loss->others, 2);
  EXPECT_EQ(read.local->micro_batch, -1);
  EXPECT_EQ(read.local->parameter, "w");
  EXPECT_EQ(name_of_non_finite(-kNan), "nan");
}

}  // namespace
}  // namespace ds::engine
