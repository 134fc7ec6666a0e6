// Who sees to it that a parameter is whole when an operator reads it. The plan chooses one for the ZeRO stage.
#pragma once

#include <cstddef>

namespace ds::zero {

// All methods on the engine's thread, which runs the operators too, in the same order on every rank. What an operator
// met on its way (LibTorch only logs what its callbacks throw) is thrown by the next of them.
class ParameterAccess {
 public:
  virtual ~ParameterAccess() = default;
  // Around every backward pass. `update_follows`: the parameters change before they are used again.
  virtual void begin_backward(bool update_follows) = 0;
  virtual void end_backward() = 0;
  // The micro-batch is over: what it used is what the next one will use.
  virtual void end_pass() = 0;
  // In an update: this rank's slice of `bucket` has its new values.
  virtual void updated(size_t bucket) = 0;
  virtual void end_update() = 0;
  // A pass that does not belong to training begins or ends.
  virtual void change_mode() = 0;
  // Returns when nothing is on its way.
  virtual void wait_all() = 0;
  // The engine has another thread from now on: this one. The other runs no operators meanwhile.
  virtual void use_from_this_thread() = 0;
};

}  // namespace ds::zero
