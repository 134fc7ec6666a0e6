// An engine belongs to one thread, and can be handed to another.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <exception>
#include <functional>
#include <string>
#include <thread>

#include "core/check.h"
#include "tests/porting/ported_run.h"

namespace ds::engine {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

// Throws what the other thread has thrown.
void on_another_thread(const std::function<void()>& body) {
  std::exception_ptr error;
  std::thread other([&] {
    try {
      body();
    } catch (...) {
      error = std::current_exception();
    }
  });
  other.join();
  if (error) std::rethrow_exception(error);
}

class Threads : public ::testing::TestWithParam<int> {};

TEST_P(Threads, ACallFromAnotherThreadIsAnErrorWithBothIds) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(GetParam(), 1), communicator).engine;
    train(*engine, model, 1);
    const std::string own = cat("expected thread ", std::this_thread::get_id());
    const at::Tensor loss = model->loss(sample(0, communicator.rank()));
    EXPECT_THAT([&] { on_another_thread([&] { engine->backward(loss); }); },
                ThrowsMessage<UsageError>(AllOf(HasSubstr("backward() was called on thread "), HasSubstr(own),
                                                HasSubstr("use_from_this_thread()"))));
    engine->backward(loss);
    EXPECT_THAT([&] { on_another_thread([&] { engine->step(); }); }, ThrowsMessage<UsageError>(HasSubstr(own)));
    engine->step();
    EXPECT_THAT([&] { on_another_thread([&] { engine->save_checkpoint("never"); }); },
                ThrowsMessage<UsageError>(HasSubstr("save_checkpoint() was called on thread ")));
  });
}

TEST_P(Threads, AnEngineThatIsHandedOverTrainsOn) {
  const PortedRun run;
  const PortedResult expected = run_plainly(run);
  test::run_ranks(run.world, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(GetParam(), 1), communicator).engine;
    State weights;
    const auto step = [&](int number) {
      const at::Tensor loss = model->loss(sample(number, communicator.rank()));
      engine->backward(loss);
      engine->step();
      EXPECT_NEAR(mean_over(communicator, loss.item<double>()), expected.losses[static_cast<size_t>(number)],
                  kSameResult);
    };
    for (int number = 0; number < run.steps; number += 2) {
      step(number);
      on_another_thread([&] {
        engine->use_from_this_thread();
        step(number + 1);
      });
      engine->use_from_this_thread();
    }
    EXPECT_LT(largest_difference(copy_of(engine->fp32_state_dict()), expected.weights), 1e-5);
  });
}

TEST(ThreadsAtStage3, AnOpenScopeBelongsToItsThread) {
  test::run_ranks(1, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(3, 1), communicator).engine;
    const auto whole = engine->gathered_parameters(model->parameters());
    EXPECT_THAT([&] { on_another_thread([&] { engine->use_from_this_thread(); }); },
                ThrowsMessage<UsageError>(HasSubstr("gathered_parameters()")));
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, Threads, ::testing::Values(0, 1, 2, 3), stage_name);

}  // namespace
}  // namespace ds::engine
