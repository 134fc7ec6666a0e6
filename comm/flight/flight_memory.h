// The memory of a flight recorder: a mapped file, which others can read while this process is stopped and after it is
// gone, or memory of this process alone. Torch-free.
#pragma once

#include <atomic>
#include <cstddef>
#include <string>

#include "comm/flight/flight_log.h"
#include "core/check.h"
#include "core/making_process.h"
#include "core/unique_fd.h"

namespace ds::comm {

// Another recorder, of this or of another process, writes to the file.
class FlightFileInUse : public IoError {
 public:
  using IoError::IoError;
};

// The memory of one recorder. A mapped file that somebody else cuts off ends this process with SIGBUS, so whoever
// writes to one holds a lock (flock) on it, and takes over only the file of a process that is gone. Where the file
// system has no locks, nobody is checked.
class FlightMemory {
 public:
  // Whether somebody writes to the file, by its lock. A file that cannot be looked at counts as in use.
  static bool is_in_use(const std::string& file);

  // The memory is zero at first. `file` empty: no file. Throws FlightFileInUse, and IoError when the file cannot be
  // made.
  FlightMemory(std::string file, size_t size);
  // Removes the file, and its folder when that is empty then, unless keep() was called.
  ~FlightMemory();
  FlightMemory(const FlightMemory&) = delete;
  FlightMemory& operator=(const FlightMemory&) = delete;

  // The record that lies in the memory: its header, kFlightGroups groups, and the ring of entries.
  FlightHeader& header() const { return *static_cast<FlightHeader*>(data_); }
  FlightGroup* groups() const {
    return reinterpret_cast<FlightGroup*>(static_cast<char*>(data_) + sizeof(FlightHeader));
  }
  FlightEntry* entries() const { return reinterpret_cast<FlightEntry*>(groups() + kFlightGroups); }
  void* data() const { return data_; }
  size_t size() const { return size_; }
  void keep() { keep_ = true; }

 private:
  const std::string file_;
  const size_t size_;
  UniqueFd descriptor_;  // holds the lock; none: no file
  void* data_ = nullptr;
  std::atomic<bool> keep_{false};
  MakingProcess process_;
};

}  // namespace ds::comm
