#include "loops/backward_pass.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <utility>

#include "core/check.h"
#include "core/log.h"
#include "core/without_stack.h"

namespace ds::loops {

// Outlives the BackwardPass where autograd still holds a ticket.
struct BackwardPass::Shared {
  std::mutex mutex;
  PassEvents events;
  bool running = false;
  bool gone = false;  // the BackwardPass is

  // The rest is called with the mutex held.
  void finish() {
    running = false;  // whatever end() does: a pass that threw is over too
    events.end();
  }
  void abandon() noexcept {
    running = false;
    try {
      events.abandon();
    } catch (const std::exception& error) {
      log::error("a backward pass that was abandoned: ", without_stack(error.what()));
    }
  }
};

// The object that autograd keeps with a graph task: called at its end, destroyed with it.
class BackwardPass::Ticket {
 public:
  explicit Ticket(std::shared_ptr<Shared> shared) : shared_(std::move(shared)) {}
  Ticket(const Ticket&) = delete;
  Ticket& operator=(const Ticket&) = delete;

  ~Ticket() {
    if (state_ == State::kEnded) return;
    const std::lock_guard lock(shared_->mutex);
    if (shared_->gone) return;
    if (state_ == State::kInner && hand_over()) return;
    shared_->abandon();
  }

  void task_ended() {
    if (torch::autograd::get_current_node() != nullptr) {
      state_ = State::kInner;
      return;
    }
    const std::lock_guard lock(shared_->mutex);
    if (shared_->gone) {
      state_ = State::kEnded;
      return;
    }
    shared_->finish();
    state_ = State::kEnded;
  }

  // Queues the callback at the end of the pass. Called with the mutex held.
  static void queue(const std::shared_ptr<Shared>& shared) {
    auto ticket = std::make_shared<Ticket>(shared);
    try {
      torch::autograd::Engine::get_default_engine().queue_callback([ticket] { ticket->task_ended(); });
    } catch (...) {
      ticket->state_ = State::kEnded;  // the caller abandons the pass; the ticket is not to, nor to take the mutex
      throw;
    }
  }

 private:
  enum class State { kQueued, kInner, kEnded };

  // Hands the pass over to the task around the one that is being destroyed.
  bool hand_over() noexcept {
    if (torch::autograd::get_current_graph_task_id() == -1) return false;
    try {
      queue(shared_);
      return true;
    } catch (const std::exception&) {
      return false;
    }
  }

  std::shared_ptr<Shared> shared_;
  State state_ = State::kQueued;
};

BackwardPass::BackwardPass(PassEvents events) : shared_(std::make_shared<Shared>()) {
  shared_->events = std::move(events);
}

BackwardPass::~BackwardPass() {
  const std::lock_guard lock(shared_->mutex);
  shared_->gone = true;
}

void BackwardPass::enter() {
  const std::lock_guard lock(shared_->mutex);
  if (shared_->running) return;
  require(torch::autograd::get_current_graph_task_id() != -1,
          "expected a gradient that autograd makes in backward(), found a hook that was called outside of one");
  shared_->running = true;
  try {
    shared_->events.begin();
    Ticket::queue(shared_);
  } catch (...) {
    shared_->abandon();
    throw;
  }
}

bool BackwardPass::running() const {
  const std::lock_guard lock(shared_->mutex);
  return shared_->running;
}

}  // namespace ds::loops
