// Predicted bytes of model state and of communication, per rank. Pure arithmetic; torch-free.
//
// The bytes are those on the device; what offload_optimizer and offload_param keep elsewhere is counted apart.
//
// The arithmetic of the ZeRO paper (arXiv 1910.02054, section 3) for the layout of this project: parameters lie in
// buckets, every bucket is cut into dp equal slices (padded), and in float32 the slice of the parameter bucket is
// itself the master copy.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "dsengine/memory.h"

namespace ds::zero {

// The numbers of buffers in host memory, each as long as the largest slice, on the way to a device and from it.
inline constexpr int kWriteBackBuffers = 2;  // one is filled while the other is sent
inline constexpr int kArrivals = 2;          // one gradient arrives while another is added

// The elements of a slice and its bytes as it is kept (encoded, or not).
struct StoredSlice {
  int64_t numel = 0;
  int64_t bytes = 0;
};

// The policy that runs where `policy` is asked for: one rank that owns all slices gains nothing by reducing early, and
// its gradients add up in place, unless they leave the device one by one.
ReductionPolicy fitting_policy(ReductionPolicy policy, int owners, bool leaves_device);

struct MemoryQuestion {
  int stage = 0;                       // 0 to 3
  int64_t dp = 1;                      // ranks that share one copy of what is partitioned
  int64_t copies = 1;                  // groups of such ranks
  int64_t node_ranks = 1;              // stage 3, above 1: ranks with a secondary copy of gathered parameters (hpZ)
  int64_t parameters = 0;              // trainable elements; ignored when `buckets` is given
  std::vector<int64_t> buckets;        // elements of each bucket, padding included when they are laid out already
  std::vector<char> persistent;        // stage 3, for each of `buckets`: it stays full; empty: none does
  std::vector<char> row_wise;          // for each of `buckets`: its gradients are rows, no buffer; empty: none's are
  int64_t bucket_limit = 500'000'000;  // elements; cuts `parameters` when `buckets` is empty
  int64_t parameter_bytes = 4;         // per element
  int64_t gradient_bytes = 4;          // per element of gradient buckets and slices
  int64_t communication_bytes = 4;     // per gradient element on the wire
  int64_t master_bytes = 4;            // per element of masters, wherever they are
  bool separate_master = false;        // master slices beside the parameters
  int64_t state_bytes = 4;             // per element of one tensor of optimizer state
  int64_t optimizer_state_bytes = 8;   // per element: Adam in float32; a multiple of state_bytes
  bool error_feedback = false;         // ranks exchange compressed values: an error of all elements and one of a part
  int weight_bits = 0;                 // stage 3: bits of a gathered element; 0 = parameter_bytes
  int gradient_bits = 0;               // bits of a reduced element; 0 = communication_bytes
  int64_t gradient_node_ranks = 1;     // with gradient_bits: ranks that add before a node sends
  int64_t accumulation_steps = 1;
  int64_t frozen_bytes = 0;                // the bytes of parameters without gradient that a rank holds
  int64_t buffer_bytes = 0;                // the bytes of module buffers, replicated on every rank
  std::optional<GatherLimits> gather;      // stage 3 on several ranks
  int64_t frozen_elements = 0;             // stage 3: in buckets that are gathered as well
  int64_t largest_frozen_bucket = 0;       // elements
  std::vector<StoredSlice> frozen_slices;  // stage 3: of a rank, where offload.parameters is not kDevice
  Offload offload;
};

// Predicts the model state between steps: at stage 3 without what is gathered for the operators of a pass, but
// gradients at their peak, where they arrive bucket by bucket (a bucket that cuts a module in two may fill together
// with its neighbour). Throws UsageError for another stage or numbers out of range.
ModelStateBytes predict_model_state(const MemoryQuestion& question);

// Says for each bucket (given by its elements, in order) whether offload.ratio means it: the last ones, as many as
// their share asks for. The buckets that operators need first are updated where they are.
std::vector<char> offloaded_buckets(const std::vector<int64_t>& buckets, const Offload& offload);

OffloadedBytes predict_offloaded(const MemoryQuestion& question);
// Whether the slice of a parameter is its own master: without masters of another dtype it is, where both are in host
// memory, and no update changes one while the other is read or has to be undone.
bool shares_master(const Offload& offload, bool separate_master);
// How many of these slices of parameters, the first ones, stay in host memory.
size_t kept_slices(const std::vector<StoredSlice>& slices, const Offload& offload);
// The bytes of slices of parameters, in the order in which they are made, by where they live.
OffloadedBytes place_parameters(const std::vector<StoredSlice>& slices, const Offload& offload);

// Predicts what a step holds beside the model state; nothing without `gather`. Gathered parameters are bounded by the
// limits: what is used again within max_reuse_distance, what the prefetch brings, and the buckets of the operator under
// way, but no more than max_live where an operator does not need more. A gather of integers holds these beside for as
// long as it is on its way.
StepBytes predict_step(const MemoryQuestion& question);

// Bytes this rank sends in one optimizer step: reductions of gradients and the gather of parameters. At stage 3
// parameters that are not persistent are gathered twice in every micro-batch, all but the first time inside the node
// where there are secondary slices; less when stage3_max_reuse_distance keeps some. Between copies an all-reduce of the
// own slices.
int64_t predict_sent_bytes(const MemoryQuestion& question);

}  // namespace ds::zero
