// What a rank is doing, for reports of a stall: the one place that tells the flight recorder.
#pragma once

#include <memory>
#include <utility>

#include "comm/flight/flight_watch.h"
#include "engine/order/call_order.h"
#include "engine/state/progress.h"

namespace ds::engine {

// On the engine's thread. Keeps the watch as long as it lives itself.
class Phases {
 public:
  static constexpr const char* kBetweenCalls = "the program (data, forward)";

  // Both outlive it.
  Phases(const Progress& progress, const CallOrder& order) : progress_(progress), order_(order) {}
  void watch(std::shared_ptr<comm::FlightWatch> watch) { watch_ = std::move(watch); }  // null: nobody does

  // `phase` is a literal.
  void note(const char* phase) const {
    if (watch_) watch_->recorder().phase(phase, progress_.global_steps + 1, order_.micro_batches_done());
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
  std::shared_ptr<comm::FlightWatch> watch_;
  const Progress& progress_;
  const CallOrder& order_;
};

}  // namespace ds::engine
