// The collectives of gloo groups as direct exchanges of messages.
//
// gloo 2.11's own algorithms move 64 MiB between two ranks of one machine at 1.2 (all_reduce), 0.6 (reduce_scatter) and
// 0.7 GB/s (all_gather), refuse several data types and operations, and their order of summation depends on the ring
// position. Here every rank exchanges with every other directly: the same (optimal) number of bytes, 2 to 5 times the
// speed, any data type, and sums in rank order, so a result depends on the inputs alone and equals that of the
// shared-memory communicator bit for bit.
//
// Large operations run in chunks: while a chunk is being reduced the next ones are on the way, so the staging memory is
// (kWindow x kChunkBytes) per peer whatever the size of the tensor. All functions block, and throw CommError.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "comm/gloo/gloo_wire.h"
#include "comm/operation_name.h"
#include "dsengine/comm.h"

namespace ds::comm {

class GlooExchange {
 public:
  static constexpr int64_t kChunkBytes = 1 << 20;
  static constexpr int kWindow = 3;
  // Up to this size all_reduce sends whole tensors to everyone: one message delay instead of two.
  static constexpr int64_t kSmallBytes = 16 << 10;

  explicit GlooExchange(GlooWire& wire) : wire_(wire) {}

  // Names the operation in errors and keeps its messages apart from those of others: every rank must pass the same tag
  // (in [0, 2^29)).
  void begin(OperationName operation, int tag);

  // Forgets, after an exception, the messages still under way, so that nothing writes into the caller's memory any
  // more.
  void abandon() { posted_.clear(); }

  // Sizes are in bytes and multiples of the element size; pointers are host memory.
  void all_gather(std::byte* output, const std::byte* input, int64_t bytes);
  void gather(std::byte* output, const std::byte* input, int64_t bytes, int root);
  void scatter(std::byte* output, const std::byte* input, int64_t bytes, int root);
  void broadcast(std::byte* data, int64_t bytes, int root);
  void all_to_all(std::byte* output, const std::byte* input, const std::vector<int64_t>& output_bytes,
                  const std::vector<int64_t>& input_bytes);
  void barrier();

  // Counts are elements. output may be the own part of input.
  void reduce_scatter(std::byte* output, const std::byte* input, int64_t count, at::ScalarType dtype, ReduceOp op);
  void all_reduce(std::byte* data, int64_t count, at::ScalarType dtype, ReduceOp op);
  // Leaves data as it was on ranks other than root.
  void reduce(std::byte* data, int64_t count, at::ScalarType dtype, ReduceOp op, int root);

 private:
  // One rank's share of a reduction: bytes [begin, begin + length) of the whole tensor.
  struct Slice {
    int64_t begin = 0;
    int64_t length = 0;
  };
  struct Reduction {
    const std::byte* input = nullptr;  // whole tensor
    std::byte* output = nullptr;       // own slice
    std::byte* gathered = nullptr;     // whole tensor: also send the own result to all; nullptr = do not
    std::vector<Slice> slices;         // one for each rank
    at::ScalarType dtype = at::kFloat;
    ReduceOp op = ReduceOp::kSum;
  };
  void reduce_slices(const Reduction& reduction);
  void all_reduce_small(std::byte* data, int64_t count, at::ScalarType dtype, ReduceOp op);
  std::vector<Slice> even_slices(int64_t count, int64_t element_bytes) const;

  void send(const std::byte* data, int64_t bytes, int peer, int phase = 0);
  void recv(std::byte* data, int64_t bytes, int peer, int phase = 0);
  void complete_all();
  std::byte* staging(int64_t bytes);

  GlooWire& wire_;
  std::optional<OperationName> operation_;  // the one given to begin()
  int tag_ = 0;
  std::vector<GlooWire::Message> posted_;
  std::vector<std::byte> staging_;
};

}  // namespace ds::comm
