// What may be called when: refusals name the call, what is in its way, and the call that is expected.
#include "config/order/call_order.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "core/check.h"
#include "tests/support/thrown.h"

namespace ds::engine {
namespace {

using testing::HasSubstr;

std::string refusal(const std::function<void()>& call) { return test::thrown_by<UsageError>(call, ""); }

std::string refusal(const CallOrder& order, Call call) {
  return refusal([&] { order.require(call); });
}

CallOrder of_program(int64_t micro_batches = 4, bool counted = true) {
  return {Driver::kProgram, {.micro_batches = micro_batches, .counted = counted}};
}

CallOrder of_schedule() { return {Driver::kSchedule, {.micro_batches = 4}}; }

const Call kAll[] = {Call::kBackward,
                     Call::kStep,
                     Call::kTrainBatch,
                     Call::kEvalBatch,
                     Call::kSetDataloader,
                     Call::kSetDataiterator,
                     Call::kTracePipeline,
                     Call::kResetActivationShape,
                     Call::kWritePipelineTrace,
                     Call::kZeroGrad,
                     Call::kModuleStateDict,
                     Call::kSynchronizeParameters,
                     Call::kGatheredParameters,
                     Call::kFp32StateDict,
                     Call::kSave16BitModel,
                     Call::kSaveWeights,
                     Call::kSaveFp32Model,
                     Call::kSaveCheckpoint,
                     Call::kLoadCheckpoint,
                     Call::kLoadWeights,
                     Call::kOffloadStates,
                     Call::kReloadStates,
                     Call::kModelStateBytes,
                     Call::kSetTrainBatchSize,
                     Call::kMean,
                     Call::kAgree,
                     Call::kLog,
                     Call::kEndEpoch,
                     Call::kAddMonitor,
                     Call::kEmaScope,
                     Call::kEmaStateDict};

TEST(CallOrder, AtFirstAllIsAllowedButWhatNeedsACallBefore) {
  const CallOrder order = of_program();
  for (const Call call : kAll) {
    const std::string text = refusal(order, call);
    if (call == Call::kStep) {
      EXPECT_EQ(text,
                "step() was called before backward(). Expected: loss = model->forward(...); engine->backward(loss); "
                "engine->step()");
    } else if (call == Call::kReloadStates) {
      EXPECT_EQ(text, "reload_states() was called, but no states are offloaded; call offload_states() first");
    } else if (text.empty()) {
      EXPECT_EQ(refusal(of_schedule(), call).empty(), call != Call::kBackward);
    } else {
      EXPECT_THAT(text, HasSubstr("() needs a pipeline: expected a model that is a pipeline::PipelineModule; without "
                                  "one call backward() and step()"));
      EXPECT_EQ(refusal(of_schedule(), call), "");
    }
  }
}

TEST(CallOrder, APipelineHasOneCallForAStep) {
  const CallOrder order = of_schedule();
  EXPECT_EQ(refusal(order, Call::kBackward),
            "backward(): the model is a pipeline, whose forward and backward belong together; expected "
            "engine->train_batch()");
  EXPECT_EQ(refusal(order, Call::kStep),
            "step(): the model is a pipeline; expected engine->train_batch(), which is a whole step");
  EXPECT_EQ(refusal([&] { order.require_driver(Call::kTrainBatch); }), "");
}

TEST(CallOrder, MicroBatchesAreCountedToTheBoundary) {
  CallOrder order = of_program(2);
  EXPECT_TRUE(order.micro_batches.boundary_is_known());
  EXPECT_FALSE(order.micro_batches.at_boundary());
  order.micro_batches.note_backward();
  order.micro_batches.note_backward();
  order.require(Call::kStep);
  order.micro_batches.note_micro_batch();
  EXPECT_NE(refusal(order, Call::kStep), "");
  EXPECT_TRUE(order.micro_batches.at_boundary());
  order.micro_batches.note_backward();
  order.micro_batches.note_micro_batch();
  EXPECT_EQ(order.micro_batches.end_accumulation(), 2);
  EXPECT_FALSE(order.micro_batches.at_boundary());
}

TEST(CallOrder, AProgramMayDeclareTheBoundary) {
  CallOrder order = of_program(1, /*counted=*/false);
  EXPECT_FALSE(order.micro_batches.boundary_is_known());
  EXPECT_TRUE(order.micro_batches.at_boundary());
  order.micro_batches.set_boundary(false);
  EXPECT_TRUE(order.micro_batches.boundary_is_known());
  EXPECT_FALSE(order.micro_batches.at_boundary());
  order.micro_batches.set_boundary(std::nullopt);
  EXPECT_TRUE(order.micro_batches.at_boundary());
}

TEST(CallOrder, WithoutAccumulationTheStepIsWhatIsMissing) {
  CallOrder order = of_program(1);
  order.micro_batches.note_backward();
  EXPECT_EQ(refusal(order, Call::kSaveCheckpoint), "");
  EXPECT_EQ(refusal(order, Call::kOffloadStates),
            "offload_states() was called between backward() and step(); call it after step() at the boundary");
}

TEST(CallOrder, NobodyTrainsWithoutAnOptimizer) {
  const CallOrder order(Driver::kNobody, {});
  for (const Call call : {Call::kBackward, Call::kStep, Call::kClipGradNorm}) {
    EXPECT_THAT(refusal(order, call), ::testing::HasSubstr(": this engine has no optimizer, and evaluates only"));
  }
  EXPECT_THAT(refusal(order, Call::kTrainBatch), ::testing::HasSubstr("needs a pipeline"));
  for (const Call call : {Call::kZeroGrad, Call::kSaveCheckpoint, Call::kLoadCheckpoint, Call::kGatheredParameters}) {
    EXPECT_EQ(refusal(order, call), "");
  }
}

TEST(CallOrder, CountsPassesWhereStepDoesNotCount) {
  CallOrder order = of_program(1, /*counted=*/false);
  for (int i = 0; i < 3; ++i) order.micro_batches.note_backward();
  order.micro_batches.note_micro_batch();
  EXPECT_EQ(order.micro_batches.batches_done(), 3);
  EXPECT_EQ(order.micro_batches.end_accumulation(), 1);
  EXPECT_EQ(order.micro_batches.batches_done(), 0);
  CallOrder counted = of_program();
  for (int i = 0; i < 3; ++i) counted.micro_batches.note_backward();
  counted.micro_batches.note_micro_batch();
  EXPECT_EQ(counted.micro_batches.batches_done(), 1);
}

TEST(CallOrder, CallsBetweenStepsCountWhatWouldBeLost) {
  CallOrder order = of_program();
  order.micro_batches.note_backward();
  EXPECT_EQ(refusal(order, Call::kOffloadStates),
            "offload_states() was called between backward() and step(); call it after step() at the boundary");
  order.micro_batches.note_micro_batch();
  EXPECT_EQ(refusal(order, Call::kOffloadStates),
            "offload_states() was called inside an accumulation, after 1 of 4 micro-batches; call it after step() at "
            "the boundary");
  EXPECT_EQ(refusal(order, Call::kSaveCheckpoint), "");
  EXPECT_EQ(refusal([&] { order.require_load(true); }),
            "load_checkpoint() was called inside an accumulation, after 1 of 4 micro-batches; call it between "
            "optimizer steps");
  EXPECT_EQ(refusal(order, Call::kSetTrainBatchSize),
            "set_train_batch_size: called inside an accumulation, after 1 of 4 micro-batches; call it between "
            "optimizer steps");
  EXPECT_EQ(order.micro_batches.drop_accumulation(), 1);
  for (const Call call : {Call::kOffloadStates, Call::kLoadCheckpoint}) {
    EXPECT_EQ(refusal(order, call), "");
  }
}

TEST(CallOrder, ABatchOfAScheduleIsAWholeAccumulation) {
  CallOrder order = of_schedule();
  order.micro_batches.note_batch(4);
  EXPECT_NE(refusal(order, Call::kLoadCheckpoint), "");
  EXPECT_EQ(order.micro_batches.end_accumulation(), 4);
  EXPECT_EQ(refusal(order, Call::kSaveCheckpoint), "");
}

TEST(CallOrder, AveragedWeightsAreReadAlone) {
  CallOrder order = of_program();
  order.scopes.begin_ema();
  for (const Call call : {Call::kBackward, Call::kSaveCheckpoint, Call::kLoadCheckpoint, Call::kFp32StateDict,
                          Call::kOffloadStates, Call::kEmaScope}) {
    EXPECT_THAT(refusal(order, call), HasSubstr(" was called inside an EmaScope, where the model has averaged weights; "
                                                "end the scope first"));
  }
  for (const Call call : {Call::kModuleStateDict, Call::kSave16BitModel, Call::kGatheredParameters, Call::kMean}) {
    EXPECT_EQ(refusal(order, call), "");
  }
  EXPECT_EQ(refusal([&] { order.scopes.require_gather(/*modifies=*/false); }), "");
  EXPECT_THAT(refusal([&] { order.scopes.require_gather(/*modifies=*/true); }), HasSubstr("inside an EmaScope"));
  EXPECT_THAT(refusal([&] { order.use_from_this_thread(); }), HasSubstr("EmaScope"));
  order.scopes.end_ema();
  EXPECT_EQ(refusal(order, Call::kSaveCheckpoint), "");
}

TEST(CallOrder, NoStepInsideNoSync) {
  CallOrder order = of_program();
  order.scopes.begin_no_sync();
  EXPECT_FALSE(order.scopes.synchronizes());
  EXPECT_EQ(refusal([&] { order.scopes.begin_no_sync(); }), "no_sync() inside no_sync(): expected one scope at a time");
  order.micro_batches.note_backward();
  EXPECT_EQ(refusal(order, Call::kStep), "step() was called inside no_sync(); end the no_sync scope first");
  EXPECT_FALSE(order.scopes.gives_last_gradients(true));
  order.scopes.end_no_sync();
  EXPECT_EQ(refusal(order, Call::kStep), "");
  EXPECT_TRUE(order.scopes.gives_last_gradients(true));
  EXPECT_FALSE(order.scopes.gives_last_gradients(false));

  CallOrder pipeline = of_schedule();
  pipeline.scopes.begin_no_sync();
  EXPECT_EQ(refusal(pipeline, Call::kTrainBatch),
            "train_batch() was called inside no_sync(); end the no_sync scope first");
}

TEST(CallOrder, OpenScopesAreEndedFirst) {
  CallOrder order = of_program();
  order.scopes.begin_gather(/*modifies=*/false);
  EXPECT_THAT(refusal([&] { order.scopes.require_gather(true); }), HasSubstr("cannot be opened inside one without"));
  EXPECT_EQ(refusal([&] { order.scopes.require_gather(false); }), "");
  order.scopes.begin_gather(false);
  for (const Call call : {Call::kSaveCheckpoint, Call::kLoadCheckpoint, Call::kOffloadStates}) {
    EXPECT_THAT(refusal(order, call),
                HasSubstr("() was called while 2 scopes of gathered_parameters() are open; end them first"));
  }
  EXPECT_FALSE(order.scopes.gives_last_gradients(true));
  order.micro_batches.note_backward();
  EXPECT_EQ(refusal(order, Call::kStep),
            "step() was called while 2 scopes of gathered_parameters() are open; end them first");
  order.scopes.end_gather(false);
  order.scopes.end_gather(false);
  EXPECT_EQ(refusal(order, Call::kStep), "");
  order.scopes.begin_gather(/*modifies=*/true);
  EXPECT_EQ(refusal([&] { order.scopes.require_gather(true); }), "");
}

TEST(CallOrder, MovedStatesComeBackFirst) {
  CallOrder order = of_program();
  order.states_moved();
  for (const Call call : {Call::kBackward, Call::kZeroGrad, Call::kSynchronizeParameters, Call::kGatheredParameters,
                          Call::kSaveCheckpoint, Call::kLoadCheckpoint, Call::kOffloadStates, Call::kModelStateBytes}) {
    EXPECT_THAT(refusal(order, call),
                HasSubstr("() was called while states are offloaded; call reload_states() first"));
  }
  EXPECT_EQ(refusal(order, Call::kReloadStates), "");
  order.states_returned();
  EXPECT_EQ(refusal(order, Call::kBackward), "");
}

TEST(CallOrder, AMixtureIsNotUsed) {
  CallOrder order = of_program();
  order.consistency.slice_updated();
  EXPECT_TRUE(order.consistency.is_mixture());
  EXPECT_EQ(refusal(order, Call::kBackward),
            "backward() was called after a step() had failed part of the way, or a save had found ranks that differ: "
            "weights and optimizer states are a "
            "mixture; load a checkpoint that is whole first");
  EXPECT_EQ(refusal([&] { order.require_load(false); }),
            "load_checkpoint() without optimizer states was called after a step() had failed part of the way: the "
            "optimizer's are a mixture; load them too");
  order.consistency.update_done();
  EXPECT_EQ(refusal(order, Call::kBackward), "");

  order.consistency.load_begins(/*with_states=*/true);
  for (const Call call :
       {Call::kBackward, Call::kModuleStateDict, Call::kFp32StateDict, Call::kSave16BitModel, Call::kSaveCheckpoint}) {
    EXPECT_THAT(refusal(order, call), HasSubstr("() was called after load_checkpoint() had failed part of the way"));
  }
  EXPECT_THAT(refusal([&] { order.require_load(false); }), HasSubstr("was called after one with them had failed"));
  EXPECT_EQ(refusal([&] { order.require_load(true); }), "");
  order.consistency.load_begins(/*with_states=*/false);
  EXPECT_NE(refusal([&] { order.require_load(false); }), "") << "the states are still a mixture";
  order.consistency.load_done();
  EXPECT_FALSE(order.consistency.is_mixture());
  EXPECT_EQ(refusal(order, Call::kSaveCheckpoint), "");
}

TEST(CallOrder, WeightsAloneMayBeLoadedAgain) {
  CallOrder order = of_program();
  order.consistency.load_begins(/*with_states=*/false);
  EXPECT_TRUE(order.consistency.is_mixture());
  EXPECT_EQ(refusal([&] { order.require_load(false); }), "");
}

}  // namespace
}  // namespace ds::engine
