// The tensor axis of an engine whose model is split over one (docs/tensor_parallel.md), or the sequence axis of one
// that cuts the batches of an unmodified model (docs/long_sequences.md): its ranks, and the leaves, which alone it
// trains. The module keeps its parameters, which have no memory then.
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
#include "optim/shard_optimizer.h"
#include "zero/parameter_bucket.h"

namespace ds::engine {

// Makes the tensor axis the group of activation_checkpointing.partition_activations while it lives: checkpointed
// regions that read tensors split over the axis divide their whole inputs over it. Regions of other models, and
// settings of the program, are left alone. May end on another thread than it was made on.
class RegionGroup {
 public:
  explicit RegionGroup(const std::shared_ptr<comm::Communicator>& axis);
  ~RegionGroup();
  RegionGroup(const RegionGroup&) = delete;
  RegionGroup& operator=(const RegionGroup&) = delete;

 private:
  const comm::Communicator* axis_;  // identity of the axis, only compared
};

// Returns the tensor that the engine trains for a module's parameter: the leaf of a split one, and others themselves.
// Buckets, optimizer and everything else by identity know a parameter by it.
inline at::Tensor trained_tensor(const at::Tensor& parameter) {
  return is_split(parameter) ? leaf_of(parameter) : parameter;
}

// Returns the part of a parameter that is cut; null for another one, also where its gradient is a sum over the axis.
std::shared_ptr<const TensorPart> part_of_parameter(const at::Tensor& parameter);

// Short numbers for data that ranks compare: what the host knows, and what a device knows alone, to be added.
struct DataDigest {
  uint64_t of_host = 0;
  at::Tensor of_device;  // int64 [], undefined: nothing
  // The sum of `projections` numbers for tensors that ranks may have with other last bits; float64 [] on their device,
  // undefined: of none.
  at::Tensor projection;
  int64_t projections = 0;
};

struct TensorParts {
  TensorParts() = default;
  // The module keeps its split parameters, and with them the axis, which forgets the engine.
  ~TensorParts();
  TensorParts(const TensorParts&) = delete;
  TensorParts& operator=(const TensorParts&) = delete;

  std::shared_ptr<comm::Communicator> ranks;  // along the axis: each has a part of the split parameters
  std::vector<int> world_ranks;               // numbers in the job, in the order of `ranks`
  parallel::SplitModule split;                // axis, plan, leaves under the names of their parameters
  parallel::SplitPlan elsewhere;              // of layers that other stages of a pipeline have, for the plan's rows
  // A split parameter of the module, with its name and leaf as they were at first.
  struct SplitParameter {
    std::string name;
    at::Tensor parameter, leaf;
  };
  std::vector<SplitParameter> parameters;
  std::optional<RegionGroup> regions;  // where checkpointed regions divide their inputs over the axis
  // tensor_parallel.sequence_parallel: each rank has a partial sum of the gradients of whole parameters.
  bool sums_wholes = false;
  // sequence_parallel_size: no parameter is cut. The ranks of the axis have pieces of the same batches, and partial
  // sums of gradients, which the reduction over Ranks::part adds up.
  bool cuts_batches = false;
  bool told_of_joins = false;
  int shown = 0;  // split parameters that are whole in open scopes

  // Throws UsageError, naming the parameter, when one has lost its leaf: model->to() after initialize(). `call` names
  // the call.
  void require_leaves(const char* call) const;
  // To be called after the leaves got the dtype and the memory of their buckets.
  void follow_leaves() const;
  // To be called after the program may have frozen parameters, or let them require a gradient again. Leaves are where
  // they were.
  void follow_flags() const;
  // Returns a digest of the plain data that split operators have read since the last call (the values of integers,
  // type, shape and projections of others): equal on ranks with equal batches. Nothing waits for the device.
  DataDigest take_data_digest() { return std::exchange(data_digest_, {}); }
  // To be called after the backward of a micro-batch: note_data() looks at the first tensors of the next one.
  void next_batch() { seen_integers_ = seen_others_ = 0; }
  void note_data(const at::Tensor& plain);
  // Gathers the full parameter from each rank's part, in new memory. Collective.
  at::Tensor joined(const at::Tensor& part, const TensorPart& of) const;

 private:
  void note_values(const at::Tensor& plain);

  DataDigest data_digest_;
  int seen_integers_ = 0;  // since next_batch()
  int seen_others_ = 0;
};

// Lets an optimizer that looks at whole tensors (Lamb, Muon) sum over `slices`, then over the axis. `parts` outlives
// the result.
std::shared_ptr<optimizers::SliceExchange> make_part_sums(std::shared_ptr<optimizers::SliceExchange> slices,
                                                          const TensorParts& parts);
// Lets such an optimizer gather and split the engine's parameters. Both arguments outlive the result.
std::shared_ptr<optimizers::PartExchange> make_part_exchange(const TensorParts& parts,
                                                             const std::vector<zero::Parameter>& parameters);

}  // namespace ds::engine
