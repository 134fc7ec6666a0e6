// The interface of what makes a parameter full before an operator reads it. The plan chooses one for the ZeRO stage.
#pragma once

#include <cstddef>

namespace ds::zero {

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
  virtual void end_update() = 0;
  // Called where a pass that does not belong to training begins or ends.
  virtual void change_mode() = 0;
  // Returns when no gather is under way.
  virtual void wait_all() = 0;
  // Makes this thread the engine's from now on. The other runs no operators meanwhile.
  virtual void use_from_this_thread() = 0;
};

}  // namespace ds::zero
