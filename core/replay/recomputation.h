// Tells whether this thread computes a region of activation checkpointing again. Changes of a forward pass beside its
// outputs have happened in the first run, and must not happen twice: code that makes such a change asks here and leaves
// it out, as converted BatchNorm layers do. LibTorch's own do not ask, and move their running statistics twice, as in
// torch.
#pragma once

namespace ds {

class Recomputation {
 public:
  // Marks this thread as computing again while it lives; scopes nest.
  class Scope {
   public:
    Scope();
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
  };

  static bool is_running();
};

}  // namespace ds
