#include "config/order/call_order.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "core/check.h"

namespace ds::engine {
namespace {

enum Needs : unsigned {
  kNothing = 0,
  kStatesHere = 1 << 0,      // not between offload_states() and reload_states()
  kWholeState = 1 << 1,      // no load or step failed part of the way
  kBackwardBefore = 1 << 2,  // since the last step()
  kReductions = 1 << 3,      // not inside no_sync()
  kBetweenSteps = 1 << 4,    // not inside an accumulation
  kNoScopes = 1 << 5,        // not inside scopes of gathered_parameters()
  kMovedStates = 1 << 6,     // between offload_states() and reload_states()
  kOwnWeights = 1 << 7,      // not inside an EmaScope
};

// The needs of a call, and the words of it in messages of the checks that follow from them.
struct Row {
  Call call;
  const char* name;
  unsigned needs = kNothing;
  std::optional<Driver> driver = {};
  const char* other_driver = "";       // Driver::kProgram: what a pipeline's program is told
  const char* inside = " was called";  // kBetweenSteps: the verb
  const char* instead = "";            // kBetweenSteps: the advice
};

constexpr const char* kAtBoundary = "; call it after step() at the boundary";

constexpr Row kRows[] = {
    {.call = Call::kBackward,
     .name = "backward()",
     .needs = kStatesHere | kWholeState | kOwnWeights,
     .driver = Driver::kProgram,
     .other_driver = ", whose forward and backward belong together; expected engine->train_batch()"},
    {.call = Call::kStep,
     .name = "step()",
     .needs = kBackwardBefore | kReductions | kNoScopes | kOwnWeights,
     .driver = Driver::kProgram,
     .other_driver = "; expected engine->train_batch(), which is a whole step"},
    {.call = Call::kTrainBatch,
     .name = "train_batch()",
     .needs = kStatesHere | kWholeState | kReductions | kNoScopes | kOwnWeights,
     .driver = Driver::kSchedule},
    {.call = Call::kEvalBatch, .name = "eval_batch()", .needs = kStatesHere | kWholeState, .driver = Driver::kSchedule},
    {.call = Call::kSetDataloader, .name = "set_dataloader()", .driver = Driver::kSchedule},
    {.call = Call::kSetDataiterator, .name = "set_dataiterator()", .driver = Driver::kSchedule},
    {.call = Call::kResetActivationShape, .name = "reset_activation_shape()", .driver = Driver::kSchedule},
    {.call = Call::kTracePipeline, .name = "trace_pipeline()", .driver = Driver::kSchedule},
    {.call = Call::kWritePipelineTrace, .name = "write_pipeline_trace()", .driver = Driver::kSchedule},
    {.call = Call::kZeroGrad, .name = "zero_grad()", .needs = kStatesHere},
    {.call = Call::kClipGradNorm,
     .name = "clip_grad_norm_()",
     .needs = kStatesHere | kWholeState | kBackwardBefore | kReductions,
     .driver = Driver::kProgram,
     .other_driver = "; expected gradient_clipping in the config"},
    {.call = Call::kFullGradient,
     .name = "safe_get_full_grad() or one like it",
     .needs = kStatesHere | kWholeState | kBackwardBefore | kReductions},
    {.call = Call::kSetTrainBatchSize,
     .name = "set_train_batch_size",
     .needs = kBetweenSteps,
     .inside = ": called",
     .instead = "; call it between optimizer steps"},
    {.call = Call::kSynchronizeParameters, .name = "synchronize_parameters()", .needs = kStatesHere},
    {.call = Call::kGatheredParameters, .name = "gathered_parameters()", .needs = kStatesHere},
    {.call = Call::kModuleStateDict, .name = "module_state_dict()", .needs = kWholeState},
    {.call = Call::kFp32StateDict, .name = "fp32_state_dict()", .needs = kWholeState | kOwnWeights},
    {.call = Call::kSave16BitModel, .name = "save_16bit_model()", .needs = kWholeState},
    {.call = Call::kSaveWeights, .name = "save_weights()", .needs = kStatesHere | kWholeState},
    {.call = Call::kSaveFp32Model, .name = "save_fp32_model()", .needs = kWholeState | kOwnWeights},
    {.call = Call::kSaveCheckpoint,
     .name = "save_checkpoint()",
     .needs = kStatesHere | kWholeState | kNoScopes | kOwnWeights},
    {.call = Call::kLoadCheckpoint,
     .name = "load_checkpoint()",
     .needs = kStatesHere | kBetweenSteps | kNoScopes | kOwnWeights,
     .instead = "; call it between optimizer steps"},
    {.call = Call::kLoadWeights,
     .name = "load_weights()",
     .needs = kStatesHere | kWholeState | kBetweenSteps | kNoScopes | kOwnWeights,
     .instead = "; call it between optimizer steps"},
    {.call = Call::kOffloadStates,
     .name = "offload_states()",
     .needs = kStatesHere | kBetweenSteps | kNoScopes | kOwnWeights,
     .instead = kAtBoundary},
    {.call = Call::kReloadStates, .name = "reload_states()", .needs = kMovedStates},
    {.call = Call::kModelStateBytes, .name = "model_state_bytes()", .needs = kStatesHere},
    {.call = Call::kMean, .name = "mean()"},
    {.call = Call::kAgree, .name = "agree()"},
    {.call = Call::kLog, .name = "log()"},
    {.call = Call::kEndEpoch, .name = "end_epoch()"},
    {.call = Call::kAddMonitor, .name = "add_monitor()"},
    {.call = Call::kEmaScope, .name = "EmaScope", .needs = kStatesHere | kWholeState | kNoScopes | kOwnWeights},
    {.call = Call::kEmaStateDict, .name = "ema_state_dict()", .needs = kStatesHere | kWholeState},
};

const Row& row_of(Call call) {
  const auto* const row =
      std::find_if(std::begin(kRows), std::end(kRows), [&](const Row& r) { return r.call == call; });
  ensure(row != std::end(kRows), "every call has a row");
  return *row;
}

}  // namespace

void CallOrder::require_driver(Call call) const {
  const Row& row = row_of(call);
  const std::thread::id here = std::this_thread::get_id();
  ds::require(here == thread_, row.name, " was called on thread ", here, ": expected thread ", thread_,
              ", which made the engine or took it over last. Forward and all calls of an engine belong to one thread; ",
              "to hand it over call engine->use_from_this_thread() on the other one, while nobody else uses it");
  if (!row.driver || *row.driver == driver_) return;
  ds::require(
      driver_ != Driver::kNobody || *row.driver == Driver::kSchedule, row.name,
      ": this engine has no optimizer, and evaluates only: its parameters are frozen and have no gradients. To ",
      "train, add the section \"optimizer\" to the ds_config, or pass .optimizer to initialize");
  ds::require(*row.driver == Driver::kSchedule, row.name, ": the model is a pipeline", row.other_driver);
  ds::require(false, row.name, " needs a pipeline: expected a model that is a pipeline::PipelineModule; ",
              "without one call backward() and step()");
}

void CallOrder::require(Call call) const {
  require_driver(call);
  const Row& row = row_of(call);
  const auto needs = [&row](Needs what) { return (row.needs & what) != 0; };
  ds::require(!needs(kMovedStates) || moved_, row.name, " was called, but no states are offloaded; call ",
              "offload_states() first");
  ds::require(!needs(kStatesHere) || !moved_, row.name,
              " was called while states are offloaded; call reload_states() first");
  if (needs(kWholeState)) consistency.require_whole(row.name);
  ds::require(!needs(kBackwardBefore) || micro_batches.awaits_step(), row.name, " was called before backward(). ",
              "Expected: loss = model->forward(...); engine->backward(loss); engine->step()");
  ds::require(!needs(kReductions) || scopes.synchronizes(), row.name,
              " was called inside no_sync(); end the no_sync scope first");
  ds::require(!needs(kBetweenSteps) || micro_batches.at_start(), row.name, row.inside,
              micro_batches.done() == 0 ? std::string(" between backward() and step()")
                                        : cat(" inside an accumulation, after ", micro_batches.done(), " of ",
                                              micro_batches.per_update(), " micro-batches"),
              row.instead);
  ds::require(!needs(kNoScopes) || scopes.gathers() == 0, row.name, " was called while ", scopes.gathers(),
              " scopes of gathered_parameters() are open; end them first");
  if (needs(kOwnWeights)) scopes.require_own_weights(row.name);
}

void CallOrder::require_load(bool with_states) const {
  require(Call::kLoadCheckpoint);
  consistency.require_load(with_states);
}

void CallOrder::use_from_this_thread() {
  ds::require(scopes.gathers() == 0 && scopes.synchronizes() && !scopes.shows_average(),
              "use_from_this_thread() was called while scopes of gathered_parameters(), ",
              "no_sync() or EmaScope are open; end them first, on thread ", thread_);
  thread_ = std::this_thread::get_id();
}

bool MicroBatchCounter::at_boundary() const {
  if (boundary_) return *boundary_;
  return !rule_.counted || done_ + 1 >= rule_.micro_batches;
}

void MicroBatchCounter::note_micro_batch() {
  ++done_;
  batches_done_ += rule_.counted ? 1 : backwards_since_step_;
  backwards_since_step_ = 0;
}

int64_t MicroBatchCounter::end_accumulation() {
  batches_done_ = 0;
  return std::exchange(done_, 0);
}

int64_t MicroBatchCounter::drop_accumulation() {
  backwards_since_step_ = 0;
  return end_accumulation();
}

void OpenScopes::begin_no_sync() {
  require(synchronizes_, "no_sync() inside no_sync(): expected one scope at a time");
  synchronizes_ = false;
}

void OpenScopes::require_own_weights(const char* call) const {
  require(!shows_average_, call, " was called inside an EmaScope, where the model has averaged weights; end the scope ",
          "first");
}

void OpenScopes::require_gather(bool modifies) const {
  if (modifies) require_own_weights("gathered_parameters() with a modifier rank");
  require(!modifies || read_only_gathers_ == 0, "gathered_parameters: a scope with a modifier rank cannot be ",
          "opened inside one without; close the outer one first, or give it a modifier rank too");
}

void OpenScopes::begin_gather(bool modifies) {
  ++gathers_;
  if (!modifies) ++read_only_gathers_;
}

void OpenScopes::end_gather(bool modifies) {
  --gathers_;
  if (!modifies) --read_only_gathers_;
}

void ModelConsistency::require_whole(const char* call) const {
  constexpr const char* kMixture =
      ": weights and optimizer states are a mixture; load a checkpoint that is whole first";
  require(!half_loaded_, call, " was called after load_checkpoint() had failed part of the way", kMixture);
  require(!half_stepped_, call,
          " was called after a step() had failed part of the way, or a save had found ranks that ", "differ", kMixture);
}

void ModelConsistency::require_load(bool with_states) const {
  require(!(half_loaded_states_ || half_stepped_) || with_states, "load_checkpoint() without optimizer states ",
          "was called after ", half_stepped_ ? "a step()" : "one with them",
          " had failed part of the way: the optimizer's are a mixture; load them too");
}

void ModelConsistency::load_begins(bool with_states) {
  half_loaded_ = true;
  half_loaded_states_ = half_loaded_states_ || with_states;
}

void ModelConsistency::load_done() {
  half_loaded_ = false;
  half_loaded_states_ = false;
  half_stepped_ = false;
}

}  // namespace ds::engine
