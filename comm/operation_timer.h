// Who wants to know when an operation has ended, told by the implementation that carries it out.
#pragma once

#include <c10/util/FunctionRef.h>

namespace ds::comm {

// Added to Collective::timers by an observer, before the operation is issued. An implementation that cannot tell calls
// neither: the end is then seen where somebody waits. Neither throws, but for what `order` throws.
class OperationTimer {
 public:
  virtual ~OperationTimer() = default;

  // The host has carried it out, without an error: before wait() returns, on whatever thread that was.
  virtual void ended() = 0;
  // A device carries it out: `order` puts the calling thread's current stream behind it. On the thread that issues it.
  // A backend then no longer holds tensors that nobody has waited for: whoever calls `order` holds those of the
  // operation until its wait(), or until the device has done it.
  virtual void issued(c10::function_ref<void()> order) = 0;
};

}  // namespace ds::comm
