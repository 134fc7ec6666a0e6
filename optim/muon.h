// Muon (kellerjordan.github.io/posts/muon) for matrices, Adam for everything else, on flat slices. As DeepSpeed's
// MuonWithAuxAdam:
//
//   m = lerp(m, g, 1 - momentum)     u = lerp(g, m, momentum)     u = orthogonalize(u) sqrt(max(1, rows / cols))
//   w = w (1 - lr weight_decay) - lr u
//
// Parameters of the two kinds never share a bucket: the engine puts them into different groups, with their own lr. A
// parameter with 4 dimensions is orthogonalised as [d0, d1 d2 d3], one with 3 or more than 4 as a batch of its last
// two; rows and cols of the factor are its last two dimensions. Of a matrix whose rows are heads (per_head_muon) each
// head's block is one of a batch, as in Kimi K3 (arXiv:2607.24653, section 2.5).
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "optim/adam.h"
#include "optim/bucket_parameters.h"
#include "optim/newton_schulz.h"
#include "optim/shard_optimizer.h"

namespace ds::optimizers {

// Two or more dimensions, and neither "embed" nor "lm_head" in any of its names.
bool uses_muon(const ParameterInfo& parameter);

class Muon final : public CopyingOptimizer {
 public:
  // `aux`: how the other parameters are updated. `block_rows`, by parameter, as OptimizerOptions says it; they divide
  // the rows of the whole matrix.
  Muon(std::vector<GroupOptions> groups, NewtonSchulzMethod method, AdamRule aux, std::vector<int64_t> block_rows = {});
  // Collective over the slice's exchange when the slice's parameters use Muon. Beside the slice it holds the bucket's
  // update in float32, and the products of one matrix at a time.
  void update_into(int64_t index, const at::Tensor& gradient, double gradient_scale, const at::Tensor& copy) override;
  // On a device: matrices of one shape of a bucket are made orthogonal together.
  void update_all(const std::vector<SliceUpdate>& slices, const StepScale& scale) override;
  NamedStates states(int64_t index) override;
  // Slices of matrices have 4 bytes of state per element, those that Adam updates 8, which is the value given here.
  OptimizerTraits traits() const override {
    return {.state_bytes_per_element = 8, .device_kernels = DeviceKernels::kFloat32};
  }
  std::string name() const override { return "Muon"; }

 protected:
  // Throws UsageError for a bucket with parameters of both kinds, or with a part of a matrix.
  void allocate_states(int64_t index, const NewState& new_state) override;

 private:
  struct State {
    at::Tensor momentum;  // [n], where Muon updates the slice; undefined when Adam does
    AdamStates adam;
    std::vector<BucketParameter> matrices;
  };

  void update_matrices(const Slice& slice, const GroupOptions& group, const State& state, const at::Tensor& gradient,
                       double gradient_scale) const;
  // Makes the update of update_matrices() by kernels of the device.
  void update_matrices_together(const Slice& slice, const GroupOptions& group, const SliceUpdate& update,
                                const StepScale& scale) const;
  // The step of what the bucket has of a matrix, from its `flat` momentum: flat.
  at::Tensor own_step(const Slice& slice, const BucketParameter& matrix, const at::Tensor& flat) const;
  // Returns the steps of all matrices of which the slice has elements, by parameter: of what is in the bucket, flat.
  std::map<int64_t, at::Tensor> own_steps(const Slice& slice, const State& state, const at::Tensor& bucket) const;
  // The slice's part of the bucket's update, before it is orthogonalised: [n] in the state type.
  at::Tensor blend_momentum(const GroupOptions& group, const State& state, const at::Tensor& gradient,
                            double gradient_scale) const;

  // The sizes of a whole matrix with its blocks as a batch.
  std::vector<int64_t> in_blocks(int64_t parameter, const std::vector<int64_t>& sizes) const;

  NewtonSchulzMethod method_;
  AdamRule aux_;
  std::vector<int64_t> block_rows_;
  std::vector<State> states_;
};

}  // namespace ds::optimizers
