// One operation between ranks as implementations, counters and recorders see it, and its state while it is under way.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/operation_timer.h"
#include "dsengine/comm.h"

namespace ds::comm {

const char* name_of(CollectiveKind kind);
const char* name_of(ReduceOp op);

// What an implementation tracks of one operation under way.
class WorkState {
 public:
  virtual ~WorkState() = default;
  virtual bool is_completed() = 0;
  // wait() would not wait for other ranks (but may have work to do). May itself begin what follows.
  virtual bool is_ready() { return is_completed(); }
  // Returns when the operation has finished (CUDA: when the current stream is ordered after it). Throws CommError.
  virtual void wait() = 0;
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
  std::vector<int64_t> output_splits;  // likewise
  int64_t step = 0;                    // of the engine, from 1; 0: not known
  std::string label;                   // parameter or bucket it belongs to, the same on all ranks; in errors
  std::vector<std::shared_ptr<OperationTimer>> timers = {};
};

// The host has carried it out.
inline void tell_end(const std::vector<std::shared_ptr<OperationTimer>>& timers) {
  for (const std::shared_ptr<OperationTimer>& timer : timers) timer->ended();
}

}  // namespace ds::comm
