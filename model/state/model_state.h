// The state of a model on one rank: module, plan, ranks, parameters, buckets, masters, gradients and optimizer. The
// functions that save, load and read a model take it; an engine and the wrappers of loops own one and drive it.
//
// It does not check the order of calls (config/order does) and makes no steps (engine/update does). Buckets are
// numbered, trainable ones first, then frozen ones. Used by one thread.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/tag_folder.h"
#include "comm/bucket_reduction.h"
#include "config/plan/plan.h"
#include "core/slices/segment.h"
#include "layers/fp8/scaling.h"
#include "model/offloaded/offloaded_state.h"
#include "model/stages/pipeline_state.h"
#include "model/state/axes.h"
#include "model/state/frozen_here.h"
#include "model/state/model_optimizer.h"
#include "model/state/ranks.h"
#include "model/state/tensor_parts.h"
#include "model/state/weight_average.h"
#include "zero/gather/parameter_access.h"
#include "zero/gather/parameter_gatherer.h"
#include "zero/parameter_bucket.h"
#include "zero/reduction/gradient_check.h"
#include "zero/reduction/gradient_reducer.h"

namespace ds::engine {

// The objects that reduce gradients, in the order of construction.
struct GradientDeps {
  std::unique_ptr<comm::BucketReduction> reduction;  // null: gradients are sent as they are
  std::unique_ptr<zero::GradientCheck> check;        // null: without locate_non_finite
  std::unique_ptr<zero::GradientReducer> reducer;
};

// The masters that a bucket had before the program set its 16-bit parameters (take_over_changes), on the host. An
// element that gets its old 16-bit value again gets its old master back, so that weights that are swapped in, read and
// swapped out again lose nothing.
struct OverwrittenMaster {
  at::Tensor master;  // flat: the elements that this rank has
  at::Tensor shown;   // its elements as the parameters had them, in the model's dtype
};

class RowTables;

// One rank's state of a model; see the top of this file. Later members refer to earlier ones, and are destroyed first.
struct ModelState {
  std::shared_ptr<torch::nn::Module> module;
  Plan plan;
  Ranks ranks;
  std::unique_ptr<PipelineState> pipeline;    // null: the model is no PipelineModule
  std::unique_ptr<TensorParts> tensor;        // null: no parameter is split over ranks
  std::unique_ptr<OffloadedState> offloaded;  // null: all stays on the device
  std::vector<zero::Parameter> parameters;    // trainable, tied ones once, in module order
  std::vector<ParameterInfo> infos;           // names and shapes of `parameters`, for optimizers
  std::vector<zero::Parameter> frozen;        // parameters without a gradient
  FrozenHere frozen_here;                     // without an optimizer: the parameters that the engine itself has frozen
  std::vector<char> held_still;               // by parameter: the program has frozen it since initialize() (ModelWatch)
  std::vector<zero::ParameterBucket> buckets;
  std::vector<zero::ParameterBucket> frozen_buckets;  // where parameters are gathered (stage 3, fully_shard)
  // By bucket: the weights that the optimizer updates, flat, in plan.master_dtype, as many as own_part() has. Views of
  // the buckets, except where these have another dtype, an optimizer asks for copies (separate_master), or masters are
  // offloaded.
  std::vector<at::Tensor> masters;
  std::map<size_t, OverwrittenMaster> overwritten;  // by trainable bucket, since the last update
  GradientDeps gradients;
  std::unique_ptr<Axes> axes = std::make_unique<Axes>();  // groups that add gradients and norms, ranks to compare
  std::unique_ptr<zero::ParameterAccess> access;
  zero::ParameterGatherer* gatherer = nullptr;  // `access` where parameters are gathered, else null
  std::shared_ptr<RowTables> row_tables;        // stage 3 with row-wise tables, else null
  ModelOptimizer optimizer;
  std::unique_ptr<WeightAverage> average;                             // null: the program has asked for none
  std::shared_ptr<fp8::Scaling> fp8 = fp8::scaling_without_layers();  // never null
  // While it lives, the modules that the config has chosen recompute their activations; null: none do.
  std::shared_ptr<const void> recomputed;
  checkpoint::TagOwner tags;  // the owner of the checkpoints that are saved of this model

  // Returns the groups of ranks that share a bucket. zero::GradientExchange::groups_of() gives the reducer the same
  // ones.
  zero::BucketGroups groups_of(size_t bucket) const;
  // Returns all groups of ranks, each once.
  std::vector<comm::Communicator*> all_groups() const;
  // Calls `update` for each trainable bucket whose optimizer works on the host, in order.
  void for_each_on_host(const std::function<void(size_t bucket)>& update) const;
  // Whether the program has frozen a trainable parameter, by its number, since initialize().
  bool is_held_still(int64_t parameter) const { return held_still[static_cast<size_t>(parameter)] != 0; }
  // Returns the frozen parameters that lie in no bucket; none where parameters are gathered (stage 3, fully_shard).
  // Each rank has all elements of them, or its part along the tensor axis.
  std::span<const zero::Parameter> frozen_outside_buckets() const {
    return gatherer == nullptr ? std::span<const zero::Parameter>(frozen) : std::span<const zero::Parameter>();
  }
  // Returns the bytes that are kept in host memory and files.
  zero::OffloadedBytes offloaded_bytes() const { return offloaded ? offloaded->bytes() : zero::OffloadedBytes(); }
  // Returns where in host memory the reducer leaves gradients. Null: all of them stay on the device.
  ReducedGradients* host_gradients() const { return offloaded ? offloaded->gradients() : nullptr; }
  // Whether the optimizer of a trainable bucket works on the host.
  bool updates_on_host(size_t bucket) const { return offloaded && offloaded->updates(bucket); }
  // Whether a trainable bucket is a row-wise table (model/state/row_wise.h).
  bool is_row_wise(size_t bucket) const { return buckets[bucket].layout().row_width > 0; }
  // Returns the elements of a trainable bucket that this rank updates, as a flat view of the bucket: its slice where
  // the plan partitions the optimizer (stages 1 to 3), else the whole bucket.
  at::Tensor own_part(size_t bucket) const;
  // Calls `use` with the master of a bucket, which is in memory during the call. `changes`: `use` writes to it.
  void use_master(size_t bucket, bool changes, const std::function<void(const at::Tensor&)>& use) const;
  // Tells the reducer whether the optimizer's next step takes reduced gradients, or this rank's own unreduced ones
  // (1-bit optimizers in steps that compress). Called between steps.
  void choose_gradients() const;

  // Returns the number of ranks of this rank's pipeline; 1 without one.
  int pipeline_ranks() const { return pipeline ? pipeline->ranks->size() : 1; }
  // Returns this rank's number in its pipeline; 0 without one.
  int pipeline_rank() const { return pipeline ? pipeline->ranks->rank() : 0; }
  // Whether this rank puts a trainable bucket into sums over the whole model, such as the gradient norm. Where ranks of
  // the tensor or pipe axis hold copies of it, only one of them does.
  bool counts(size_t bucket) const;
  // Whether this rank's stage puts the bucket into such sums, whichever rank of its tensor axis does it. False for a
  // tied weight that another stage counts.
  bool counts_in_stage(size_t bucket) const;
  // Whether each rank of the tensor axis has only a partial sum of this bucket's gradient, so that the ranks have to
  // add them up: its parameters are replicated along the axis, under sequence parallelism.
  bool is_summed(size_t bucket) const { return tensor && tensor->sums_wholes && !is_part(bucket); }
  // Whether a trainable bucket holds parts of split parameters: each rank of the tensor axis has another part.
  bool is_part(size_t bucket) const { return buckets[bucket].parameters().front().part != nullptr; }
  // Whether a parameter or buffer is a copy of a tied weight of another stage.
  bool is_copy(const std::string& name) const { return pipeline && pipeline->is_copy(name); }
};

}  // namespace ds::engine
