// Finds where a backward pass that the program runs by itself (loss.backward()) begins and ends.
//
// Nobody announces such a pass, but its parts can be seen: the hooks of AccumulateGrad nodes, hooks on tensors,
// callbacks on operators. Each of them calls enter(), and the first one of a pass begins it: the work at the end of the
// pass is then queued with autograd (torch::autograd::Engine::queue_callback, as c10d's Reducer does), and runs when
// all gradients are there, before loss.backward() returns, which throws what it throws.
//
// Note [Passes inside a pass]
// A node may run backward() itself (activation checkpointing): what is made in there belongs to the pass around it.
// Autograd keeps such a pass as a graph task of its own, with its own callbacks, and does not say that there is one
// around it. The end of an inner task is known by the node that is being evaluated meanwhile; the end of the pass is
// then queued again, with the task around it, when the inner one is destroyed. Where autograd ends an inner task on
// another thread than the one that waits for it (nested more than 60 deep, or over devices of several kinds), it counts
// as a pass of its own.
//
// A task that failed is destroyed without its callbacks: so the pass is known to have been abandoned.
#pragma once

#include <functional>
#include <memory>
#include <mutex>

namespace ds::loops {

// The functions that are called at the ends of a pass. Each is called by the thread that autograd is on; never two at
// once.
struct PassEvents {
  // Called in the first enter() of a pass, before that returns. An exception ends the pass, and comes out of
  // backward().
  std::function<void()> begin;
  // Called when all gradients of the pass are there. An exception comes out of backward(), and `abandon` follows.
  std::function<void()> end;
  // Called in place of `end` or after it: `begin`, the pass or `end` threw. By the time backward() has thrown, where
  // autograd runs on the calling thread; else soon after. Does not throw.
  std::function<void()> abandon;
};

// The backward passes of one model. enter() may be called by several threads of autograd at once. It outlives no pass:
// destroyed in one, it hears nothing of its end.
class BackwardPass {
 public:
  explicit BackwardPass(PassEvents events);
  ~BackwardPass();
  BackwardPass(const BackwardPass&) = delete;
  BackwardPass& operator=(const BackwardPass&) = delete;

  // Begins the pass, where nobody has. To be called inside a backward pass only (a hook, a node's apply(), a callback
  // on an operator of either). Throws UsageError elsewhere.
  void enter();
  bool running() const;

 private:
  class Ticket;
  struct Shared;

  std::shared_ptr<Shared> shared_;
};

}  // namespace ds::loops
