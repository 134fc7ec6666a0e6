// torch_autocast: operators of forward run in a lower precision where that is safe (torch.amp.autocast).
//
// Autocast is a state of the calling thread. The engine turns it on for the thread that made it, so that the program
// calls its model as always, off while it runs backward and the optimizer, and drops the casted weights after each
// backward: they belong to the old parameters.
//
// Engines of one thread share that state: what the one made last has is in force until it ends, in whatever order
// engines end. When they differ in it, a warning says so at the first backward or step of one of them, not before: one
// that is assigned over another lives beside it for a moment.
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

namespace ds::engine {

// Sets autocast while it lives, then restores what was before. Made by the thread that runs forward. Destroyed on
// another thread, it stays in force until an engine of its thread is made, ends, or runs backward or step there, and a
// warning says so.
class Autocast {
 public:
  // Without `dtype` autocast is off if another engine has turned it on; what the program has turned on by itself stays
  // on.
  Autocast(c10::DeviceType device, std::optional<c10::ScalarType> dtype);
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

  // Puts it in force on this thread from now on; on the thread before, things are as after the destructor.
  void use_from_this_thread();

  // Turns autocast off while the guard lives, whoever turned it on, and drops the casted weights of before.
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
  struct Thread;

  void begin();
  void end();

  c10::DeviceType device_;
  std::optional<c10::ScalarType> dtype_;
  std::shared_ptr<Thread> thread_;  // the state of the owning thread
};

// Returns the class of a module, "torch::nn::Linear" for a torch::nn::LinearImpl: without "Impl", which holders do not
// have, and without
// "(anonymous namespace)::".
std::string class_of(const torch::nn::Module& module);

// Returns the identities of the tensors that modules of these classes hold, not those of modules inside them or of
// derived classes: torch_autocast.lower_precision_safe_modules. Names are C++'s ("torch::nn::Linear", "my::Layer"),
// Python's ("torch.nn.Linear", "torch.nn.modules.linear.Linear"), or without a namespace. Throws ConfigError, with the
// classes found, for a name that is neither the class of a module nor a layer of LibTorch, with `key` before it.
std::unordered_set<const void*> tensors_of_classes(const torch::nn::Module& module,
                                                   const std::vector<std::string>& names, const std::string& key);

}  // namespace ds::engine
