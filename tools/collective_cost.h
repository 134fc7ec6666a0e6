// Collectives of the ranks of one pipeline stage in a step: how many bytes they send, when, and for how long.
// Collectives along the data-parallel axis come first, those along the tensor axis after them. Pure arithmetic,
// torch-free.
#pragma once

#include <cstdint>
#include <vector>

#include "pipeline/schedule/schedule_timing.h"
#include "tools/machine.h"
#include "tools/model_cost.h"
#include "zero/memory_model.h"

namespace ds::tool {

// Bytes that a rank sends along the data-parallel axis: the summands of zero::predict_sent_bytes().
struct DataParallelBytes {
  int64_t reduction = 0;     // of all gradients once
  bool in_passes = false;    // stages 2 and 3: reductions in every backward, not at the end
  int64_t join = 0;          // between copies of the model state, at the end of a step
  int64_t gather = 0;        // of parameters, the first time in a step
  int64_t gather_again = 0;  // stage 3: each time after it
  int64_t reductions = 1;    // in a step
  int64_t gathers = 1;       // in a step, with the first one

  int64_t total() const { return reductions * reduction + join + gather + (gathers - 1) * gather_again; }
};
// The summands of the bytes that the rank in question sends.
DataParallelBytes split_sent_bytes(const zero::MemoryQuestion& question);

// The number of buckets, as if they were cut without regard to the bounds of modules.
int64_t count_buckets(const zero::MemoryQuestion& question);

// The seconds that a collective of `seconds`, cut into equal buckets, adds to a computation of `window` seconds that
// makes its buckets one by one, or needs them one by one: the last bucket, or all that takes longer than the
// computation.
double exposed_seconds(double seconds, double window, int64_t buckets);

// Bytes that a rank sends and seconds of each of its collectives. A collective is a ring, and takes as long as its
// slowest member; a bucket takes one message from each member to the next, one after the other, in an all-reduce two.
struct DataParallelCost {
  DataParallelBytes bytes;
  int64_t buckets = 1;
  double reduction = 0;
  double join = 0;
  double gather = 0;
  double gather_again = 0;
  double mean_gather() const;  // over all gathers of a step
};

// Times the data-parallel collectives of each rank of a pipeline; `questions` has one entry for each. A place in the
// pipeline is held by `dp` x `tensor` consecutive ranks of the machine, of which `tensor` neighbours share layers. Adds
// the bytes that leave each node to `node_bytes`.
std::vector<DataParallelCost> time_collectives(const Machine& machine, int64_t dp, int64_t tensor,
                                               const std::vector<zero::MemoryQuestion>& questions,
                                               std::vector<int64_t>& node_bytes);

// All-reduces along the tensor axis for one stage and one micro-batch: their number and the bytes that a rank sends.
struct StageSums {
  double forward_bytes = 0;
  double backward_bytes = 0;
  int forward_count = 0;
  int backward_count = 0;
};

// The all-reduces of layers [begin, end). With `recomputed`, backward repeats those of forward.
StageSums sums_of(std::vector<LayerCost>::const_iterator begin, std::vector<LayerCost>::const_iterator end,
                  int64_t tensor, bool recomputed);

// Bytes a second of the slowest ring when all rings of `tensor` neighbours send at once. `tensor` divides the ranks of
// `machine`.
double tensor_rate(const Machine& machine, int64_t tensor);

// Seconds of an all-gather of each tensor axis, for which a rank sends `bytes` in all.
double seconds_of_gather(double bytes, const Machine& machine, int64_t tensor);

// Seconds that forward and the first half of backward wait for their all-reduces. `beside`: seconds of the products of
// weights, beside which the all-reduces of backward run; 0: they run beside nothing.
pipeline::StageTimes seconds_of(const StageSums& sums, const Machine& machine, int64_t tensor, double beside);

}  // namespace ds::tool
