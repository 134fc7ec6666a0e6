// The optimizer of a run, which engine::initialize returns: one interface for all optimizers, which update flat slices.
//
// A program reads and changes groups() between steps (a learning rate, say) and may look at states; the engine does the
// rest. The engine owns the optimizer together with the program.
//
// A slice is this rank's contiguous part of one bucket of parameters (or the whole bucket at stage 0): a flat tensor of
// master weights, a flat gradient of equal length, and a table that says which element belongs to which parameter.
// Optimizer states are flat tensors of the same length, owned by the optimizer and allocated with the slice. Not thread
// safe. Throws UsageError for slices and gradients that do not fit.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dsengine/lr_schedule.h"

namespace ds::optimizers {

struct Slice;      // what the engine hands to add_slice()
struct StepScale;  // what it multiplies the gradients of a step by

// Gives memory for a state of slice `index`: [numel] zeros of `dtype`, or an undefined tensor for the default.
using StateMemory = std::function<at::Tensor(int64_t index, int64_t numel, at::ScalarType dtype)>;

// States of the optimizer by name.
using NamedStates = std::vector<std::pair<std::string, at::Tensor>>;

// One slice's part of a step: gradient and copy as for update_into(); an undefined copy is not wanted.
struct SliceUpdate {
  int64_t index = 0;
  at::Tensor gradient;
  at::Tensor copy;
};

// The optimizer of the config on the slices of this rank. Programs change groups() and may read the rest.
class ShardOptimizer {
 public:
  virtual ~ShardOptimizer();

  // Learning rate and the like of each parameter group: changed on all ranks alike, they hold from the next step on.
  std::vector<GroupOptions>& groups() { return groups_; }
  const std::vector<GroupOptions>& groups() const { return groups_; }
  // Optimizer steps begun so far (bias correction uses it).
  int64_t step_count() const { return step_count_; }
  void set_step_count(int64_t count) { step_count_ = count; }

  // Where states live that are allocated from now on; by default beside their master.
  void set_state_memory(StateMemory memory) { state_memory_ = std::move(memory); }
  // The dtype of states that are allocated from now on; by default float32, or float64 for a float64 master. Updates
  // are in float32 in any case, and round what they store.
  void set_state_dtype(at::ScalarType dtype) { state_dtype_ = dtype; }
  // Takes a slice and allocates its states, zeroed; returns its index. Throws UsageError for a slice that is not flat,
  // contiguous and floating point, or whose group, segments or exchange do not fit.
  int64_t add_slice(Slice slice);
  int64_t slice_count() const;
  const Slice& slice(int64_t index) const;

  // Once per optimizer step, before the updates of all slices, which use the groups as they are now.
  void begin_step() {
    ++step_count_;
    step_groups_ = groups_;
    step_began();
  }
  // Whether the step that comes next takes this rank's own gradient of the whole bucket, which nobody has reduced, in
  // place of the slice of the mean over ranks.
  virtual bool wants_local_gradients() const { return false; }
  // Updates slice `index` with `gradient` ([n], any floating dtype; its contents may be overwritten) times
  // `gradient_scale` (loss scale and clipping folded into one factor).
  virtual void update(int64_t index, const at::Tensor& gradient, double gradient_scale) = 0;
  // update(), and the new weights in `copy` ([n], any floating dtype), which may be on another device than the master.
  virtual void update_into(int64_t index, const at::Tensor& gradient, double gradient_scale, const at::Tensor& copy);

  // update_into() of several slices, each once: one launch where kernels of a device take them.
  virtual void update_all(const std::vector<SliceUpdate>& slices, const StepScale& scale);
  // Whether all its slices are updated by kernels that read factor and skip of a StepScale on the device.
  virtual bool takes_device_scale() const { return false; }

  // What the model has of a slice after an update: the master, but for optimizers whose ranks step by themselves.
  virtual at::Tensor weights(int64_t index);
  // State tensors of a slice by name, for example {"exp_avg", t}, {"exp_avg_sq", t}; live references.
  virtual NamedStates states(int64_t index) = 0;
  // What else a checkpoint has to keep, by names that are not those of states(); live references. rank_states()
  // belong to this rank alone and may have any length. shared_states() are equal on all ranks, and their shape does not
  // depend on the number of ranks; one named "STATE/PARAMETER" belongs to one parameter and is stored with its other
  // states, other names have no '/'.
  virtual NamedStates rank_states() { return {}; }
  virtual NamedStates shared_states() { return {}; }
  // To be called when states and the step count were changed from outside. Without `rank_states` those are of another
  // run, and begin anew.
  virtual void states_changed(bool /*rank_states*/) {}
  // Bytes of state per element of a slice, in float32: Adam has 8.
  virtual int64_t state_bytes_per_element() const = 0;
  // Bytes of all states, counted from the tensors.
  int64_t state_bytes();
  // "AdamW", ...
  virtual std::string name() const = 0;
  // Whether beta1 and beta2 of the groups mean something to it (OneCycle drives them only then).
  virtual bool uses_betas() const { return false; }

 protected:
  explicit ShardOptimizer(std::vector<GroupOptions> groups);
  // Called by begin_step().
  virtual void step_began() {}
  // Allocates the states of slices_[index].
  virtual void allocate_states(int64_t index) = 0;
  // Zeros of the slice's length in the states' dtype, from the state memory.
  at::Tensor new_state(int64_t index) const;
  const GroupOptions& step_group(const Slice& slice) const;
  // Whether there are kernels of a device for all slices.
  bool kernels_take_all() const;
  // Whether all masters and states are float32.
  bool is_wide() const;
  // The slice, once update()'s arguments are checked. Throws UsageError.
  Slice& slice_for_update(int64_t index, const at::Tensor& gradient);

  std::vector<GroupOptions> groups_;
  std::vector<GroupOptions> step_groups_;  // the groups as the running step uses them
  std::vector<Slice> slices_;
  int64_t step_count_ = 0;
  StateMemory state_memory_;
  std::optional<at::ScalarType> state_dtype_;
};

}  // namespace ds::optimizers
