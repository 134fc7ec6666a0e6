// What the ranks of a model should have alike, tensor by tensor, and over which ranks: the list that check_replicas
// compares (engine/update/replica_watch.h).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "dsengine/comm.h"
#include "model/state/model_state.h"

namespace ds::engine {

// A tensor, or a run of elements of one, that the ranks of a group should have alike.
struct ReplicatedValue {
  std::string name;   // for a sentence: "h.0.weight", "the master of h.0.weight"
  at::Tensor values;  // shares memory with the model; generators are copies on the host
  // Whether each rank computes the values by itself, from numbers that the ranks have alike. Else they are sent, or
  // nobody changes them.
  bool computed = false;
  bool counts = true;            // false: what this rank has is not compared
  const char* advice = nullptr;  // what may have parted the ranks, and what to change; null: the general causes
};

// The values that the ranks of one group should have alike.
struct ReplicatedValues {
  comm::Communicator* ranks = nullptr;
  const char* among = "";  // "data-parallel ranks"
  // Whether gradients are computed by each rank as well, so that kernels that add in another order part the ranks.
  bool same_batches = false;
  std::vector<ReplicatedValue> values;
};

// The default generators of the host and of a device, of which ranks that train on the same batches draw alike.
class WatchedGenerators {
 public:
  // Returns the states of the generators. One counts where this rank has drawn from it since the last call: a program
  // may seed the ranks otherwise, or draw on one rank alone, where nothing else draws. Does not wait for the device.
  std::vector<ReplicatedValue> look(c10::Device device);
  // Lets the next look() begin anew, in which none counts.
  void forget() { last_.clear(); }
  bool begun() const { return !last_.empty(); }

 private:
  std::vector<at::Tensor> last_;
};

// Returns the groups of this rank that have something to compare, in an order that all ranks of each group have.
// `buffers_shared`: broadcast_buffers has given all data-parallel ranks the buffers of one. Generators are not among
// them.
std::vector<ReplicatedValues> replicated_values(const ModelState& state, bool buffers_shared);

// A name for each 16-bit parameter whose master is in memory, and int64 [] on the parameter's device: 1 where an
// element is not its master, rounded, else 0. Does not wait for the device.
std::vector<std::pair<std::string, at::Tensor>> compared_with_masters(const ModelState& state);

}  // namespace ds::engine
