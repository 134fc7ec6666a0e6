// Whether this thread computes a region of activation checkpointing again. What a forward pass changes beside its
// outputs has happened in the first run, and must not happen twice: who asks here leaves it out, as converted BatchNorm
// layers do. LibTorch's own do not ask, and move their running statistics twice, as in torch.
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
