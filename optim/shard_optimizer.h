// SliceOptimizer: what the engine sees of an optimizer, whose handle for programs is ShardOptimizer
// (dsengine/optimizer.h). It updates flat slices of buckets.
//
// A slice is this rank's contiguous part of one bucket of parameters (or the whole bucket at stage 0): a flat tensor of
// master weights, a flat gradient of equal length, and a table that says which element belongs to which parameter.
// Optimizer states are flat tensors of the same length, owned by the optimizer and allocated with the slice. Not thread
// safe. Throws UsageError for slices and gradients that do not fit.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "core/slices/segment.h"
#include "dsengine/optimizer.h"

namespace ds::optimizers {

struct StepScale;  // what a step multiplies its gradients by

// How the slices of one bucket meet across ranks. Implemented by zero on top of a communicator; size 1 needs no peers.
class SliceExchange {
 public:
  virtual ~SliceExchange() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Adds `values` up in place over the ranks that hold the bucket's slices or, where the bucket has parts of split
  // parameters, the other parts. Blocking.
  virtual void sum(const at::Tensor& values) = 0;
  // Joins the slices [n] of all ranks to [size * n]. Blocking.
  virtual at::Tensor all_gather(const at::Tensor& slice) = 0;
};

// How the parts of a split parameter meet, one of which each rank of a tensor axis has. `parameter` is its index.
class PartExchange {
 public:
  virtual ~PartExchange() = default;
  // Returns the full parameter in new memory, from each rank's part, which has the part's shape. Blocking.
  virtual at::Tensor whole(int64_t parameter, const at::Tensor& part) = 0;
  // Returns this rank's part of the full parameter.
  virtual at::Tensor part(int64_t parameter, const at::Tensor& whole) const = 0;
};

// A slice as the optimizer keeps it. `segments` index `parameters`.
struct Slice {
  at::Tensor master;                     // [n] float32 (or the parameters' dtype), updated in place
  int group = 0;                         // index into groups()
  int64_t bucket_offset = 0;             // first element of the slice inside its bucket
  std::vector<Segment> segments;         // the pieces of parameters in this slice
  std::vector<Segment> bucket_segments;  // the pieces in the whole bucket (slice_offset: inside the bucket)
  const std::vector<ParameterInfo>* parameters = nullptr;  // outlives the optimizer
  std::shared_ptr<SliceExchange> exchange;                 // never null
  std::shared_ptr<PartExchange> parts = nullptr;           // null: the bucket's parameters are not split
  int64_t row_width = 0;  // above 0: the slice is rows of so many elements of a row-wise table (RowOptimizer)
};

// Gives memory for a state of slice `index`: [numel] zeros of `dtype`, or an undefined tensor for the default, which is
// memory beside the master.
using StateMemory = std::function<at::Tensor(int64_t index, int64_t numel, at::ScalarType dtype)>;

// Returns zeros of the length of the slice that is being added, in the dtype of states.
using NewState = std::function<at::Tensor()>;

// The slices that an optimizer updates by kernels of a device: none, those whose master and states are float32, or
// those of every type that kernels know.
enum class DeviceKernels : uint8_t { kNone, kFloat32, kAllTypes };

// The properties of an optimizer that do not depend on its slices.
struct OptimizerTraits {
  int64_t state_bytes_per_element = 0;  // the bytes of state per element of a slice, in float32: Adam has 8
  bool uses_betas = false;              // beta1 and beta2 of the groups have an effect (OneCycle drives them only then)
  DeviceKernels device_kernels = DeviceKernels::kNone;
};

// The update of one slice in a step: gradient and copy as for update_into(); an undefined copy is not wanted.
struct SliceUpdate {
  int64_t index = 0;
  at::Tensor gradient;
  at::Tensor copy;
};

// An optimizer on the slices of this rank: the base of Adam, Lamb, Muon, ...
class SliceOptimizer : public ShardOptimizer {
 public:
  ~SliceOptimizer() override;

  virtual OptimizerTraits traits() const = 0;

  void set_step_count(int64_t count) { step_count_ = count; }

  // The dtype of states that are allocated from now on; by default float32, or float64 for a float64 master. Updates
  // are in float32 in any case, and round what they store.
  void set_state_dtype(at::ScalarType dtype) { state_dtype_ = dtype; }
  // Takes a slice and allocates its states, zeroed, in `state_memory`; returns its index. Throws UsageError for a slice
  // that is not flat, contiguous and floating point, or whose group, segments or exchange do not fit.
  int64_t add_slice(Slice slice, const StateMemory& state_memory = {});
  int64_t slice_count() const final;
  const Slice& slice(int64_t index) const;

  // Begins an optimizer step; called once, before the updates of all slices, which use the groups as they are now.
  // Throws UsageError, with nothing changed, for a group of row-wise tables that has a momentum or weight decay by now.
  virtual void begin_step();
  // Whether the step that comes next takes this rank's own gradient of the whole bucket, which nobody has reduced, in
  // place of the slice of the mean over ranks.
  virtual bool wants_local_gradients() const { return false; }
  // Updates slice `index` with `gradient` ([n], any floating dtype; its contents may be overwritten) times
  // `gradient_scale` (loss scale and clipping folded into one factor).
  virtual void update(int64_t index, const at::Tensor& gradient, double gradient_scale) = 0;
  // Does update() and writes the new weights to `copy` ([n], any floating dtype), which may be on another device than
  // the master.
  virtual void update_into(int64_t index, const at::Tensor& gradient, double gradient_scale, const at::Tensor& copy);
  // Does update_into() for several slices, each once: one launch where kernels of a device take them.
  virtual void update_all(const std::vector<SliceUpdate>& slices, const StepScale& scale);
  // Whether all its slices are updated by kernels that read factor and skip of a StepScale on the device.
  bool takes_device_scale() const;

  // The weights that the model has of a slice after an update: the master, but for optimizers whose ranks step by
  // themselves.
  virtual at::Tensor weights(int64_t index);
  // Both return what a checkpoint has to keep beside states(), under other names; they share memory with the optimizer.
  // rank_states() belong to this rank alone and may have any length. shared_states() are equal on all ranks, and their
  // shape does not depend on the number of ranks; one named "STATE/PARAMETER" belongs to one parameter and is stored
  // with its other states, other names have no '/'.
  virtual NamedStates rank_states() { return {}; }
  virtual NamedStates shared_states() { return {}; }
  // To be called when states and the step count were changed from outside. Without `rank_states` the states of this
  // rank are of another run, and begin anew.
  virtual void states_changed(bool /*rank_states*/) {}
  int64_t state_bytes() final;

 protected:
  explicit SliceOptimizer(std::vector<GroupOptions> groups);
  // Makes the states of slices_[index] with `new_state`.
  virtual void allocate_states(int64_t index, const NewState& new_state) = 0;
  // The options of the slice's group as the running step uses them.
  const GroupOptions& step_group(const Slice& slice) const;
  // Returns the slice, once update()'s arguments are checked. Throws UsageError.
  Slice& slice_for_update(int64_t index, const at::Tensor& gradient);

  std::vector<GroupOptions> step_groups_;  // the groups as the running step uses them
  std::vector<Slice> slices_;
  std::optional<at::ScalarType> state_dtype_;
};

// An optimizer whose update writes the new weights into the copy by itself, where one is wanted.
class CopyingOptimizer : public SliceOptimizer {
 public:
  void update(int64_t index, const at::Tensor& gradient, double gradient_scale) final {
    update_into(index, gradient, gradient_scale, /*copy=*/{});
  }
  void update_into(int64_t index, const at::Tensor& gradient, double gradient_scale,
                   const at::Tensor& copy) override = 0;

 protected:
  using SliceOptimizer::SliceOptimizer;
};

}  // namespace ds::optimizers
