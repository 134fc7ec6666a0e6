// The collectives of a group on one host, through its shared memory.
//
// Data goes through every rank's stage in chunks, double-buffered so that one synchronisation per chunk is enough: a
// rank fills its slot for chunk i, reads the others' chunk i - 1 (all_reduce: reduces its part of chunk i - 1, copies
// the other parts of chunk i - 2), publishes "step done" and waits until all ranks have. Whoever has published chunk i
// has finished with chunk i - 2, so three slots suffice, whatever kinds of collectives follow one another.
//
// Reductions add in rank order 0 .. W-1 and never split an element's sum, so results do not depend on chunks or timing,
// and all_reduce equals reduce_scatter followed by all_gather bit for bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "comm/collective.h"
#include "comm/shared_memory/shared_memory_layout.h"
#include "comm/shared_memory/shared_memory_peers.h"
#include "dsengine/comm.h"

namespace ds::comm {

// Returns the record by which this rank announces a collective; its sequence is 0.
OperationRecord record_of(const Collective& collective, int size);

// One rank's side. All calls from one thread at a time.
class SharedMemoryCollectives {
 public:
  SharedMemoryCollectives(GroupMemory& memory, SharedMemoryPeers& peers, int rank);

  // Runs one collective (not send, recv) to its end. `record` is record_of() it. Throws CommError: a peer is missing,
  // has failed, or issued another collective; the group cannot be used afterwards.
  void run(const Collective& collective, OperationRecord record);

 private:
  // fill(i) writes chunk i to stage(rank_, i), consume(i) reads stage(any, i).
  using Chunk = std::function<void(int64_t chunk)>;

  void two_stages(int64_t chunks, const Chunk& fill, const Chunk& consume);
  void begin(OperationRecord record);
  void synchronize();
  void require_agreement() const;
  std::byte* stage(int rank, int64_t chunk) const { return memory_.stage(rank, chunk_ + static_cast<uint64_t>(chunk)); }

  void barrier();
  void broadcast(std::byte* data, int64_t bytes, int root);
  // root -1: every rank gathers
  void gather(std::byte* output, const std::byte* input, int64_t bytes, int root);
  void scatter(std::byte* output, const std::byte* input, int64_t bytes, int root);
  void reduce_scatter(std::byte* output, const std::byte* input, int64_t count, at::ScalarType dtype, ReduceOp op);
  // root -1: every rank gets the result
  void all_reduce(std::byte* data, int64_t count, at::ScalarType dtype, ReduceOp op, int root);
  void all_reduce_small(std::byte* data, int64_t count, at::ScalarType dtype, ReduceOp op, int root);
  void all_to_all(const Collective& collective);

  struct Arithmetic {
    at::ScalarType dtype;
    ReduceOp op;
  };
  // Reduces `count` elements at `own` with the peers' chunks at `offset`, into destination.
  void reduce_chunk(std::byte* destination, const std::byte* own, int64_t chunk, int64_t offset, int64_t count,
                    Arithmetic arithmetic);

  GroupMemory& memory_;
  SharedMemoryPeers& peers_;
  const int rank_;
  const int size_;
  uint64_t sequence_ = 0;
  uint64_t chunk_ = 0;  // chunks of all collectives so far
  uint32_t step_ = 0;   // steps published
  bool agreed_ = false;
  OperationRecord record_{};
  std::vector<const void*> sources_;
};

}  // namespace ds::comm
