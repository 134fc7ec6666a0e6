// Where model state lives and how much of it there is: values that a plan decides and an engine reports. Torch-free.
//
// Plain values without owners; safe from any thread; nothing throws.
#pragma once

#include <cstdint>

namespace ds::zero {

// When and how gradients are reduced at ZeRO stages up to 2.
enum class ReductionPolicy {
  kAllReduce,                  // stage 0: whole buckets, at the boundary
  kReduceScatterAtBoundary,    // stage 1: local accumulation, own slice at the boundary
  kReduceScatterEveryBackward  // stage 2: own slice after every backward, the bucket is released
};

// How much of a model is gathered at a time at stage 3, in elements, with DeepSpeed's names for the limits.
struct GatherLimits {
  int64_t max_live = 1'000'000'000;            // stage3_max_live_parameters: gathered at once; what an operator needs
                                               // is gathered beyond it
  int64_t max_reuse_distance = 1'000'000'000;  // stage3_max_reuse_distance: what is used again sooner stays
  int64_t prefetch = 50'000'000;               // stage3_prefetch_bucket_size: on their way ahead of use

  bool operator==(const GatherLimits&) const = default;
};

// Where state is kept: on the device of the rank, in host memory, in a file.
enum class Home { kDevice, kHost, kFile };

// The state that does not stay on the device. Host memory comes in whole pages.
struct Offload {
  Home optimizer = Home::kDevice;   // master weights and optimizer states; reduced gradients are on the host then
  double ratio = 1.0;               // share of the trainable elements that `optimizer` applies to
  Home parameters = Home::kDevice;  // stage 3: slices of parameters
  int64_t optimizer_buffers = 0;    // kFile: slices of the optimizer, the largest, for which there is host memory
  int64_t parameter_buffers = 0;    // kFile: slices of parameters for which there is host memory
  int64_t kept_parameters = 0;      // kFile: elements of the first slices of a rank that stay in host memory
  bool delayed = false;             // an update runs while the next gradients arrive: both have memory, and new weights
  bool speculative = false;         // kHost: an update may be undone: master and states are kept twice, and new weights
  bool speculation_copies_gradient = false;  // likewise: it changes the gradient it gets
  bool staged = false;                       // the device is not the host: gradients and weights pass through buffers
};

// Predicted bytes of model state of one rank, on the device unless said otherwise.
struct ModelStateBytes {
  int64_t parameters = 0;  // trainable and frozen
  int64_t gradients = 0;   // at their peak
  int64_t master = 0;      // float32 copies of 16-bit weights
  int64_t optimizer = 0;   // states of the optimizer
  int64_t buffers = 0;     // buffers of the module
  int64_t total() const { return parameters + gradients + master + optimizer + buffers; }

  bool operator==(const ModelStateBytes&) const = default;
};

// Bytes that a rank keeps in host memory and files.
struct OffloadedBytes {
  ModelStateBytes host;  // model state in host memory
  int64_t staging = 0;   // host memory through which files and devices are read and written, or to undo updates
  int64_t file = 0;      // bytes in files
  int64_t host_total() const { return host.total() + staging; }

  bool operator==(const OffloadedBytes&) const = default;
};

// Bytes that a step needs on top, at most.
struct StepBytes {
  int64_t gathered = 0;   // parameters that are whole for operators, at once
  int64_t secondary = 0;  // slices for the ranks of a node

  bool operator==(const StepBytes&) const = default;
};

// The result of Engine::model_state_bytes: bytes of parameters, gradients, master weights and optimizer states this
// rank holds on the device now, by kind, counted from the tensors themselves. Gradients are counted at their peak
// during the last step. `gathered` and `secondary` come on top of total() during a step.
struct HeldBytes {
  int64_t parameters = 0, gradients = 0, master = 0, optimizer = 0;
  int64_t average = 0;    // InitializeOptions::ema: the moving average of the weights
  int64_t gathered = 0;   // stage 3: parameters that were whole for operators, at once, at most in the last step
  int64_t secondary = 0;  // zero_hpz_partition_size: slices for the ranks of a node, as long as they are valid
  int64_t total() const { return parameters + gradients + master + optimizer + average; }
};

// Counts of optimizer steps with offload_optimizer.super_offload. `stood`: the host's update began before the gradient
// was judged, and was kept; `rolled_back`: it was undone, then repeated or skipped; `without`: no update began early.
struct Speculation {
  int64_t stood = 0, rolled_back = 0, without = 0;
};

// The argument of Engine::offload_states: which state to move.
//
// Engine::offload_states moves state from the device to host memory, so that something else can use the device (another
// model, generation): between two optimizer steps, until reload_states(). In between parameters have no elements, and
// every call that needs them throws UsageError. What offload_optimizer and offload_param keep elsewhere stays there.
// Collective. Throws ConfigError on all ranks, and moves nothing, when a host has no room for what its ranks move
// together. Names are DeepSpeed's.
struct OffloadStates {
  bool optim_states = true;  // states of the optimizer
  bool hp_params = true;     // float32 masters, where they are not the parameters themselves, and their averages
  bool lp_params = true;     // parameters, trainable and frozen
  bool lp_grads = true;      // memory of gradients and their buckets; it is given up, there is nothing in it
  bool pin_memory = true;    // host memory is pinned
};

}  // namespace ds::zero
