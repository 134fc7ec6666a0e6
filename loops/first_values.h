// The sources of the first values of a sharded module: units inside of it that were sharded before, or, for modules on
// the meta device, the program, after their slices were made.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <memory>
#include <unordered_map>
#include <vector>

#include "core/slices/segment.h"
#include "model/state/model_state.h"
#include "zero/parameter_bucket.h"

namespace ds::loops {

class ShardedModel;

// Units of a module around which fully_shard is called: each has ended, and its slices are still there. They are the
// first values of the module's layout, so that no more than one full bucket is in memory at a time.
class EarlierUnits {
 public:
  // Adds a unit that has ended.
  void add(std::shared_ptr<ShardedModel> unit);

  // Whether the units have slices of a parameter, whose own memory has gone then.
  bool have(const at::Tensor& parameter) const { return places_.contains(parameter.unsafeGetTensorImpl()); }
  // The full values of a parameter (of a trained one the float32 ones), valid until the next call; undefined: no unit
  // has them. Collective: ranks ask for the same in the same order.
  at::Tensor value_of(const at::Tensor& parameter);
  // Whether one of the units has never got values.
  bool await_values() const { return await_values_; }

 private:
  struct Place {
    const engine::ModelState* unit;
    size_t bucket;  // trained ones first, then frozen ones
    Segment segment;
  };
  void note(const engine::ModelState& unit, size_t bucket, const zero::ParameterBucket& of);

  std::vector<std::shared_ptr<ShardedModel>> units_;
  std::unordered_map<const void*, Place> places_;  // by parameter
  const engine::ModelState* whole_unit_ = nullptr;
  size_t whole_bucket_ = 0;
  at::Tensor whole_;  // the values of that unit's bucket
  bool await_values_ = false;
};

// Counts the parameters and buffers of a module that are on the meta device.
size_t count_on_meta(const torch::nn::Module& module);

// The placeholder values of a tensor on the meta device: NaN, on `device`; undefined for a tensor elsewhere. Throws
// UsageError, naming it, for a buffer whose dtype has no NaN.
at::Tensor no_values(const zero::Parameter& tensor, c10::Device device);

// Throws UsageError, on all ranks, where slices or buffers have got no values since. Collective.
void require_values(const ShardedModel& model);

}  // namespace ds::loops
