// What a rank is doing, for reports of a stall and for traces: the one place that tells observers of the world group.
#pragma once

#include <memory>
#include <utility>

#include "config/order/call_order.h"
#include "dsengine/comm.h"
#include "model/state/progress.h"

namespace ds::engine {

// On the engine's thread. Keeps the group and who watches it as long as it lives itself.
class Phases {
 public:
  static constexpr const char* kBetweenCalls = "the program (data, forward)";

  // Both outlive it.
  Phases(const Progress& progress, const CallOrder& order) : progress_(progress), order_(order) {}
  void tell(std::shared_ptr<comm::Communicator> world) { world_ = std::move(world); }

  // `phase` is a literal.
  void note(const char* phase) const {
    if (world_) world_->note_phase(phase, progress_.global_steps + 1, order_.micro_batches_done());
  }

  // Says so from its construction on, and afterwards that the program has the word.
  class Scope {
   public:
    Scope(const Phases& phases, const char* phase) : phases_(phases) { phases_.note(phase); }
    ~Scope() { phases_.note(kBetweenCalls); }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    const Phases& phases_;
  };

 private:
  std::shared_ptr<comm::Communicator> world_;  // null before initialize has it
  const Progress& progress_;
  const CallOrder& order_;
};

}  // namespace ds::engine
