// From a module to buckets: which parameters there are, their dtypes, and their common start on all ranks.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "config/plan/plan.h"
#include "core/slices/segment.h"
#include "core/slices/slice_store.h"
#include "dsengine/comm.h"
#include "model/offloaded/offloaded_state.h"
#include "model/state/frozen_here.h"
#include "model/state/start_values.h"
#include "zero/parameter_bucket.h"

namespace ds::engine {

// Parameters of a module in module order; a tied parameter counts once, under its first name, and knows the others.
struct ModelParameters {
  std::vector<zero::Parameter> trainable;
  std::vector<ParameterInfo> infos;  // facts about `trainable`
  std::vector<zero::Parameter> frozen;
  FrozenHere frozen_here;  // parameters that required a gradient, frozen for want of an optimizer
  std::vector<zero::Parameter> buffers;
};

// Collects the parameters of a module. Throws UsageError for a module without parameters, with parameters of another
// dtype than float32, float64, bfloat16 and float16 or that are not dense, with complex buffers, and for one that
// another engine trains. `trains`: false freezes all of them. `split`: the engine has split parameters, whose leaves it
// takes; else split ones throw.
ModelParameters collect_parameters(const torch::nn::Module& module, bool trains = true, bool split = false);

// Buckets of a model before they have memory.
struct ModelLayout {
  std::vector<zero::BucketLayout> buckets;
  std::vector<int> part_of;                // the part of each bucket
  std::vector<zero::BucketLayout> frozen;  // stage 3
};

// The buckets of a model in memory.
struct BucketedModel {
  std::vector<zero::ParameterBucket> buckets;
  std::vector<at::Tensor> masters;                    // per bucket, see ModelState
  std::vector<zero::ParameterBucket> frozen_buckets;  // stage 3; else frozen parameters stay as they are
};

// How parameters are laid into buckets.
struct BucketOptions {
  int64_t max_bucket_elements = 0;                  // 0: every parameter by itself
  int64_t most_target_elements = 0;                 // see zero::LayoutOptions
  at::ScalarType dtype = at::kFloat;                // parameters are cast to it
  std::optional<at::ScalarType> buffer_dtype;       // floating-point buffers of the module are cast to it,
  std::unordered_set<const void*> float32_buffers;  // but for these, which become float32
  at::ScalarType master_dtype = at::kFloat;         // another one than `dtype`: masters are copies
  bool separate_master = false;                     // masters are no views of the buckets in the same dtype either
  bool partition = false;                           // masters are the own slice, else whole buckets
  bool shard = false;                               // stage 3: parameters are kept as slices, but for persistent ones:
  int64_t persistent_numel = 0;                     // parameters of at most so many elements are persistent,
  int64_t persistent_total = 0;                     // as long as they are not more than this together
  int frozen_bits = 0;                              // 8: slices of frozen parameters are encoded
  // The part of each trainable parameter: parameters of unlike parts share no bucket, and a part lies in its buckets as
  // it would alone. Empty: one part. Buckets come in the order of parts' first parameters, over a tensor axis of their
  // numbers.
  std::vector<int> parts;
  // By trainable parameter, the width of its rows where it is a row-wise table, which has a part of its own; else 0.
  // Empty: none is.
  std::vector<int64_t> row_widths;
  std::vector<int> shared_parts;  // parts that lie in other models too: one bucket a group, never persistent
  // Parameters, by their tensors, that ranks send each other in a dtype of their own: gradients and, with `shard`, the
  // values of those that are gathered.
  std::optional<at::ScalarType> sent_as;
  std::unordered_set<const void*> sent_in_it;
  // With `shard`, where the slices of a trainable bucket live that has this master (undefined: the slice itself is it).
  // Empty: beside the bucket, or where offloaded parameters are.
  std::function<std::shared_ptr<SliceStore>(const at::Tensor& master)> store_of;
};

// Lays the parameters out in buckets of `ranks` slices.
ModelLayout lay_out(const ModelParameters& parameters, const std::vector<int>& groups, const BucketOptions& options,
                    int ranks);

// Lays the trainable parameters into buckets with the start values, casts them, and gives frozen parameters and buffers
// theirs (cast too). Master values are taken before the cast. With `shard` a parameter's memory is
// released as soon as its bucket is there. Slices are those of `shards`; some live in `offloaded` (may be null).
BucketedModel build_buckets(const ModelParameters& parameters, ModelLayout layout, const BucketOptions& options,
                            StartValues& values, OffloadedState* offloaded, comm::Communicator& shards);

}  // namespace ds::engine
