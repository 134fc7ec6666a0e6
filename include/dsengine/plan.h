// The plan: what an engine runs and why. Decided once from config, ranks and model (config/plan/plan.h), printed by
// rank 0, returned by Engine::plan(). Torch-free.
//
// Plain values without owners; a Plan that nobody changes is safe from any thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dsengine/comm.h"
#include "dsengine/config.h"
#include "dsengine/memory.h"

namespace ds::engine {

using config::DType;

// The number of ranks along each axis: world_size = pipe x dp x tensor. Ranks of a tensor axis are side by side, then
// those of a sequence axis, then data-parallel ones.
struct Topology {
  int64_t world_size = 1;
  int64_t dp = 1;              // ranks that have the same part of the model and share its states
  int64_t pipe = 1;            // ranks of a pipeline
  int64_t ranks_per_host = 1;  // data-parallel ones, where every host has as many, consecutive ones; else 1
  int64_t tensor = 1;          // ranks that have parts of the same parameters
  int64_t sequence = 1;        // of the dp ranks: so many neighbours share a batch, each with a piece of its sequences

  // Returns the number of batches that ranks train on side by side.
  int64_t batches() const { return dp / sequence; }
};

// The scale of the loss: none, a constant, or one that follows overflows.
enum class LossScaling { kNone, kStatic, kDynamic };

// A line of the printed plan.
struct PlanRow {
  std::string what;    // "gradients"
  std::string choice;  // "reduce-scatter in every micro-batch, overlapped"
  std::string reason;  // "zero_optimization.stage: 2"
};

// The decisions; `rows` has them in words, with the reason of each.
struct Plan {
  Topology topology;
  bool trains = true;  // false: no optimizer: forward only, all parameters are frozen

  DType model_dtype = DType::kFloat32;          // parameters in forward and backward
  DType gradient_dtype = DType::kFloat32;       // gradient buckets and accumulated slices
  DType communication_dtype = DType::kFloat32;  // on the wire when gradients are reduced
  DType master_dtype = DType::kFloat32;         // weights that the optimizer updates
  DType state_dtype = DType::kFloat32;          // optimizer states
  bool separate_master = false;                 // masters beside the parameters
  std::optional<DType> autocast;                // torch_autocast around forward
  std::vector<std::string> sent_in_autocast;    // classes of modules whose parameters ranks send in `autocast`
  std::optional<DType> buffer_dtype;            // cast the module's buffers
  bool cast_inputs = false;                     // fp16.auto_cast

  zero::ReductionPolicy gradient_policy = zero::ReductionPolicy::kAllReduce;
  bool partition_optimizer = false;  // each rank updates its slice, then the parameters are all-gathered
  int64_t shard_ranks = 1;           // ranks that share one copy of what is partitioned; more than these hold copies
  bool error_feedback = false;       // the optimizer compresses what ranks exchange; gradients stay local then
  bool overlap_reduction = true;     // collectives start inside backward
  bool average_gradients = true;     // false: sum
  bool prescale_gradients = false;
  double predivide_factor = 1.0;
  int64_t bucket_elements = 500'000'000;  // upper limit of a bucket, in elements
  int64_t bucket_target_bytes = 0;        // largest size that buckets aim at, in bytes of parameters; 0: no such limit
  // How long a gradient's hook waits for other ranks before it leaves its reduction to a later hook; empty: without
  // limit.
  std::optional<std::chrono::milliseconds> reduction_patience;
  // Stage 3 on several ranks, or with offloaded parameters: parameters are kept as slices and gathered for use.
  std::optional<zero::GatherLimits> gather;
  int64_t node_ranks = 1;           // above 1: ranks that hold a secondary copy of gathered parameters (hpZ)
  int weight_bits = 0;              // 8: parameters are gathered as 8-bit integers (qwZ); 0: as they are
  int frozen_bits = 0;              // 8: slices of frozen parameters are kept as 8-bit integers
  int gradient_bits = 0;            // 4: gradients are reduced as 4-bit integers (qgZ); 0: as they are
  int64_t gradient_node_ranks = 1;  // with gradient_bits: ranks whose gradients are added before they leave a node
  // The compression of gradients in reductions; method kNone: gradients are sent in communication_dtype.
  config::GradientCompressionSection compression;
  bool sparse_gradients = false;       // ranks send only the rows of embeddings' gradients that are used
  int64_t compression_node_ranks = 1;  // with `compression`: ranks that add uncompressed gradients before a node sends
  int64_t persistent_numel = 0;        // stage 3: parameters of at most so many elements stay full
  int64_t persistent_total = 0;        // stage 3: most elements of all parameters that stay full
  bool require_all_gradients = false;  // a parameter without gradient is an error

  zero::Offload offload;             // offload_optimizer and offload_param
  int64_t delayed_update_start = 0;  // with offload.delayed: the first optimizer step, from 1, that is delayed

  bool compute_grad_norm = true;
  double clip_norm = 1.0;   // 0 = off
  double clip_value = 0.0;  // 0 = off
  // The treatment of a step whose norm is infinite or NaN; never kAuto. Without compute_grad_norm no step is judged:
  // kContinue.
  config::NonFiniteGradients non_finite = config::NonFiniteGradients::kContinue;
  bool locate_non_finite = false;  // each rank looks at its gradients before they are added and reduced
  LossScaling loss_scaling = LossScaling::kNone;

  // How a model that is a pipeline runs, also one of a single stage.
  struct Pipeline {
    std::string schedule;                           // "1f1b", or the file of a program's own
    int64_t chunks = 1;                             // stages of a rank
    std::shared_ptr<const pipeline::Schedule> own;  // the schedule of that file; null: `schedule` names a kind
  };
  std::optional<Pipeline> pipeline;

  // How layers are split over topology.tensor ranks.
  struct Tensor {
    bool sequence_parallel = false;           // between layers, activations are cut along the sequence
    bool overlap = false;                     // an input's gradient is added up beside the weight's product
    bool verify = false;                      // results on shards are compared with results on full tensors
    std::optional<int64_t> split_parameters;  // trainable elements that are parts of split parameters
  };
  Tensor tensor;

  std::string optimizer;  // "AdamW"; empty: the program brings its own, or there is none (`trains`)
  std::string schedule;   // "WarmupLR"; empty: constant, or the program's
  comm::Backend backend = comm::Backend::kAuto;

  std::vector<PlanRow> rows;
  std::vector<std::string> warnings;           // logged by rank 0: what the program may not have meant
  std::optional<int64_t> parameters;           // trainable elements of the model
  std::optional<zero::ModelStateBytes> bytes;  // predicted per rank, when `parameters` is known
  zero::StepBytes step_bytes;                  // predicted per rank: memory on top during a step
  zero::OffloadedBytes offloaded_bytes;        // predicted per rank: memory beside the device
  int64_t activation_bytes = 0;                // activations per rank, as ds-tool check was told
  int64_t ema_bytes = 0;                       // per rank: the moving average of the weights, on the device
  int64_t compression_bytes = 0;               // predicted per rank: what gradient_compression remembers, on the device
};

// Returns the rows as aligned text, a line for each.
std::string to_table(const Plan& plan);

}  // namespace ds::engine
