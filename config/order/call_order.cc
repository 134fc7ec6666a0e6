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
  kNoScopes = 1 << 5,        // of gathered_parameters()
  kMovedStates = 1 << 6,     // between offload_states() and reload_states()
};

// The needs of a call; texts are of the checks that it has.
struct Row {
  Call call;
  const char* name;
  unsigned needs = kNothing;
  std::optional<Driver> driver = {};
  const char* other_driver = "";       // Driver::kProgram: what a pipeline's program is told
  const char* inside = " was called";  // kBetweenSteps
  const char* instead = "";            // likewise
};

constexpr const char* kAtBoundary = "; call it after step() at the boundary";

constexpr Row kRows[] = {
    {.call = Call::kBackward,
     .name = "backward()",
     .needs = kStatesHere | kWholeState,
     .driver = Driver::kProgram,
     .other_driver = ", whose forward and backward belong together; expected engine->train_batch()"},
    {.call = Call::kStep,
     .name = "step()",
     .needs = kBackwardBefore | kReductions | kNoScopes,
     .driver = Driver::kProgram,
     .other_driver = "; expected engine->train_batch(), which is a whole step"},
    {.call = Call::kTrainBatch,
     .name = "train_batch()",
     .needs = kStatesHere | kWholeState | kReductions | kNoScopes,
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
    {.call = Call::kFp32StateDict, .name = "fp32_state_dict()", .needs = kWholeState},
    {.call = Call::kSave16BitModel, .name = "save_16bit_model()", .needs = kWholeState},
    {.call = Call::kSaveCheckpoint, .name = "save_checkpoint()", .needs = kStatesHere | kWholeState | kNoScopes},
    {.call = Call::kLoadCheckpoint,
     .name = "load_checkpoint()",
     .needs = kStatesHere | kBetweenSteps | kNoScopes,
     .instead = "; call it between optimizer steps"},
    {.call = Call::kOffloadStates,
     .name = "offload_states()",
     .needs = kStatesHere | kBetweenSteps | kNoScopes,
     .instead = kAtBoundary},
    {.call = Call::kReloadStates, .name = "reload_states()", .needs = kMovedStates},
    {.call = Call::kModelStateBytes, .name = "model_state_bytes()", .needs = kStatesHere},
};

const Row& row_of(Call call) {
  const auto* const row =
      std::find_if(std::begin(kRows), std::end(kRows), [&](const Row& r) { return r.call == call; });
  ensure(row != std::end(kRows), "every call has a row");
  return *row;
}

constexpr const char* kMixture =
    " had failed part of the way: weights and optimizer states are a mixture; load a checkpoint that is whole first";

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
  ds::require(!needs(kWholeState) || !half_loaded_, row.name, " was called after load_checkpoint()", kMixture);
  ds::require(!needs(kWholeState) || !half_stepped_, row.name, " was called after a step()", kMixture);
  ds::require(!needs(kBackwardBefore) || backwards_since_step_ > 0, row.name, " was called before backward(). ",
              "Expected: loss = model->forward(...); engine->backward(loss); engine->step()");
  ds::require(!needs(kReductions) || synchronize_, row.name,
              " was called inside no_sync(); end the no_sync scope first");
  ds::require(!needs(kBetweenSteps) || accumulation_begins(), row.name, row.inside,
              micro_batches_done_ == 0 ? std::string(" between backward() and step()")
                                       : cat(" inside an accumulation, after ", micro_batches_done_, " of ",
                                             accumulation_.micro_batches, " micro-batches"),
              row.instead);
  ds::require(!needs(kNoScopes) || scopes_ == 0, row.name, " was called while ", scopes_,
              " scopes of gathered_parameters() are open; end them first");
}

void CallOrder::require_scope(bool modifies) const {
  ds::require(!modifies || read_only_scopes_ == 0, "gathered_parameters: a scope with a modifier rank cannot be ",
              "opened inside one without; close the outer one first, or give it a modifier rank too");
}

void CallOrder::require_load(bool with_states) const {
  require(Call::kLoadCheckpoint);
  ds::require(!(half_loaded_states_ || half_stepped_) || with_states, "load_checkpoint() without optimizer states ",
              "was called after ", half_stepped_ ? "a step()" : "one with them",
              " had failed part of the way: the optimizer's are a mixture; load them too");
}

void CallOrder::use_from_this_thread() {
  ds::require(scopes_ == 0 && synchronize_,
              "use_from_this_thread() was called while scopes of gathered_parameters() or ",
              "no_sync() are open; end them first, on thread ", thread_);
  thread_ = std::this_thread::get_id();
}

bool CallOrder::at_boundary() const {
  if (boundary_) return *boundary_;
  return !accumulation_.counted || micro_batches_done_ + 1 >= accumulation_.micro_batches;
}

void CallOrder::micro_batch_done() {
  ++micro_batches_done_;
  batches_done_ += accumulation_.counted ? 1 : backwards_since_step_;
  backwards_since_step_ = 0;
}

int64_t CallOrder::end_accumulation() {
  batches_done_ = 0;
  return std::exchange(micro_batches_done_, 0);
}

int64_t CallOrder::drop_accumulation() {
  backwards_since_step_ = 0;
  return end_accumulation();
}

void CallOrder::begin_no_sync() {
  ds::require(synchronize_, "no_sync() inside no_sync(): expected one scope at a time");
  synchronize_ = false;
}

void CallOrder::scope_opened(bool modifies) {
  ++scopes_;
  if (!modifies) ++read_only_scopes_;
}

void CallOrder::scope_closed(bool modifies) {
  --scopes_;
  if (!modifies) --read_only_scopes_;
}

void CallOrder::load_begins(bool with_states) {
  half_loaded_ = true;
  half_loaded_states_ = half_loaded_states_ || with_states;
}

void CallOrder::load_done() {
  half_loaded_ = false;
  half_loaded_states_ = false;
  half_stepped_ = false;
}

}  // namespace ds::engine
