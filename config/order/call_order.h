// The order of calls: a table of the engine's calls, and what has happened so far that decides. Torch-free.
//
// It knows no engine and no tensor, so that every driver of steps can share it: a program's backward() and step(), a
// pipeline's train_batch(). A driver asks require() before it does anything, and tells what has happened afterwards.
#pragma once

#include <cstdint>
#include <optional>
#include <thread>

namespace ds::engine {

enum class Call {
  kBackward,
  kStep,
  kTrainBatch,
  kEvalBatch,
  kSetDataloader,
  kSetDataiterator,
  kResetActivationShape,
  kTracePipeline,
  kWritePipelineTrace,
  kZeroGrad,
  kClipGradNorm,
  kFullGradient,
  kSetTrainBatchSize,
  kSynchronizeParameters,
  kGatheredParameters,
  kModuleStateDict,
  kFp32StateDict,
  kSave16BitModel,
  kSaveWeights,
  kSaveFp32Model,
  kSaveCheckpoint,
  kLoadCheckpoint,
  kLoadWeights,
  kOffloadStates,
  kReloadStates,
  kModelStateBytes,
  kMean,
  kAgree,
  kLog,
  kEndEpoch,
  kAddMonitor,
  kEmaScope,
  kEmaStateDict,
};

// Who makes the micro-batches of a step: the program, call by call, or a schedule, a whole batch in one call; or there
// are no steps, without an optimizer.
enum class Driver { kProgram, kSchedule, kNobody };

struct AccumulationRule {
  int64_t micro_batches = 1;  // gradient_accumulation_steps
  bool counted = true;        // managed_gradient_accumulation; false: every step() is a boundary
};

// Counts the micro-batches of the running accumulation, and knows at which of them the update comes.
class MicroBatchCounter {
 public:
  explicit MicroBatchCounter(AccumulationRule rule) : rule_(rule) {}

  // The micro-batches of the running accumulation that step() has counted.
  int64_t done() const { return done_; }
  // The micro-batches that an update is made of.
  int64_t per_update() const { return rule_.micro_batches; }
  void set_per_update(int64_t count) { rule_.micro_batches = count; }
  // The backward() calls whose samples are counted: where step() does not count them, each backward() is one.
  int64_t batches_done() const { return batches_done_; }
  int64_t backwards_since_step() const { return backwards_since_step_; }
  bool awaits_step() const { return backwards_since_step_ > 0; }
  // Whether no backward() of the running accumulation has been.
  bool at_start() const { return backwards_since_step_ == 0 && done_ == 0; }
  // Whether the running micro-batch is the last one before the update.
  bool at_boundary() const;
  // False: only step() tells, so that a backward pass cannot yet reduce for the boundary.
  bool boundary_is_known() const { return boundary_ || rule_.counted; }
  // Says in place of counting whether the running micro-batch is the last one; nothing: it is counted again.
  void set_boundary(std::optional<bool> is_boundary) { boundary_ = is_boundary; }

  void note_backward() { ++backwards_since_step_; }
  // Notes that step() ends a micro-batch.
  void note_micro_batch();
  // Notes a batch of a schedule: all micro-batches of an accumulation at once.
  void note_batch(int64_t micro_batches) { done_ = batches_done_ = micro_batches; }
  // Notes that the update begins. Returns the micro-batches that the accumulation had.
  int64_t end_accumulation();
  // Notes that the accumulation is dropped, with the passes since the last step(). Returns its micro-batches.
  int64_t drop_accumulation();

 private:
  AccumulationRule rule_;
  std::optional<bool> boundary_;
  int64_t backwards_since_step_ = 0;
  int64_t done_ = 0;
  int64_t batches_done_ = 0;
};

// The scopes that the program has open: no_sync(), those of gathered_parameters(), with or without a modifier rank, and
// an EmaScope.
class OpenScopes {
 public:
  // Throws UsageError inside another no_sync().
  void begin_no_sync();
  void end_no_sync() { synchronizes_ = true; }
  // False inside no_sync(), where gradients are not reduced.
  bool synchronizes() const { return synchronizes_; }

  // Throws UsageError where a scope of gathered_parameters() cannot be opened inside of those that are open.
  // `modifies`: it has a modifier rank.
  void require_gather(bool modifies) const;
  void begin_gather(bool modifies);
  void end_gather(bool modifies);
  // The number of open scopes of gathered_parameters().
  int gathers() const { return gathers_; }

  void begin_ema() { shows_average_ = true; }
  void end_ema() { shows_average_ = false; }
  // Whether an EmaScope is open, in which the model has averaged weights.
  bool shows_average() const { return shows_average_; }
  // Throws UsageError inside an EmaScope. `call`: the call to name.
  void require_own_weights(const char* call) const;

  // Whether a pass at the boundary gives the last gradients of the step, with which masters may be changed at once: an
  // open scope may write to them when it ends.
  bool gives_last_gradients(bool boundary) const { return boundary && synchronizes_ && gathers_ == 0; }

 private:
  bool synchronizes_ = true;
  int gathers_ = 0;
  int read_only_gathers_ = 0;  // the open ones without a modifier rank
  bool shows_average_ = false;
};

// Whether the weights and the optimizer states are those of one model: a step or a load that fails part of the way
// leaves a mixture, until a whole checkpoint is loaded.
class ModelConsistency {
 public:
  // Throws UsageError where the model is a mixture. `call`: the call to name.
  void require_whole(const char* call) const;
  // Throws UsageError where load_checkpoint(), with or without optimizer states, would leave a mixture.
  void require_load(bool with_states) const;
  bool is_mixture() const { return half_loaded_ || half_stepped_; }

  // Notes that some slices have an update that others do not have.
  void slice_updated() { half_stepped_ = true; }
  // Notes that all slices have the update.
  void update_done() { half_stepped_ = false; }
  // Notes that weights are of two models until load_done(); `with_states`: optimizer states too.
  void load_begins(bool with_states);
  void load_done();

 private:
  bool half_stepped_ = false;
  bool half_loaded_ = false;
  bool half_loaded_states_ = false;
};

// The rules which call may follow which. One per engine, and of one thread: the one that made it, or has taken it over
// since.
class CallOrder {
 public:
  CallOrder() : CallOrder(Driver::kProgram, {}) {}
  CallOrder(Driver driver, AccumulationRule accumulation) : micro_batches(accumulation), driver_(driver) {}

  // Throws UsageError, naming the call, what is in its way and the call that is expected.
  void require(Call call) const;
  // Checks the part of require() that depends on the driver and the thread alone.
  void require_driver(Call call) const;
  // Checks load_checkpoint() with or without optimizer states.
  void require_load(bool with_states) const;
  // Lets calls come from this thread from now on. Throws UsageError where the other thread has a scope open.
  void use_from_this_thread();
  // Note that offload_states() has moved the model's states away, and that reload_states() has brought them back.
  void states_moved() { moved_ = true; }
  void states_returned() { moved_ = false; }

  // The history that the rules look at; a driver tells each part what has happened.
  MicroBatchCounter micro_batches;
  OpenScopes scopes;
  ModelConsistency consistency;

 private:
  std::thread::id thread_ = std::this_thread::get_id();
  Driver driver_;
  bool moved_ = false;
};

}  // namespace ds::engine
