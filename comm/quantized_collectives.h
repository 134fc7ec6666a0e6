// Collectives that send 8-bit or 4-bit integers in place of floating point (core/numbers/block_codec.h): ZeRO++'s
// quantised all-gather of weights (qwZ) and all-to-all reduce-scatter of gradients (qgZ), Wang et al.,
// arXiv:2306.10209.
//
// Tensors are contiguous float32, bfloat16 or float16 on the communicators' device; input and output may differ in type
// and have any shape. 8 bits send 0.252 of the bytes of float32, 4 bits 0.127. A block with Inf or NaN arrives as NaN.
//
// Operations are asynchronous: the input has been read when the call returns (CUDA: in the order of the current
// stream), the output is written by wait() of the returned Work. wait() decodes, so it has to be called, on the thread
// that uses the communicators, and is_completed() is true after it; is_ready() begins the exchange between nodes. With
// CUDA, call both on one stream. Where wait() throws, the output's contents are unspecified.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

#include "core/numbers/block_codec.h"
#include "dsengine/comm.h"

namespace ds::comm {

// output has W times the elements of input; rank r's input lands, decoded, in the r-th part. That holds for the rank's
// own part too: all ranks get the same bits (of one output type). input may alias its own part of output. Holds
// encoded_bytes(input) x W of memory until wait() has returned. In a group of one rank it is an exact copy.
// Throws UsageError on tensors that do not fit.
Work quantized_all_gather(const at::Tensor& output, const at::Tensor& input, int bits, Communicator& communicator,
                          std::string label = {});

// The same where the part of each rank is encoded already: encoded is uint8 [encoded_bytes(n)] of the same n elements
// on every rank, output has W x n. With one rank it decodes too.
Work encoded_all_gather(const at::Tensor& output, const at::Tensor& encoded, int bits, Communicator& communicator,
                        std::string label = {});

// Reduce-scatter by all-to-all: each rank quantises the W parts of its input, sends part r to rank r, and adds what it
// received in float32, in rank order. With two levels, parts are added inside a node first, quantised again, and
// exchanged between nodes, so that only 1/L of the bytes crosses the network (L ranks in a node). One rank makes each
// part, so the result is the same in every run.
//
// Error of a value: the sum over ranks of half their block's scale; with two levels, further half of the scale of each
// node's sum. A level of one rank is left out and costs no precision; with one rank in all, the result is exact.
//
// Used from one thread. Copyable.
class QuantizedReducer {
 public:
  // Ranks are numbered node by node: rank = node * L + place. `inside` joins the L ranks of this node, in the order of
  // their places; `across` joins the ranks of this place in all nodes, in the order of nodes. Either may be null: one
  // level, over the other. Throws UsageError where both are, or bits is not 8 or 4.
  QuantizedReducer(std::shared_ptr<Communicator> inside, std::shared_ptr<Communicator> across, int bits);

  int size() const { return size_; }  // W
  int rank() const { return rank_; }
  const std::shared_ptr<Communicator>& inside() const { return inside_; }  // null where it would have one rank
  const std::shared_ptr<Communicator>& across() const { return across_; }  // likewise

  // output (n elements) becomes this rank's part of the kSum or kAvg of all inputs (W x n), in rank order, rounded to
  // output's type once. The first exchange starts at once, the second one in wait(): ranks must wait for their
  // operations in the same order, with respect to other uses of `across` too. output may alias input. Memory:
  // 2 encoded_bytes(input) until the first exchange ends, then (two levels) n float32 and 2 encoded_bytes(input) / L.
  Work reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op = ReduceOp::kSum,
                      std::string label = {}) const;

 private:
  std::shared_ptr<Communicator> inside_;  // null where it would have one rank
  std::shared_ptr<Communicator> across_;  // likewise
  BlockCodec codec_;
  int inside_size_;
  int across_size_;
  int rank_;
  int size_;
};

// A reducer over all ranks of `world`, whose ranks are numbered node by node. Every rank calls it: it makes groups, one
// per node and one per place. One level where ranks_per_node is 1 or all ranks. Throws UsageError where ranks_per_node
// does not divide the number of ranks.
QuantizedReducer make_quantized_reducer(const std::shared_ptr<Communicator>& world, int ranks_per_node, int bits);

}  // namespace ds::comm
