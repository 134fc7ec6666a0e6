// Predicted bytes of model state and of communication, per rank. Pure arithmetic; torch-free.
//
// The arithmetic of the ZeRO paper (arXiv 1910.02054, section 3) for the layout of this project: parameters lie in
// buckets, every bucket is cut into dp equal slices (padded), and in float32 the slice of the parameter bucket is
// itself the master copy.
#pragma once

#include <cstdint>
#include <vector>

namespace ds::zero {

struct MemoryQuestion {
  int stage = 0;                       // 0 to 3
  int64_t dp = 1;                      // ranks
  int64_t parameters = 0;              // trainable elements; ignored when `buckets` is given
  std::vector<int64_t> buckets;        // elements of each bucket, padding included when they are laid out already
  int64_t bucket_limit = 500'000'000;  // elements; cuts `parameters` when `buckets` is empty
  int64_t parameter_bytes = 4;         // per element
  int64_t gradient_bytes = 4;          // per element of gradient buckets and slices
  int64_t communication_bytes = 4;     // per gradient element on the wire
  bool separate_master = false;        // float32 master slices
  int64_t optimizer_state_bytes = 8;   // per element: Adam in float32
  int64_t accumulation_steps = 1;
  int64_t persistent_elements = 0;  // stage 3: in buckets that stay whole
  int64_t frozen_parameters = 0;    // elements without gradient that a rank holds
  int64_t buffer_bytes = 0;         // of module buffers, whole on every rank
};

struct ModelStateBytes {
  int64_t parameters = 0;  // trainable and frozen
  int64_t gradients = 0;   // at their peak
  int64_t master = 0;
  int64_t optimizer = 0;
  int64_t buffers = 0;
  int64_t total() const { return parameters + gradients + master + optimizer + buffers; }

  bool operator==(const ModelStateBytes&) const = default;
};

// Between steps: at stage 3 without what is gathered for the operators of a pass, but gradients at their peak. Throws
// UsageError for another stage or numbers out of range.
ModelStateBytes predict_model_state(const MemoryQuestion& question);

// Bytes this rank sends in one optimizer step: reductions of gradients and the gather of parameters. At stage 3
// parameters that are not persistent are gathered twice in every micro-batch; less when stage3_max_reuse_distance keeps
// some.
int64_t predict_sent_bytes(const MemoryQuestion& question);

}  // namespace ds::zero
