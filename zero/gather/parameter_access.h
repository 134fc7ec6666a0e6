// The interface of what makes a parameter full before an operator reads it. The plan chooses one for the ZeRO stage.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace ds::zero {

// A bucket whose parameters the program has changed in place since take_changed() was called last, with a digest of
// their new values (zero/value_digest.h): the slices have these already.
struct ChangedBucket {
  size_t bucket = 0;
  std::string parameter;  // the name of one that was changed
  uint64_t digest = 0;
};

// All methods are called on the engine's thread, which runs the operators too, in the same order on every rank. A
// failure inside an operator (LibTorch only logs what its callbacks throw) is thrown by the next method called.
class ParameterAccess {
 public:
  virtual ~ParameterAccess() = default;
  // Called around every backward pass. `update_follows`: the parameters change before they are used again.
  virtual void begin_backward(bool update_follows) = 0;
  virtual void end_backward() = 0;
  // Called when a micro-batch is over: the next one will use what it used.
  virtual void end_pass() = 0;
  // Called in an update, when this rank's slice of `bucket` has its new values.
  virtual void updated(size_t bucket) = 0;
  // Called in place of updated() for a row-wise table, of which this rank has updated only these rows of its slice: [k]
  // int64, from the slice's first row. Collective over the ranks that share the bucket. Where it is sharded, its rows
  // stay with the rank that has updated them, as by updated().
  virtual void updated_rows(size_t bucket, const at::Tensor& /*rows*/) { updated(bucket); }
  virtual void end_update() = 0;
  // Called where a pass that does not belong to training begins or ends.
  virtual void change_mode() = 0;
  // Returns when no gather is under way.
  virtual void wait_all() = 0;
  // Makes this thread the engine's from now on. The other runs no operators meanwhile.
  virtual void use_from_this_thread() = 0;

  // The methods below concern parameters that are gathered for use; where all are full they do nothing.

  // Gives back the memory that is kept from one gather to the next. To be called between steps.
  virtual void release_memory() {}
  // Returns the most elements that were gathered at once since the last call.
  virtual int64_t take_peak_elements() { return 0; }
  // Releases the buckets that the program has changed in place, and returns its changes since the last call.
  virtual std::vector<ChangedBucket> take_changed() { return {}; }
  // Has `call` called before slices take over what the program has changed in place: somebody may read the slices on
  // another thread. Empty: no call.
  // NOLINTNEXTLINE(performance-unnecessary-value-param): the gatherer keeps it
  virtual void call_before_changes(std::function<void()> /*call*/) {}
};

}  // namespace ds::zero
