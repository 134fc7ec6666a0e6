// Whether the ranks of a group issue the same collectives: a hash of the sequence so far, equal on all ranks that keep
// to it. Torch-free.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "comm/flight/flight_log.h"

namespace ds::comm {

// Mixes a number or a text into a hash, which is for comparing only.
uint64_t mix(uint64_t hash, uint64_t value);
uint64_t mix(uint64_t hash, const std::string& text);

// Adds a collective with this signature to the group's sequence. Keeps position, contract and marks.
void extend_contract(FlightGroup& group, uint64_t signature);

// Two ranks of a group whose sequences differ.
struct ContractBreach {
  int rank = 0, other = 0;  // numbers in the world; `other` is with the most ranks
  std::string group;
  uint64_t before = 0;  // the lowest position at which they are known to differ
};

// Compares each group's marks over the ranks that are in it.
std::optional<ContractBreach> find_breach(const std::vector<FlightLog>& logs);

// The first position of a group at which two logs hold different collectives, with both sides; where the rings have
// forgotten it, says so. Empty where none differs.
std::string first_difference(const std::vector<FlightLog>& logs);

}  // namespace ds::comm
