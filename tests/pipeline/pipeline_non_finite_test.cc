// A loss or gradient that is not finite in a pipeline is an error of all its ranks, which loses nothing.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "core/check.h"
#include "tests/pipeline/layered_model.h"
#include "tests/support/borrowed.h"
#include "tests/support/thread_ranks.h"

namespace ds::pipeline {
namespace {

using testing::AllOf;
using testing::HasSubstr;

// Labels beyond the vocabulary ask for NaN: of the loss or, twice as far, of its gradient alone.
at::Tensor poisoned_cross_entropy(const at::Tensor& logits, const at::Tensor& labels) {
  const auto beyond = labels.max().item<int64_t>() / kVocabulary;
  const at::Tensor loss = cross_entropy(logits, labels.remainder(kVocabulary));
  if (beyond == 1) return loss * std::numeric_limits<double>::quiet_NaN();
  return beyond == 2 ? loss + torch::sqrt(logits.sum() * 0) * 0 : loss;
}

struct NonFiniteRun {
  std::string schedule = "1f1b";
  int stages = 2;
  int zero_stage = 1;
  int64_t beyond = 1;
  bool interrupts = true;
};

// Four steps, the second of which is tried with a bad micro-batch 2 of the second data-parallel rank first. Adds what
// each rank then says to `errors`.
std::vector<double> losses_with(const NonFiniteRun& job, std::vector<std::string>& errors) {
  const nlohmann::json config = {{"train_micro_batch_size_per_gpu", 2},
                                 {"gradient_accumulation_steps", 4},
                                 {"log_level", "error"},
                                 {"locate_non_finite", true},
                                 {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 1e-3}}}}},
                                 {"zero_optimization", {{"stage", job.zero_stage}}},
                                 {"pipeline", {{"stages", job.stages}, {"schedule", job.schedule}}}};
  std::vector<double> losses;
  errors.assign(static_cast<size_t>(2 * job.stages), "");
  test::run_ranks(2 * job.stages, [&](comm::Communicator& world) {
    torch::set_num_threads(1);
    const auto model =
        std::make_shared<PipelineModule>(layers_of(4, true), PipelineOptions{.loss = poisoned_cross_entropy});
    const auto ranks = test::borrowed(world);
    const auto engine = engine::initialize({.model = model, .config = config, .communicator = ranks}).engine;
    const int data_rank = engine->communicator().rank();
    const auto step = [&](int64_t number, int64_t beyond) {
      int64_t next = 0;
      return engine->train_batch([&] {
        MicroBatch batch = tokens_of(4 * number + next, data_rank);
        if (next == 2 && data_rank == 1) batch.labels[0] = batch.labels[0] + beyond * kVocabulary;
        engine->name_batch(cat("text ", next, " of ", data_rank));
        ++next;
        return batch;
      });
    };
    for (int64_t number = 0; number < 4; ++number) {
      if (job.interrupts && number == 1) {
        try {
          step(number, job.beyond);
          ADD_FAILURE() << "expected a NonFiniteError";
        } catch (const NonFiniteError& error) {
          errors[static_cast<size_t>(world.rank())] = error.what();
        }
        EXPECT_EQ(engine->global_steps(), 1);
        EXPECT_EQ(engine->micro_steps(), 4);
      }
      const double loss = step(number, 0).item<double>();
      if (world.rank() == 0) losses.push_back(loss);
    }
    EXPECT_EQ(engine->global_steps(), 4);
  });
  return losses;
}

class PipelineNonFinite : public ::testing::TestWithParam<NonFiniteRun> {};

TEST_P(PipelineNonFinite, IsAnErrorOfAllRanksThatLosesNothing) {
  for (const int64_t beyond : {1, 2}) {
    NonFiniteRun job = GetParam();
    job.beyond = beyond;
    std::vector<std::string> errors;
    const std::vector<double> with = losses_with(job, errors);
    for (const std::string& error : errors) EXPECT_EQ(error, errors[0]);
    // Of the second data-parallel rank, where the last stage is.
    const bool v_shape = job.schedule == "zbv";
    const int last = v_shape ? 1 : 2 * job.stages - 1;
    const std::string batch = "micro-batch 2 (text 2 of 1)";
    EXPECT_THAT(errors[0], HasSubstr("step 2: the gradient is not finite: first in parameter embed.weight, element 0"));
    EXPECT_THAT(errors[0], HasSubstr(beyond == 1 ? cat("rank ", last, "'s loss of ", batch, " is nan")
                                                 : std::string("all losses are finite")));
    EXPECT_THAT(errors[0], HasSubstr("in micro-batch 2"));
    if (!v_shape) EXPECT_THAT(errors[0], HasSubstr(cat("; the first that rank ", last, "'s autograd made")));
    job.interrupts = false;
    EXPECT_EQ(with, losses_with(job, errors));
  }
}

INSTANTIATE_TEST_SUITE_P(Schedules, PipelineNonFinite,
                         ::testing::Values(NonFiniteRun{"1f1b", 2, 0}, NonFiniteRun{"gpipe", 3, 1},
                                           NonFiniteRun{"zb_h1", 2, 2}, NonFiniteRun{"zbv", 2, 1},
                                           NonFiniteRun{"interleaved", 2, 3}),
                         [](const auto& job) { return job.param.schedule; });

}  // namespace
}  // namespace ds::pipeline
