// What the ranks of one stage send one another in a step: how many bytes, when, and for how long. Pure arithmetic,
// torch-free.
#pragma once

#include <cstdint>
#include <vector>

#include "tools/machine.h"
#include "zero/memory_model.h"

namespace ds::tool {

// Of a rank. What zero::predict_sent_bytes() adds up, apart.
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
DataParallelBytes split_sent_bytes(const zero::MemoryQuestion& question);

// Buckets of so many parameters, cut where the model's modules do not matter.
int64_t count_buckets(const zero::MemoryQuestion& question);

// What a collective of `seconds`, cut into equal buckets, adds to a computation of `window` seconds that makes its
// buckets one by one, or needs them one by one: the last bucket, or all that takes longer than the computation.
double exposed_seconds(double seconds, double window, int64_t buckets);

// Of a rank; seconds of each collective, which is a ring whose slowest member decides. A bucket takes a message from
// each member to the next, one after the other; an all-reduce two.
struct DataParallelCost {
  DataParallelBytes bytes;
  int64_t buckets = 1;
  double reduction = 0;
  double join = 0;
  double gather = 0;
  double gather_again = 0;
  double mean_gather() const;  // of all in a step
};

// Of each rank of a pipeline, on the `dp` x `tensor` consecutive ranks of the machine that have its place in theirs, of
// which `tensor` neighbours share layers; `questions` of each. Adds what leaves each node to `node_bytes`.
std::vector<DataParallelCost> time_collectives(const Machine& machine, int64_t dp, int64_t tensor,
                                               const std::vector<zero::MemoryQuestion>& questions,
                                               std::vector<int64_t>& node_bytes);

}  // namespace ds::tool
