// torch_autocast: operators of forward run in a lower precision where that is safe (torch.amp.autocast).
//
// Autocast is a state of the calling thread. The engine turns it on for the thread that made it, so that the program
// calls its model as always, off while it runs backward and the optimizer, and drops the casted weights after each
// backward: they belong to the old parameters.
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

namespace ds::engine {

// On while it lives. Made and destroyed by one thread, the one that runs forward.
class Autocast {
 public:
  Autocast(c10::DeviceType device, c10::ScalarType dtype);
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

  // Off while the guard lives, whoever turned it on.
  class Pause {
   public:
    explicit Pause(c10::DeviceType device);
    ~Pause();
    Pause(const Pause&) = delete;
    Pause& operator=(const Pause&) = delete;

   private:
    c10::DeviceType device_;
    bool enabled_before_;
  };

 private:
  c10::DeviceType device_;
  c10::ScalarType dtype_before_;
  bool enabled_before_;
};

}  // namespace ds::engine
