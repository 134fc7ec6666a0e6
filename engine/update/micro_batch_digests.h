// Whether the first and the last stage of a pipeline took the same micro-batches. Each asks a source of its own: where
// one draws random numbers, the inputs of the one and the labels of the other belong to different draws, and nothing
// else would tell.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <optional>
#include <vector>

#include "dsengine/comm.h"
#include "dsengine/pipeline.h"

namespace ds::engine {

// The digests of one batch that this rank took. Ranks add them up with numbers that they exchange anyway. What one of
// the two stages leaves out, such as labels on the first one, is not compared; nor are inputs where labels are, since a
// dataset may draw noise for the inputs, of which the last stage reads none. Values that are floating-point numbers
// may differ by rounding.
class MicroBatchDigests {
 public:
  // Whose digests they are. A rank that has the first and the last stage asks its source once, and is kOther.
  enum class Stage : int { kOther = 0, kFirst = 1, kLast = -1 };
  MicroBatchDigests(int micro_batches, Stage stage);

  // Takes the next micro-batch as the source gave it. Waits for no device.
  void see(const pipeline::MicroBatch& batch);
  // Returns numbers for ranks to add up: float64 [n] on `device`.
  at::Tensor summable(at::Device device) const;
  // Whether a first and a last stage differ, by the sums over all ranks, which are on the host.
  bool differ(const at::Tensor& sums) const { return first_difference(sums).has_value(); }
  // Throws UsageError where differ(): names the ranks and the micro-batch. `pipeline`: the number of this rank's
  // pipeline. Collective over `world`, all ranks, which have the same sums. `outcome`: a sentence for the end.
  void require_same(const at::Tensor& sums, int pipeline, comm::Communicator& world, at::Device device,
                    const char* outcome) const;

 private:
  std::optional<size_t> first_difference(const at::Tensor& sums) const;

  Stage stage_;
  size_t seen_ = 0;
  std::vector<at::Tensor> rows_;  // float64 [5] of inputs, then of labels, of each micro-batch
};

}  // namespace ds::engine
