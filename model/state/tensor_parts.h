// What an engine has when its model is split over a tensor axis (docs/tensor_parallel.md): the ranks of the axis, and
// the leaves, which alone it trains. The module keeps its parameters, which have no memory then.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/split/split_tensor.h"
#include "core/split/tensor_part.h"
#include "dsengine/comm.h"
#include "dsengine/parallel.h"
#include "model/state/region_group.h"

namespace ds::engine {

// What the engine trains of a module's parameter: the leaf of a split one, and others themselves. Buckets, optimizer
// and everything else by identity know a parameter by it.
inline at::Tensor trained_tensor(const at::Tensor& parameter) {
  return is_split(parameter) ? leaf_of(parameter) : parameter;
}

// Of a parameter that is cut; null for another one, also where its gradient is a sum over the axis.
std::shared_ptr<const TensorPart> part_of_parameter(const at::Tensor& parameter);

// Short numbers for data that ranks compare: what the host knows, and what a device knows alone, to be added.
struct DataDigest {
  uint64_t of_host = 0;
  at::Tensor of_device;  // int64 [], undefined: nothing
};

struct TensorParts {
  TensorParts() = default;
  // The module keeps its split parameters, and with them the axis, which forgets the engine.
  ~TensorParts();
  TensorParts(const TensorParts&) = delete;
  TensorParts& operator=(const TensorParts&) = delete;

  std::shared_ptr<comm::Communicator> ranks;  // along the axis: each has a part of the split parameters
  std::vector<int> world_ranks;               // of the job, in the order of `ranks`
  parallel::SplitModule split;                // axis, plan, leaves under the names of their parameters
  // Split parameters of the module, each with its name and leaf as they were at first.
  struct SplitParameter {
    std::string name;
    at::Tensor parameter, leaf;
  };
  std::vector<SplitParameter> parameters;
  std::optional<RegionGroup> regions;  // where checkpointed regions divide their inputs over the axis
  bool sums_wholes =
      false;  // tensor_parallel.sequence_parallel: of whole parameters each rank has a part of the gradient
  bool told_of_joins = false;
  int shown = 0;  // split parameters that are whole in open scopes

  // Throws UsageError, naming the parameter, when one has lost its leaf: model->to() after initialize(). `call`: whose.
  void require_leaves(const char* call) const;
  // After the leaves got the dtype and the memory of their buckets.
  void follow_leaves() const;
  // After the program may have frozen parameters, or let them require a gradient again. Leaves are where they were.
  void follow_flags() const;
  // Of the plain data that split operators have read since the last call, of integers their values, of others type and
  // shape: equal on ranks with equal batches. Nothing waits for the device.
  DataDigest take_data_digest() { return std::exchange(data_digest_, {}); }
  // After the backward of a micro-batch: of the next one the first tensors are looked at.
  void next_batch() { seen_integers_ = seen_others_ = 0; }
  void note_data(const at::Tensor& plain);
  // Of a parameter's part on each rank, the whole, in new memory. Collective.
  at::Tensor joined(const at::Tensor& part, const TensorPart& of) const;

 private:
  DataDigest data_digest_;
  int seen_integers_ = 0;  // since next_batch()
  int seen_others_ = 0;
};

}  // namespace ds::engine
