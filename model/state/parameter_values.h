// The values that an engine has of one parameter beside its weights, part by part on the ranks: its master, optimizer
// states, and the reduced gradient. DeepSpeed's deepspeed/utils/tensor_fragment.py.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/slices/segment.h"
#include "model/state/model_state.h"

namespace ds::engine {

// A trained parameter: where it lies in what this rank updates of its bucket. The state outlives it.
class ParameterValues {
 public:
  // `parameter` is as the module has it. Throws UsageError, naming `call`, for a parameter that is none of the model's
  // or is frozen.
  ParameterValues(const ModelState& state, const at::Tensor& parameter, const char* call);

  size_t bucket() const { return bucket_; }
  const std::string& name() const { return name_; }
  // Gathers the full values of the parameter, in its shape and on the device, from flat values of the bucket that are
  // split as its optimizer is. Collective over the ranks that share the parameter.
  at::Tensor whole(const at::Tensor& flat) const;
  // Copies this rank's part: [elements that it updates]. Both are float32, or float64 in a float64 model.
  at::Tensor local(const at::Tensor& flat) const;
  // Writes this rank's part of `value`, which has the parameter's shape; or a value of the part's.
  void write_whole(const at::Tensor& flat, const at::Tensor& value) const;
  void write_local(const at::Tensor& flat, const at::Tensor& value) const;
  int64_t local_numel() const;

  // Calls `use` with the optimizer's state of this name while it is in memory. Throws UsageError with the names there
  // are for another one.
  void use_state(const std::string& state, bool changes, const std::function<void(const at::Tensor& flat)>& use) const;
  // Calls `use` with the master while it is in memory. `changes`: the weights follow it. Not collective by itself.
  void use_master(bool changes, const std::function<void(const at::Tensor& flat)>& use) const;

 private:
  at::ScalarType value_type() const;
  void require_shape(const at::Tensor& value, const std::vector<int64_t>& sizes) const;

  const ModelState& state_;
  const char* call_;
  std::string name_;
  size_t bucket_ = 0;
  std::vector<int64_t> sizes_;              // sizes of the full parameter
  std::shared_ptr<const TensorPart> part_;  // the part that this rank has of it; null: all
  int64_t numel_ = 0;                       // elements that this rank's data-parallel ranks share
  bool split_ = false;
  std::vector<Segment> own_;  // slice_offset counts from the start of what this rank updates
};

}  // namespace ds::engine
