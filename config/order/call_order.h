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
  kSaveCheckpoint,
  kLoadCheckpoint,
  kOffloadStates,
  kReloadStates,
  kModelStateBytes,
};

// Who makes the micro-batches of a step: the program, call by call, or a schedule, a whole batch in one call; or there
// are no steps, without an optimizer.
enum class Driver { kProgram, kSchedule, kNobody };

struct AccumulationRule {
  int64_t micro_batches = 1;  // gradient_accumulation_steps
  bool counted = true;        // managed_gradient_accumulation; false: every step() is a boundary
};

// One per engine, and of one thread: the one that made it, or has taken it over since.
class CallOrder {
 public:
  CallOrder() = default;
  CallOrder(Driver driver, AccumulationRule accumulation) : driver_(driver), accumulation_(accumulation) {}

  // Throws UsageError, naming the call, what is in its way and the call that is expected.
  void require(Call call) const;
  // The part of it that depends on the driver and the thread alone.
  void require_driver(Call call) const;
  // Calls come from this thread from now on. Throws UsageError where a scope of the other one is open.
  void use_from_this_thread();
  // A scope of gathered_parameters() with or without a modifier rank.
  void require_scope(bool modifies) const;
  // load_checkpoint() with or without optimizer states.
  void require_load(bool with_states) const;

  // --- the running accumulation ------------------------------------------------------------------------------------
  int64_t micro_batches_done() const { return micro_batches_done_; }
  int64_t micro_batches_of_update() const { return accumulation_.micro_batches; }
  // The backward() calls whose samples are counted: where step() does not count them, each backward() is one.
  int64_t batches_done() const { return batches_done_; }
  bool awaits_step() const { return backwards_since_step_ > 0; }
  // No backward() of it has been.
  bool accumulation_begins() const { return backwards_since_step_ == 0 && micro_batches_done_ == 0; }
  void set_micro_batches_of_update(int64_t count) { accumulation_.micro_batches = count; }
  // In place of counting; nothing: counts again.
  void set_boundary(std::optional<bool> is_boundary) { boundary_ = is_boundary; }
  // Whether the running micro-batch is the last one before the update.
  bool at_boundary() const;
  // False: only step() tells, so that a backward pass cannot yet reduce for the boundary.
  bool boundary_is_known() const { return boundary_ || accumulation_.counted; }
  void backward_done() { ++backwards_since_step_; }
  int64_t backwards_since_step() const { return backwards_since_step_; }
  void micro_batch_done();
  // A schedule's, all at once.
  void micro_batches_done(int64_t count) { micro_batches_done_ = batches_done_ = count; }
  // The update begins, or the accumulation is dropped: returns the micro-batches it had.
  int64_t end_accumulation();
  int64_t drop_accumulation();

  // --- scopes ------------------------------------------------------------------------------------------------------
  // Throws UsageError inside another one.
  void begin_no_sync();
  void end_no_sync() { synchronize_ = true; }
  bool synchronizes() const { return synchronize_; }  // false inside no_sync()
  void scope_opened(bool modifies);
  void scope_closed(bool modifies);
  // Whether a pass at the boundary gives the last gradients of the step, with which masters may be changed at once: an
  // open scope may write to them when it ends.
  bool gives_last_gradients(bool boundary) const { return boundary && synchronize_ && scopes_ == 0; }

  // --- what the model has ------------------------------------------------------------------------------------------
  void states_moved() { moved_ = true; }  // offload_states()
  void states_returned() { moved_ = false; }
  // Some slices have an update that others do not have; now all have it.
  void slice_updated() { half_stepped_ = true; }
  void update_done() { half_stepped_ = false; }
  // Until load_done() weights are of two models; `with_states`: optimizer states too.
  void load_begins(bool with_states);
  void load_done();
  // A load or a step failed part of the way.
  bool is_mixture() const { return half_loaded_ || half_stepped_; }

 private:
  std::thread::id thread_ = std::this_thread::get_id();
  Driver driver_ = Driver::kProgram;
  AccumulationRule accumulation_;
  std::optional<bool> boundary_;
  int64_t backwards_since_step_ = 0;
  int64_t micro_batches_done_ = 0;
  int64_t batches_done_ = 0;
  bool synchronize_ = true;
  int scopes_ = 0;            // of gathered_parameters() that are open
  int read_only_scopes_ = 0;  // those of them without a modifier rank
  bool moved_ = false;
  bool half_stepped_ = false;
  bool half_loaded_ = false;
  bool half_loaded_states_ = false;
};

}  // namespace ds::engine
