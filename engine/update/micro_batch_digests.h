// Whether the first and the last stage of a pipeline took the same micro-batches, and so did the ranks of each tensor
// axis. Each rank asks a source of its own: where one draws random numbers, the inputs of the one and the labels of the
// other belong to different draws, and nothing else would tell.
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
  // The place of this rank on its tensor axis. The ranks of one axis are compared in what their stage reads: inputs on
  // the first one, labels on the last.
  struct AxisPlace {
    int rank = 0;
    int ranks = 1;
  };
  MicroBatchDigests(int micro_batches, Stage stage, AxisPlace axis);

  // Takes the next micro-batch as the source gave it. Waits for no device.
  void see(const pipeline::MicroBatch& batch);
  // Returns numbers for ranks to add up: float64 [n] on `device`.
  at::Tensor summable(at::Device device) const;
  // Whether a first and a last stage differ, or ranks of a tensor axis, by the sums over all ranks, which are on the
  // host.
  bool differ(const at::Tensor& sums) const { return first_difference(sums).has_value(); }
  // Whether ranks of one tensor axis differ: an update leaves them with parts of different models.
  bool differ_along_axis(const at::Tensor& sums) const;
  // Throws UsageError where differ(): names the ranks and the micro-batch. `pipeline`: the number of this rank's
  // pipeline. Collective over `world`, all ranks, which have the same sums. `outcome`: a sentence for the end.
  void require_same(const at::Tensor& sums, int pipeline, comm::Communicator& world, at::Device device,
                    const char* outcome) const;

 private:
  // A row that differs, along a tensor axis or else over stages. The former come first.
  struct Difference {
    size_t row = 0;
    bool along_axis = false;
  };
  std::optional<Difference> first_difference(const at::Tensor& sums) const;
  double axis_factor(size_t row) const;

  Stage stage_;
  AxisPlace axis_;
  size_t seen_ = 0;
  std::vector<at::Tensor> rows_;  // float64 [5] of inputs, then of labels, of each micro-batch
};

}  // namespace ds::engine
