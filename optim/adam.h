// Adam (arXiv 1412.6980) and AdamW (arXiv 1711.05101) on flat slices: on the CPU by kernels/adam_kernel, elsewhere and
// in float64 by LibTorch's fused kernels.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "optim/cpu_update.h"
#include "optim/kernels/adam_kernel.h"
#include "optim/row_update.h"
#include "optim/shard_optimizer.h"

namespace ds::optimizers {

struct AdamRule {
  bool decoupled_weight_decay = true;  // AdamW
  bool bias_correction = true;
  bool amsgrad = false;
  // torch.optim.SparseAdam: rows of a row-wise table without a gradient keep their weights and moments, and eps is
  // added to the root before its bias is corrected. What is no such table is updated by Adam.
  bool lazy = false;
};

struct AdamStates {
  at::Tensor exp_avg;         // running mean of the gradient
  at::Tensor exp_avg_sq;      // running mean of its square
  at::Tensor max_exp_avg_sq;  // amsgrad only
};

AdamStates allocate_adam_states(const NewState& new_state, const AdamRule& rule);
NamedStates named_adam_states(const AdamStates& states);

// One step of a slice.
struct AdamStep {
  int64_t count = 1;  // the first step is 1
  double gradient_scale = 1.0;
  GroupOptions group;
  AdamRule rule;
};

// The new weights are in `copy` too, if it is defined.
void update_adam_slice(const at::Tensor& master, const at::Tensor& gradient, const AdamStep& step,
                       const AdamStates& states, const at::Tensor& copy);

// Describes the update of a slice to update_together(), for update_all().
std::pair<SliceTensors, AdamCoefficients> describe_adam_slice(const at::Tensor& master, const SliceUpdate& update,
                                                              const AdamStep& step, const AdamStates& states);

class Adam final : public CopyingOptimizer, public RowOptimizer {
 public:
  Adam(std::vector<GroupOptions> groups, AdamRule rule);
  void update_into(int64_t index, const at::Tensor& gradient, double gradient_scale, const at::Tensor& copy) override;
  void update_all(const std::vector<SliceUpdate>& slices, const StepScale& scale) override;
  void update_rows(int64_t index, const TableRows& gradients, double gradient_scale) override;
  NamedStates states(int64_t index) override;
  OptimizerTraits traits() const override {
    return {.state_bytes_per_element = rule_.amsgrad ? 12 : 8,
            .uses_betas = true,
            .device_kernels = DeviceKernels::kAllTypes};
  }
  std::string name() const override {
    return rule_.lazy ? "SparseAdam" : rule_.decoupled_weight_decay ? "AdamW" : "Adam";
  }

 protected:
  void allocate_states(int64_t index, const NewState& new_state) override;

 private:
  // The options of the slice's group in the step that runs, with eps as the kernels take it.
  GroupOptions options_of(const Slice& slice) const;

  AdamRule rule_;
  std::vector<AdamStates> states_;
};

}  // namespace ds::optimizers
