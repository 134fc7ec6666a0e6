// One operation between ranks as implementations, counters and recorders see it, and its state while it is under way.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/making_process.h"
#include "dsengine/comm.h"

namespace ds::comm {

// Told by an implementation when an operation has ended. Added to Collective::timers by an observer, before the
// operation is issued. An implementation that cannot tell calls neither: the end is then seen where somebody waits.
// Neither throws, but for what `order` throws.
class OperationTimer {
 public:
  virtual ~OperationTimer() = default;

  // Called when the host has carried the operation out without an error: before wait() returns, on any thread.
  virtual void ended() = 0;
  // Called on the issuing thread when a device carries the operation out: `order` puts the calling thread's current
  // stream behind it.
  // A backend then no longer holds tensors that nobody has waited for: whoever calls `order` holds those of the
  // operation until its wait(), or until the device has done it.
  virtual void issued(c10::function_ref<void()> order) = 0;
};

const char* name_of(CollectiveKind kind);
const char* name_of(ReduceOp op);

// The state of one operation under way.
class WorkState {
 public:
  virtual ~WorkState() = default;
  virtual bool is_completed() = 0;
  // Whether wait() would not wait for other ranks (it may still have local work). The call may start the next stage of
  // the operation.
  virtual bool is_ready() { return is_completed(); }
  // Returns when the operation has finished (CUDA: when the current stream is ordered after it). Throws CommError.
  virtual void wait() = 0;
};

// What a group shares with all groups that are made from it.
struct GroupFamily {
  std::atomic<int64_t> step{0};        // the engine's, as it was noted last; 0: none was
  std::atomic<const char*> phase{""};  // the phase that was noted last: "backward"; empty: none was
  MakingProcess process;               // has the threads that carry operations out
};

// One operation, as implementations, counters and recorders see it.
struct Collective {
  CollectiveKind kind = CollectiveKind::kBarrier;
  ReduceOp op = ReduceOp::kSum;
  at::Tensor input;                    // undefined where a rank gives nothing (scatter on non-roots, recv, barrier)
  at::Tensor output;                   // undefined where a rank receives nothing (gather on non-roots, send, barrier)
  int peer = 0;                        // root, destination or source: a rank of this group
  int tag = 0;                         // send and recv only
  std::vector<int64_t> input_splits;   // all_to_all with uneven splits along dimension 0; empty = even
  std::vector<int64_t> output_splits;  // uneven splits of the output
  int64_t step = 0;                    // number of the engine's step, from 1; 0: not known
  const char* phase = "";              // what the program does: GroupFamily::phase
  std::string label;                   // parameter or bucket it belongs to, the same on all ranks; in errors
  std::vector<std::shared_ptr<OperationTimer>> timers = {};
};

// Returns the bytes that an all_to_all sends to, or receives from, each of `size` ranks. `splits`: rows of dimension 0;
// empty: the same for all.
std::vector<int64_t> split_bytes(const at::Tensor& tensor, const std::vector<int64_t>& splits, int size);

// Tells the timers that the host has carried an operation out.
inline void tell_end(const std::vector<std::shared_ptr<OperationTimer>>& timers) {
  for (const std::shared_ptr<OperationTimer>& timer : timers) timer->ended();
}

}  // namespace ds::comm
