// The source of the first values of a model's parameters: the module, files of weights or the program (start_files.h),
// rank 0's in any case.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <functional>
#include <vector>

#include "dsengine/comm.h"
#include "dsengine/zero.h"
#include "model/state/ranks.h"
#include "model/state/start_files.h"
#include "zero/parameter_bucket.h"

namespace ds::engine {

// The first values of a model's tensors. Collective on the ranks with the same part of the model: they ask for the same
// tensors in the same order. The constructor is collective over all ranks.
class StartValues {
 public:
  // Returns, without a file, values of a tensor that the module does not have; undefined: it has them. Called on every
  // rank in the same order.
  using Elsewhere = std::function<at::Tensor(const zero::Parameter& tensor)>;

  // Opens `files`, which outlive this object and may be none: then the module's own values count. `init`: has sliced
  // parameters of the module, or null. Values are made on `device` of the ranks. Throws what StartFiles::open() throws,
  // and UsageError for a tensor on the meta device without files. `elsewhere` may be null.
  StartValues(const torch::nn::Module& module, StartFiles& files, zero::Init* init, const Ranks& ranks,
              Elsewhere elsewhere = nullptr);

  // Returns the values of a whole bucket, float32 (of a float64 bucket, float64) [layout.numel]; padding is zero. The
  // parameters may get other memory afterwards.
  at::Tensor of_bucket(const zero::BucketLayout& layout, const std::vector<zero::Parameter>& parameters);
  // Returns this rank's slice of what of_bucket() returns for a bucket of one parameter, [layout.slice_numel], while no
  // rank makes the whole: rank 0 sends each rank its slice, and what zero::Init has sharded goes from slice to slice.
  at::Tensor of_slice(const zero::BucketLayout& layout, const std::vector<zero::Parameter>& parameters);
  // Whether the module's own values stay where they are: one rank, no file, the right device.
  bool keeps(const at::Tensor& tensor) const {
    return !files_.given() && world_.size() == 1 && tensor.device() == device_;
  }
  // Returns the values of one tensor in its own dtype.
  at::Tensor of(const zero::Parameter& tensor);

 private:
  at::Tensor source(const zero::Parameter& tensor) const;
  void end_source(const at::Tensor& tensor);

  StartFiles& files_;
  zero::Init* init_;
  Elsewhere elsewhere_;
  at::Device device_;
  comm::Communicator& world_;  // the ranks with the same part of the model
};

}  // namespace ds::engine
