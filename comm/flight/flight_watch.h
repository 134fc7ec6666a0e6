// Notices when ranks wait for each other in vain, and says which one is to blame.
//
// A side channel beside the collectives: every rank sends a short board (where it is in each group, what it waits for,
// what it does) to the store of the rendezvous about once a second, from a thread of its own, so that a rank that
// computes for long is told from one that is gone. Rank 0 compares the boards. When a rank waits longer than the limit,
// or sequences of collectives differ (contract.h), it asks all ranks for their whole record and the stack of their main
// thread, writes them to a folder, and logs one sentence. Where waiting cannot help (a rank is dead or has ended, ranks
// wait in a circle, or issued different collectives) all ranks then end: their next collective throws CommError with
// that sentence, and a process that still hangs kGrace later ends with kExitCode. A rank that is merely late is waited
// for, until the time limit of the operation itself.
//
// Where rank 0 itself, and with it the store, does not answer, the first other rank of each host says so. Once rank 0
// has ended in good order, only ranks that wait for rank 0 end; others warn.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "comm/flight/flight_recorder.h"
#include "comm/meeting/rendezvous.h"
#include "dsengine/comm.h"

namespace ds::comm {

class FlightWatch {
 public:
  static constexpr std::chrono::seconds kGrace{3};
  static constexpr int kExitCode = 124;  // the exit code of timeout(1)

  // Called on the thread that issues collectives; world_size > 1. The communicator is that of the rendezvous.
  FlightWatch(const Rendezvous& meeting, Communicator& world, const FlightWatchOptions& options);
  // The rank ends in good order, unless an exception is under way. Waits two seconds at most, in good order.
  ~FlightWatch();
  FlightWatch(const FlightWatch&) = delete;
  FlightWatch& operator=(const FlightWatch&) = delete;

  FlightRecorder& recorder() { return *recorder_; }
  // Stops recording, comparing and reporting; called on all ranks. Waits two seconds at most.
  void stop();
  void set_stall_limit(std::chrono::milliseconds limit);
  void set_end_process(bool end_process);

 private:
  struct State;
  class Judge;
  class Talk;
  class Guard;
  c10::intrusive_ptr<c10d::Store> meeting_;  // rank 0's serves the others
  std::shared_ptr<FlightRecorder> recorder_;
  std::shared_ptr<State> state_;  // null: nobody watches
};

// Attaches a recorder to the world's communicator, and a watch, which lives as long as that: Communicator::watch().
// Does nothing with one rank.
void watch_flight(const Rendezvous& meeting, Communicator& world, const FlightWatchOptions& options = {});

}  // namespace ds::comm
